"""Train a plain list of like residual layers, without any library, on two IPUs.

    IPU 0   x -> layers 0 to 3 \\
    IPU 1                       -> layers 4 to 7 -> loss

Run it again, and it continues where it ended: python -m examples.plain_layers FOLDER
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from examples.training import M, evaluate, train
from ipu_jax import Pipeline, Stage, TrainState, TrainStep, configure, make_train_step

LAYERS, FEATURES = 8, 8


def residual(weights, x):
    return x + jnp.tanh(x @ weights["in"]) @ weights["out"]


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


def layer(weights, x, microbatch):
    return residual(weights, microbatch["x"] if x is None else x)


def loss_of(_, x, microbatch):
    return jnp.mean((x - microbatch["y"]) ** 2)


def make_step() -> tuple[TrainStep, TrainState]:
    stages = [Stage(layer, params=f"layer {i}", ipu=2 * i // LAYERS) for i in range(LAYERS)]
    pipeline = Pipeline([*stages, Stage(loss_of, ipu=1)], gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init({f"layer {i}": weights for i, weights in enumerate(make_layers())})


def main(folder: Path) -> None:
    step, start = make_step()
    state = train(step, start, sorted_rows(0), folder=folder, updates=20)
    print(f"{int(state.step)} updates: loss {evaluate(step, state, sorted_rows(1)):.3f} on other rows")


if __name__ == "__main__":
    configure(2)
    main(Path(sys.argv[1]).absolute())
