"""Train a `flax.linen` convolutional network with batch norm and dropout on two IPUs.

    IPU 0   images -> convolution, batch norm, dropout \\
    IPU 1                                               -> convolution, batch norm, dropout, classifier -> loss

Run it again with more updates, and it continues: python -m examples.linen_convnet FOLDER UPDATES
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from examples.training import B, M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.steps import TrainState, TrainStep

CLASSES = 4


class ConvBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dropout(0.1, deterministic=not train)(x)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for features in (8, 16):
            x = ConvBlock(features)(x, train)
        return nn.Dense(CLASSES)(x.max((1, 2)))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(params, stats, micro_batch, key):
    """Return the loss in training, and the running averages after this micro-batch."""
    x, variables = micro_batch["images"], {"params": params, "batch_stats": stats}
    logits, changed = ConvNet().apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": key})
    return cross_entropy(logits, micro_batch["labels"]), changed["batch_stats"]


def logits(params, stats, micro_batch) -> Any:
    """Return the logits in evaluation, with the running averages and without dropout."""
    return ConvNet().apply({"params": params, "batch_stats": stats}, micro_batch["images"], train=False)


def test_loss(params, stats, micro_batch):
    return cross_entropy(logits(params, stats, micro_batch), micro_batch["labels"])


def images(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return noisy 8 x 8 images of one bright bar each, which is horizontal, vertical or one of two diagonals."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:8, :8]
    bars = np.stack([rows == 4, columns == 4, rows == columns, rows + columns == 7])
    labels = random.integers(0, CLASSES, count)
    noisy = bars[labels] + random.normal(scale=0.3, size=(count, 8, 8))
    return {"images": noisy[..., None].astype(np.float32), "labels": labels.astype(np.int32)}


def variables(key) -> Any:
    return ConvNet().init(key, images(0)["images"][:1], train=False)


def init(key) -> dict:
    return variables(key)["params"]


def make_stats() -> dict:
    """Return the running averages before training. XLA leaves the weights out."""
    return jax.jit(lambda key: variables(key)["batch_stats"])(jax.random.key(0))


def make_step() -> tuple[TrainStep, TrainState]:
    key, stats, micro_batch = jax.random.key(0), make_stats(), {name: rows[:B] for name, rows in images(0).items()}
    shapes = jax.eval_shape(init, key)
    pipeline = Pipeline.from_function(loss, shapes, micro_batch, state=stats, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(init, key, stages=stats, key=jax.random.key(1))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), test_loss, images(0), images(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
