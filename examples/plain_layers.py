"""Train residual layers in plain JAX, a loop over a list of weights, on two IPUs.

    IPU 0   x -> layers 0 to 3 \\
    IPU 1                       -> layers 4 to 7 -> loss

Run it again with more updates, and it continues: python -m examples.plain_layers FOLDER UPDATES
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax

from examples.training import B, M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.steps import TrainState, TrainStep

LAYERS, FEATURES = 8, 8


def residual(weights, x):
    return x + jnp.tanh(x @ weights["in"]) @ weights["out"]


def outputs(params, micro_batch):
    x = micro_batch["x"]
    for weights in params:
        x = residual(weights, x)
    return x


def loss(params, micro_batch):
    return jnp.mean((outputs(params, micro_batch) - micro_batch["y"]) ** 2)


def make_layers() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    shapes = {"in": (FEATURES, 2 * FEATURES), "out": (2 * FEATURES, FEATURES)}
    return [
        {name: random.normal(scale=0.2, size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]


def sorted_rows(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return rows of numbers, and the same in order."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sort(x, axis=-1)}


def make_step() -> tuple[TrainStep, TrainState]:
    params, micro_batch = make_layers(), {name: rows[:B] for name, rows in sorted_rows(0).items()}
    pipeline = Pipeline.from_function(loss, params, micro_batch, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(params)


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), loss, sorted_rows(0), sorted_rows(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
