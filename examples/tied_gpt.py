"""Train a small GPT on two IPUs, whose embedding and logits share one table that is split by vocabulary.

    IPU 0   table, rows 0-5  \\   block \\           / table, rows 0-5  \\
    IPU 1   table, rows 6-10  ->         -> block -> table, rows 6-10  -> loss

Run it again with more updates, and it continues: python -m examples.tied_gpt FOLDER UPDATES
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from examples.nnx_transformer import FEATURES, HEADS, LENGTH, sequences
from examples.nnx_transformer import VOCABULARY as V
from examples.training import B, M, train
from ipu_jax import Pipeline, configure, everywhere, make_train_step
from ipu_jax.steps import TrainState, TrainStep
from sharded_ops import embedding, from_all, linear_cross_entropy, tied_projection

ROWS = PartitionSpec("ipu")  # each IPU has its rows of the table


def norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(weights, x):
    q, k, v = jnp.moveaxis((norm(x) @ weights["qkv"]).reshape(*x.shape[:-1], 3, HEADS, -1), -3, 0)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


embed = everywhere(partial(embedding, size=V), in_specs=(ROWS, None))
project = everywhere(lambda table, x: from_all(tied_projection(x, table, size=V), -1, size=V), in_specs=(ROWS, None))
cross_entropy = everywhere(partial(linear_cross_entropy, size=V, reduction="mean"), in_specs=(None, ROWS, None))


def hidden(params, micro_batch):
    x = embed(params["table"], micro_batch["tokens"]) + params["positions"]
    for weights in params["blocks"]:
        x = block(weights, x)
    return norm(x)


def logits(params, micro_batch):
    return project(params["table"], hidden(params, micro_batch))


def loss(params, micro_batch):
    return cross_entropy(hidden(params, micro_batch), params["table"], micro_batch["targets"])


def init(key) -> dict:
    keys, d = iter(jax.random.split(key, 2 + 4 * 2)), FEATURES
    draw = lambda *shape: 0.1 * jax.random.normal(next(keys), shape)
    block = lambda: {"qkv": draw(d, 3 * d), "out": draw(d, d), "up": draw(d, 4 * d), "down": draw(4 * d, d)}
    return {"table": draw(V, d), "positions": draw(LENGTH, d), "blocks": [block(), block()]}


def make_step() -> tuple[TrainStep, TrainState]:
    key, micro_batch = jax.random.key(0), {name: rows[:B] for name, rows in sequences(0).items()}
    pipeline = Pipeline.from_function(loss, jax.eval_shape(init, key), micro_batch, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(init, key)


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), loss, sequences(0), sequences(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
