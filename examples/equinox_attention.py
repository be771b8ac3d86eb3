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

from examples.training import B, M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.steps import TrainState, TrainStep

POINTS, FEATURES = 6, 16


class Radius(eqx.Module):
    per_point: eqx.nn.MLP
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout
    pooled: eqx.nn.MLP

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.per_point = eqx.nn.MLP(2, FEATURES, 32, 1, key=first)
        self.attention = eqx.nn.MultiheadAttention(2, FEATURES, key=second)
        self.dropout = eqx.nn.Dropout(0.1)
        self.pooled = eqx.nn.MLP(FEATURES, 1, 32, 1, key=third)

    def __call__(self, points, key=None):
        x = jax.vmap(self.per_point)(points)
        x = x + self.dropout(self.attention(x, x, x), key=key)
        return self.pooled(x.mean(0))[0]


def make_model() -> Radius:
    return Radius(jax.random.key(0))


def model_of(params) -> Radius:
    """Return the model with these weights, without drawing others."""
    return eqx.combine(params, eqx.filter_eval_shape(make_model))


def squared_error(radius, target):
    return jnp.mean((radius - target) ** 2)


def loss(params, micro_batch, key):
    """Return the loss in training, in which each cloud drops other activations."""
    points = micro_batch["points"]
    radius = jax.vmap(model_of(params))(points, jax.random.split(key, len(points)))
    return squared_error(radius, micro_batch["radius"])


def radius(params, micro_batch):
    """Return the largest distances in evaluation, without dropout."""
    return jax.vmap(eqx.nn.inference_mode(model_of(params)))(micro_batch["points"])


def test_loss(params, micro_batch):
    return squared_error(radius(params, micro_batch), micro_batch["radius"])


def clouds(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return clouds of points in the plane, and the largest distance of a point from the origin."""
    points = np.random.default_rng(seed).normal(size=(count, POINTS, 2)).astype(np.float32)
    return {"points": points, "radius": np.linalg.norm(points, axis=-1).max(-1)}


def init(key) -> Radius:
    return eqx.filter(Radius(key), eqx.is_inexact_array)


def make_step() -> tuple[TrainStep, TrainState]:
    key, micro_batch = jax.random.key(0), {name: rows[:B] for name, rows in clouds(0).items()}
    pipeline = Pipeline.from_function(loss, jax.eval_shape(init, key), micro_batch, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(init, key, key=jax.random.key(1))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), test_loss, clouds(0), clouds(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
