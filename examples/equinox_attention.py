"""Train an Equinox model, MLPs around attention with dropout, on two IPUs.

    IPU 0   points -> MLP of each point \\
    IPU 1                                -> attention, dropout, mean over points, MLP -> loss

Run it again with more updates, and it continues: python -m examples.equinox_attention FOLDER UPDATES
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.training import M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.nn import equinox_stage, gather_stages
from ipu_jax.steps import TrainState, TrainStep

POINTS, FEATURES = 6, 16


class PerPoint(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(2, FEATURES, 32, 1, key=key)

    def __call__(self, points):
        return jax.vmap(self.mlp)(points)


class Pooled(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout
    mlp: eqx.nn.MLP

    def __init__(self, key):
        of_attention, of_mlp = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, FEATURES, key=of_attention)
        self.dropout = eqx.nn.Dropout(0.1)
        self.mlp = eqx.nn.MLP(FEATURES, 1, 32, 1, key=of_mlp)

    def __call__(self, x, *, key):
        x = x + self.dropout(self.attention(x, x, x), key=key)
        return self.mlp(x.mean(0))[0]


def clouds(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return clouds of points in the plane, and the largest distance of a point from the origin."""
    points = np.random.default_rng(seed).normal(size=(count, POINTS, 2)).astype(np.float32)
    return {"points": points, "radius": np.linalg.norm(points, axis=-1).max(-1)}


def loss_of(radius, microbatch):
    return jnp.mean((radius - microbatch["radius"]) ** 2)


def make_modules() -> tuple[PerPoint, Pooled]:
    return eqx.filter_jit(lambda: (PerPoint(jax.random.key(0)), Pooled(jax.random.key(1))))()


def make_step() -> tuple[TrainStep, TrainState]:
    per_point, pooled = make_modules()
    first = equinox_stage(per_point, "per point", ipu=0, inputs="points")
    last = equinox_stage(pooled, "pooled", ipu=1, loss=loss_of, random=True)
    stages, params, state = gather_stages([first, last])
    step = make_train_step(Pipeline(stages, gradient_accumulation=M), optax.adam(1e-2))
    return step, step.init(params, stages=state, key=jax.random.key(2))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), clouds(0), clouds(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
