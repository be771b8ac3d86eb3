"""Train an unchanged Flax GPT, whose embedding and logits share one table, on four IPUs.

    IPU 0   tokens -> embedding, blocks \\
    IPU 1                                -> blocks \\
    IPU 2                                           -> blocks \\
    IPU 3                                                      -> blocks, norm, logits -> loss

The library cuts `loss` into stages by itself; the lines that make it a pipeline are marked below. Run it again with
more updates, and it continues: python -m examples.any_function FOLDER UPDATES
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.training import B, M, train
from ipu_jax import Pipeline, configure, make_train_step, verify
from ipu_jax.steps import TrainState, TrainStep  # pipeline

VOCABULARY, LENGTH, FEATURES, HEADS, LAYERS = 64, 16, 32, 2, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(FEATURES)(nn.gelu(nn.Dense(4 * FEATURES)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, FEATURES, name="embed")
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, FEATURES))
        mask = nn.make_causal_mask(tokens)
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x, mask)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def logits(params, micro_batch) -> Any:
    return GPT().apply({"params": params}, micro_batch["tokens"])


def loss(params, micro_batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, micro_batch), micro_batch["targets"]).mean()


def sequences(seed: int, count: int = 128) -> dict[str, np.ndarray]:
    """Return sequences that count up by 1, 2 or 3, modulo the vocabulary, and the same shifted by one."""
    random = np.random.default_rng(seed)
    start, pace = random.integers(0, VOCABULARY, (count, 1)), random.integers(1, 4, (count, 1))
    tokens = ((start + pace * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def init(key):
    return GPT().init(key, jnp.zeros((B, LENGTH), jnp.int32))["params"]


def make_step() -> tuple[TrainStep, TrainState]:
    key, micro_batch = jax.random.key(0), {name: rows[:B] for name, rows in sequences(0).items()}
    shapes = jax.eval_shape(init, key)
    pipeline = Pipeline.from_function(loss, shapes, micro_batch, ipus=4, gradient_accumulation=M)  # pipeline
    step = make_train_step(pipeline, optax.adam(3e-3))  # pipeline
    return step, step.init(init, key)


def main(folder: str, updates: str = "20") -> None:
    step, start = make_step()
    result = train(step, start, loss, sequences(0), sequences(1), folder=folder, updates=int(updates))
    print(step.model)
    batch = {name: rows[: M * B].reshape(M, B, LENGTH) for name, rows in sequences(0).items()}
    print(verify(step.model, result.state.params, batch))


if __name__ == "__main__":
    configure(4)
    main(*sys.argv[1:])
