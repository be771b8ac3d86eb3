"""Measure the memory of models that fit on no device, or on no host: first states, and the optimizer's on the host.

Four instances of one IPU each make the first state of a step with adam, of layers of 2 GB together: by
`step.init(init_fn, key)`, and by `step.init(weights)` of weights that each instance has drawn whole. What an instance
needs is the peak of its process's memory, with Python, jax and what XLA compiles.

How many bytes a chip needs for each weight that it holds, XLA's compiler says for a v5e that is not there: of layers of
4 bytes per weight, 1.07 GB of them on each chip, in the modes of a training step with adam.

    python benchmarks/large_models.py [--check]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from chips import is_installed
from figures import Figures
from ipu_jax import Pipeline, TrainOptions, make_train_step, popdist
from ipu_jax.chips import Memory, compile_ahead, describe
from ipu_jax.steps import replicate

LAYERS, FEATURES, IPUS = 32, 4096, 4
CHIPS = "v5e:2x2"
OF_CHIP, WIDTH = 16, 4096  # layers on a chip
OFFLOAD: dict[str, Any] = {"offload": ("optimizer",)}
MODES: dict[str, tuple[int, int, dict[str, Any]]] = {  # IPUs, replicas, options
    "a function on one chip": (1, 1, {}),
    "a function on one chip, offload": (1, 1, OFFLOAD),
    "4 IPUs": (4, 1, {}),
    "4 IPUs, offload": (4, 1, OFFLOAD),
    "4 IPUs, average": (4, 1, {"ema_decay": 0.999}),
    "4 IPUs, average, offload": (4, 1, {"ema_decay": 0.999, **OFFLOAD}),
    "4 IPUs, precision 16.16": (4, 1, {"precision": "16.16"}),
    "4 IPUs, precision 16.16, offload": (4, 1, {"precision": "16.16", **OFFLOAD}),
    "2 IPUs x 2 replicas": (2, 2, {}),
    "2 IPUs x 2 replicas, shard_optimizer": (2, 2, {"shard_optimizer": True}),
    "2 IPUs x 2 replicas, shard_optimizer, offload": (2, 2, {"shard_optimizer": True, **OFFLOAD}),
}
ITSELF = "IPU_JAX_LARGE_MODELS"
MB = 1e6


def weights(key: jax.Array) -> list[jax.Array]:
    return [0.02 * jax.random.normal(k, (FEATURES, FEATURES)) for k in jax.random.split(key, LAYERS)]


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def instance(how: str, folder: Path) -> None:
    """Make a state in one of several processes, and write what it took."""
    popdist.init()
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((4, FEATURES), "float32")
    shapes = jax.eval_shape(weights, key)
    pipeline = Pipeline.from_function(loss, shapes, x, ipus=IPUS, gradient_accumulation=2)
    step = make_train_step(pipeline, optax.adam(1e-3))
    state = step.init(weights, key) if how == "born" else step.init(jax.jit(weights)(key))
    jax.block_until_ready(state)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    shards = [shard for array in jax.tree.leaves(state) for shard in array.addressable_shards]
    found = {
        "peak": usage.ru_maxrss * 1024,
        "held": sum(shard.data.nbytes for shard in shards),
        "cpu": usage.ru_utime + usage.ru_stime,
        "sums": [float(np.abs(np.asarray(shard.data, np.float64)).sum()) for shard in shards],
    }
    (folder / f"{how}-{jax.process_index()}.json").write_text(json.dumps(found))


def run(how: str) -> list[dict[str, Any]]:
    """Return what each instance wrote."""
    poprun = [sys.executable, "-m", "ipu_jax.distributed.poprun", "--num-replicas", "1"]
    poprun += ["--num-instances", f"{IPUS}", "--ipus-per-replica", f"{IPUS}"]
    with tempfile.TemporaryDirectory() as folder:
        size = json.dumps({"LAYERS": LAYERS, "FEATURES": FEATURES, "IPUS": IPUS})
        environment = {**os.environ, ITSELF: f"{how} {folder}", f"{ITSELF}_SIZE": size}
        subprocess.run([*poprun, sys.executable, __file__], check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads((Path(folder) / f"{how}-{n}.json").read_text()) for n in range(IPUS)]


def memory_of_a_chip(ipus: int, replicas: int, options: dict[str, Any]) -> tuple[Memory, int]:
    """Return what a described chip needs for a training step, and how many weights it holds."""
    chips = describe(CHIPS)[: ipus * replicas]
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * (OF_CHIP * ipus)
    rows = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    if ipus == 1:
        model = replicate(loss, replication_factor=replicas, gradient_accumulation=4, devices=chips)
    else:
        given: dict[str, Any] = {"ipus": ipus, "replicas": replicas, "devices": chips, "schedule": "1f1b"}
        model = Pipeline.from_function(loss, shapes, rows, gradient_accumulation=4, **given)
    step = make_train_step(model, optax.adam(1e-3), TrainOptions(**options))
    batch = jax.ShapeDtypeStruct((*[replicas] * (replicas > 1), 4, *rows.shape), "float32")
    return compile_ahead(step, shapes, batch).memory, OF_CHIP * WIDTH**2


def on_chips(figures: Figures) -> None:
    for name, mode in MODES.items():
        memory, count = memory_of_a_chip(*mode)
        figures.add(f"bytes a weight, held by a v5e, {name}", memory.arguments / count)
        figures.add(f"bytes a weight, more while a step runs, {name}", (memory.temporary or 0) / count)
        if memory.host:
            figures.add(f"bytes a weight, in the host's memory, {name}", memory.host / count)


def main() -> int:
    figures = Figures("large models: memory of a first state made where it is held, and of one made whole")
    figures.shrink(__name__, LAYERS=4, FEATURES=64, IPUS=2, OF_CHIP=2, WIDTH=64, MODES=dict([*MODES.items()][1:2]))
    born, whole = run("born"), run("whole")
    leaf, unlike = 4 * FEATURES**2, [one["sums"] != other["sums"] for one, other in zip(born, whole, strict=True)]
    figures.add("instances with a difference from the state of whole weights", sum(unlike), 0)
    figures.add("bytes of the weights, MB", LAYERS * leaf / MB)
    figures.add("state that an instance holds, MB", max(one["held"] for one in born) / MB)
    for name, found, most in (("made in place", born, 300), ("made whole", whole, None)):
        peak = max(one["peak"] for one in found)
        over = max(one["peak"] - one["held"] for one in found) - 4 * leaf
        figures.add(f"peak memory of an instance, {name}, MB", peak / MB)
        figures.add(f"peak less what it holds and 4 x a leaf, {name}, MB", over / MB, most)
    figures.add(
        "CPU time of all instances, in place / whole", sum(b["cpu"] for b in born) / sum(w["cpu"] for w in whole)
    )
    if is_installed(CHIPS):
        on_chips(figures)
    else:
        figures.leave_out("bytes on a v5e", "XLA's compiler for TPU: make aot")
    return figures.status()


if __name__ == "__main__":
    if ITSELF in os.environ:
        globals().update(json.loads(os.environ[f"{ITSELF}_SIZE"]))
        how, _, folder = os.environ[ITSELF].partition(" ")
        instance(how, Path(folder))
        raise SystemExit(0)
    raise SystemExit(main())
