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

from examples.training import M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.nn import gather_stages, linen_stage
from ipu_jax.steps import TrainState, TrainStep

CLASSES = 4


class ConvBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dropout(0.1, deterministic=not train)(x)


class Classifier(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = ConvBlock(self.features)(x, train)
        return nn.Dense(CLASSES)(x.max((1, 2)))


def images(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return noisy 8 x 8 images of one bright bar each, which is horizontal, vertical or one of two diagonals."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:8, :8]
    bars = np.stack([rows == 4, columns == 4, rows == columns, rows + columns == 7])
    labels = random.integers(0, CLASSES, count)
    noisy = bars[labels] + random.normal(scale=0.3, size=(count, 8, 8))
    return {"images": noisy[..., None].astype(np.float32), "labels": labels.astype(np.int32)}


def loss_of(logits, microbatch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"]).mean()


def make_modules() -> list[tuple[nn.Module, Any]]:
    """Return each module with its variables."""
    body, head = ConvBlock(8), Classifier(16)
    key, x = jax.random.key(0), images(0)["images"][:1]
    hidden, of_body = jax.jit(lambda: body.init_with_output(key, x, train=False))()
    return [(body, of_body), (head, jax.jit(lambda: head.init(key, hidden, train=False))())]


def make_step() -> tuple[TrainStep, TrainState]:
    (body, of_body), (head, of_head) = make_modules()
    first = linen_stage(body, of_body, "body", ipu=0, inputs="images", random=True)
    last = linen_stage(head, of_head, "head", ipu=1, loss=loss_of, random=True)
    stages, params, state = gather_stages([first, last])
    step = make_train_step(Pipeline(stages, gradient_accumulation=M), optax.adam(1e-2))
    return step, step.init(params, stages=state, key=jax.random.key(1))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), images(0), images(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
