"""Train a `flax.nnx` transformer with dropout on two IPUs.

    IPU 0   tokens -> embedding, block \\
    IPU 1                               -> block, norm, logits -> loss

Run it again with more updates, and it continues: python -m examples.nnx_transformer FOLDER UPDATES
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.training import M, train
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.nn import gather_stages, nnx_stage
from ipu_jax.steps import TrainState, TrainStep

VOCABULARY, LENGTH, FEATURES, HEADS = 11, 12, 16, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(FEATURES, rngs=rngs), nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, dropout_rate=0.1, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs),
            nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs),
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        seen = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=seen)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class First(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.positions = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs), nnx.Embed(LENGTH, FEATURES, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens):
        return self.block(self.tokens(tokens) + self.positions(jnp.arange(LENGTH)))


class Last(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block, self.norm = Block(rngs), nnx.LayerNorm(FEATURES, rngs=rngs)
        self.logits = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, x):
        return self.logits(self.norm(self.block(x)))


def sequences(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return sequences that count up by 1, 2 or 3, modulo the vocabulary, and the same shifted by one."""
    random = np.random.default_rng(seed)
    start, pace = random.integers(0, VOCABULARY, (count, 1)), random.integers(1, 4, (count, 1))
    tokens = ((start + pace * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss_of(logits, microbatch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"]).mean()


def make_modules() -> tuple[First, Last]:
    return nnx.jit(lambda: (First(nnx.Rngs(0)), Last(nnx.Rngs(1))))()


def make_step() -> tuple[TrainStep, TrainState]:
    of_ipu_0, of_ipu_1 = make_modules()
    first = nnx_stage(of_ipu_0, "first", ipu=0, inputs="tokens")
    last = nnx_stage(of_ipu_1, "last", ipu=1, loss=loss_of)
    stages, params, state = gather_stages([first, last])
    step = make_train_step(Pipeline(stages, gradient_accumulation=M), optax.adam(1e-2))
    return step, step.init(params, stages=state, key=jax.random.key(1))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), sequences(0), sequences(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
