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

from examples.training import B, M, train
from ipu_jax import Pipeline, configure, make_train_step
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


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.positions = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs), nnx.Embed(LENGTH, FEATURES, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.norm, self.logits = nnx.LayerNorm(FEATURES, rngs=rngs), nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def make_model() -> Transformer:
    return Transformer(nnx.Rngs(0))


def model_of(params) -> Transformer:
    """Return the model with these weights, without drawing others."""
    model = nnx.eval_shape(make_model)
    nnx.update(model, params)
    return model


def cross_entropy(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def loss(params, micro_batch, key):
    """Return the loss in training, in which each dropout layer draws its own numbers of the key."""
    model = model_of(params)
    model.train()
    nnx.reseed(model, default=key)
    return cross_entropy(model(micro_batch["tokens"]), micro_batch["targets"])


def logits(params, micro_batch):
    """Return the logits in evaluation, without dropout."""
    model = model_of(params)
    model.eval()
    return model(micro_batch["tokens"])


def test_loss(params, micro_batch):
    return cross_entropy(logits(params, micro_batch), micro_batch["targets"])


def sequences(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return sequences that count up by 1, 2 or 3, modulo the vocabulary, and the same shifted by one."""
    random = np.random.default_rng(seed)
    start, pace = random.integers(0, VOCABULARY, (count, 1)), random.integers(1, 4, (count, 1))
    tokens = ((start + pace * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def init(key) -> nnx.State:
    return nnx.state(Transformer(nnx.Rngs(key)), nnx.Param)


def make_step() -> tuple[TrainStep, TrainState]:
    key, micro_batch = jax.random.key(0), {name: rows[:B] for name, rows in sequences(0).items()}
    pipeline = Pipeline.from_function(loss, jax.eval_shape(init, key), micro_batch, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(init, key, key=jax.random.key(1))


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), test_loss, sequences(0), sequences(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
