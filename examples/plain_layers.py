"""Train residual layers in plain JAX, a loop over a list of weights, on two IPUs.

    IPU 0   x -> layers 0 to 3 \\
    IPU 1                       -> layers 4 to 7 -> loss

Run it again with more updates, and it continues: python -m examples.plain_layers FOLDER UPDATES
"""

import sys

import jax
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


def init(key) -> list[dict[str, jax.Array]]:
    shapes = {"in": (FEATURES, 2 * FEATURES), "out": (2 * FEATURES, FEATURES)}
    keys = iter(jax.random.split(key, 2 * LAYERS))
    return [{name: 0.2 * jax.random.normal(next(keys), s) for name, s in shapes.items()} for _ in range(LAYERS)]


def sorted_rows(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return rows of numbers, and the same in order."""
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sort(x, axis=-1)}


def make_step() -> tuple[TrainStep, TrainState]:
    key, micro_batch = jax.random.key(0), {name: rows[:B] for name, rows in sorted_rows(0).items()}
    pipeline = Pipeline.from_function(loss, jax.eval_shape(init, key), micro_batch, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(init, key)


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), loss, sorted_rows(0), sorted_rows(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
