"""python -m ipu_jax: print the versions, the devices and the cores, verify a pipeline on two IPUs, and try guards.

    $ python -m ipu_jax
    ipu_jax 0.1.0 (jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, optax 0.2.8, Python 3.11.9)
    cpu: 2 virtual IPUs on 2 cores
    Self-test passed: loss 2.42, unsharded 2.42, relative error 0.0e+00; 2 gradients, largest relative error 1.7e-07 ...
    Collectives of one IPU's devices inside guards: work

Its exit code is 0 if the loss and gradients equal the unsharded program's, 1 if they don't, and 2 if the arguments are
wrong or two IPUs are not available. `guards_trial.py` says what the last line means.
"""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from ipu_jax import cli
from ipu_jax.tools import guards_trial

PROG = "python -m ipu_jax"
IPUS = 2


def command() -> NoReturn:
    """Run the self-test as the process's own command."""
    cli.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test, and return the exit code."""
    parser = cli.Parser(
        PROG,
        "Prints the versions, the devices and the cores, verifies a small pipeline on two IPUs, and says whether IPUs "
        "of several devices can communicate inside guards. Exits with 0 if pipelines equal the unsharded program.",
    )
    parser.parse(argv)
    print(cli.versions("ipu_jax"))
    tried = guards_trial.outcome()
    try:
        from ipu_jax import configure  # imports jax

        devices = configure(IPUS)
    except ValueError as error:
        parser.refuse(error)
    print(_described(devices))
    from ipu_jax.pipelines import VerificationError

    try:
        print(f"Self-test passed: {_verified()}")
    except VerificationError as error:
        print(f"Self-test failed: {error}")
        return 1
    print(tried)
    return int(tried == guards_trial.WRONG)


def _described(devices: Sequence[Any]) -> str:
    import jax

    platform, count = devices[0].platform, jax.local_device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if platform == "cpu":
        return f"cpu: {count} virtual IPUs on {cores} cores"
    return f"{platform}: {count} devices ({devices[0].device_kind}); {cores} cores"


def _verified() -> Any:
    """Verify a local stage and a concurrent one, with random numbers for which no gradient is 0."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec

    from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh, verify
    from ipu_jax.pipelines import IPU_AXIS
    from sharded_ops import log_softmax_cross_entropy, matmul

    def body(weights: Any, x: None, batch: Any) -> Any:
        return jnp.tanh(batch["x"] @ weights)

    def head(weights: Any, x: Any, batch: Any) -> Any:
        return log_softmax_cross_entropy(matmul(x, weights), batch["y"], size=10).mean()

    def dense_head(weights: Any, x: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ weights, batch["y"]).mean()

    pipeline = Pipeline(
        [Stage(body, params="body", ipu=0), Stage(head, params="head", ipu=ALL_IPUS, reference=dense_head)],
        mesh=make_mesh(1, IPUS),
        gradient_accumulation=3,
        specs={"head": PartitionSpec(None, IPU_AXIS)},
    )
    random = np.random.default_rng(0)
    shapes = {"body": (8, 16), "head": (16, 10), "x": (3, 4, 8)}
    drawn = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    params = pipeline.shard({name: drawn[name] for name in ("body", "head")})
    return verify(pipeline, params, {"x": drawn["x"], "y": random.integers(0, 10, (3, 4), dtype=np.int32)})
