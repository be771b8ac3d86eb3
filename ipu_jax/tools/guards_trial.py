"""Try whether the devices of one IPU can communicate inside a guard, which the other IPU may skip.

    IPU 0   | F: all-reduce over "tensor" |  no task  | ...      two devices each
    IPU 1   |  no task  | F: all-reduce over "tensor" | ...

Where a machine's collectives wait for all devices instead, the program never ends. So a process of its own runs it,
with a time limit.
"""

import os
import signal
import subprocess
import sys
from typing import Any, Final

ABOUT: Final = "Collectives of one IPU's devices inside guards"
WORK: Final = f"{ABOUT}: work"
HANG: Final = f"{ABOUT}: hang: use guards='uniform'"
WRONG: Final = f"{ABOUT}: give wrong numbers: use guards='uniform'"
UNTRIED: Final = f"{ABOUT}: not tried, since that needs 4 devices"

DEVICES: Final = 4
_COMMAND: Final = (sys.executable, "-m", "ipu_jax.tools.guards_trial")
_FLAGS: Final = tuple(f"--xla_cpu_collective_call_{what}_timeout_seconds" for what in ("warn_stuck", "terminate"))
_STATUS: Final = {WORK: 0, UNTRIED: 3, WRONG: 4}


def outcome(command: tuple[str, ...] = _COMMAND, seconds: float = 60.0) -> str:
    """Run the trial in another process, and return a line that says what this machine needs.

    Call it before this process uses jax: a TPU or GPU may serve one process only.

    Args:
        command: what runs the trial.
        seconds: how long it may take, after which it counts as hanging.
    """
    given = os.environ.get("XLA_FLAGS", "")
    # on a CPU, XLA warns after the first time limit, and aborts the process after the second one
    flags = [given, *(f"{flag}=10" for flag in _FLAGS if flag not in given)]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "IPU_JAX_MONITOR": "off"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return HANG
    if done.returncode == -signal.SIGABRT and "rendezvous" in done.stderr.lower():
        return HANG
    for line, status in _STATUS.items():
        if done.returncode == status:
            return line
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"{ABOUT}: not tried, since the trial ended with status {done.returncode}: {last}"


def pipeline_of_groups() -> tuple[Any, Any, Any]:
    """Return a pipeline over two IPUs of two devices each, its weights, and a batch.

    Forward: one all-reduce of (rows, 4) over "tensor" in each stage. Backward: one in the last stage.
    """
    import jax.numpy as jnp
    import numpy as np
    from jax.lax import with_sharding_constraint
    from jax.sharding import PartitionSpec as P

    from ipu_jax import Pipeline, Stage, make_mesh

    def mlp(weights: Any, x: Any) -> Any:
        hidden = with_sharding_constraint(jnp.tanh(x @ weights["up"]), P(None, "tensor"))
        return with_sharding_constraint(hidden @ weights["down"], P())

    pipeline = Pipeline(
        [
            Stage(lambda weights, x, batch: mlp(weights, batch), params="first", ipu=0),
            Stage(lambda weights, x, batch: (mlp(weights, x) ** 2).mean(), params="last", ipu=1),
        ],
        mesh=make_mesh(1, 2, tensor=2),
        schedule="1f1b",
        gradient_accumulation=3,
        guards="own",
        specs={name: {"up": P(None, "tensor"), "down": P("tensor")} for name in ("first", "last")},
    )
    draw = np.random.default_rng(0).standard_normal
    weights = {name: {"up": draw((4, 8), np.float32), "down": draw((8, 4), np.float32)} for name in ("first", "last")}
    return pipeline, weights, draw((3, 5, 4), np.float32)


def main() -> int:
    """Run the trial in this process, and return its status."""
    from ipu_jax import configure, verify
    from ipu_jax.pipelines import VerificationError

    try:
        configure(DEVICES)
    except ValueError:
        return _STATUS[UNTRIED]
    pipeline, weights, batch = pipeline_of_groups()
    try:
        verify(pipeline, pipeline.shard(weights), batch)
    except VerificationError:
        return _STATUS[WRONG]
    return _STATUS[WORK]


if __name__ == "__main__":
    sys.exit(main())
