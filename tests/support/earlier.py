"""States that an earlier commit saved, in `checkpoints/earlier.zip` beside the tests of checkpoints.

`python tests/support/earlier.py` saves them anew. It is run at the commit before a change of where leaves lie, so that
the tests after it restore what that commit wrote. A state's numbers are drawn, so each commit knows them.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Checkpoints, Pipeline, TrainOptions, make_train_step
from support import resumed

SAVED = Path(__file__).parents[1] / "ipu_jax/training/checkpoints/earlier.zip"
STATE = {"mean": np.zeros((5, 6), np.float32)}
PARAMS = {
    "gain": np.float32(2),
    "layers": {"b": np.zeros((5, 6), np.float32), "w": np.ones((5, 6, 6), np.float32)},
    "table": np.ones((11, 6), np.float32),
}


def loss(params: Any, state: Any, tokens: Any) -> Any:
    def layer(x: Any, of_layer: Any) -> Any:
        w, mean = of_layer
        return jnp.tanh(x @ w["w"] + w["b"]) + x, 0.5 * mean + x.mean(0)

    x, means = jax.lax.scan(layer, params["table"][tokens[:, 0]], (params["layers"], state["mean"]))
    log = jax.nn.log_softmax(params["gain"] * x @ params["table"].T)
    return -jnp.take_along_axis(log, tokens[:, 1:], -1).mean(), {"mean": means}


def function_on(ipus: int) -> Any:
    """Return a step of a function with a tied table, rows of layers with state, and a frozen weight."""
    frozen = {"gain": True, "layers": False, "table": False}
    how: dict[str, Any] = {"gradient_accumulation": 2, "frozen": frozen, "state": STATE, "schedule": "1f1b"}
    pipeline = Pipeline.from_function(loss, PARAMS, np.zeros((3, 2), np.int32), ipus=ipus, **how)
    return make_train_step(pipeline, optax.adam(0.1), TrainOptions(ema_decay=0.5))


def stages_on(ipus: int) -> Any:
    """Return a step of stages with a head that is split unevenly over all IPUs, dropout, state and an average."""
    return resumed.step_for(resumed.Topology((0, ipus - 1, None), ipus=ipus), **resumed.EVERYTHING)


STEPS = {"function": function_on, "stages": stages_on}


def first_state(name: str, step: Any) -> Any:
    return step.init(PARAMS, stages=STATE) if name == "function" else resumed.first_state(step)


def saved_state(name: str, step: Any) -> Any:
    return resumed.as_if_trained(step, first_state(name, step))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, step_on in STEPS.items():
            step = step_on(2)
            with Checkpoints(Path(folder) / name, step) as checkpoints:
                checkpoints.save(saved_state(name, step), now=True)
        shutil.make_archive(str(SAVED.with_suffix("")), "zip", folder)


if __name__ == "__main__":
    sys.exit(main())
