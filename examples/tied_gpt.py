"""Train a small GPT on two IPUs, whose embedding and logits share one table that is split by vocabulary.

    IPU 0   table, rows 0-5  \\   block \\           / table, rows 0-5  \\
    IPU 1   table, rows 6-10  ->         -> block -> table, rows 6-10  -> loss

Run it again with more updates, and it continues: python -m examples.tied_gpt FOLDER UPDATES
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from examples.nnx_transformer import FEATURES, HEADS, LENGTH, VOCABULARY, sequences
from examples.training import M, train
from ipu_jax import ALL_IPUS, Pipeline, Stage, configure, make_train_step
from ipu_jax.steps import TrainState, TrainStep
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection


def norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def embed(weights, _, microbatch):
    return embedding(weights["table"], microbatch["tokens"], size=VOCABULARY) + weights["positions"]


def block(weights, x, microbatch):
    q, k, v = jnp.moveaxis((norm(x) @ weights["qkv"]).reshape(*x.shape[:-1], 3, HEADS, -1), -3, 0)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def logits_of(weights, x, microbatch):
    return tied_projection(norm(x), weights["table"], size=VOCABULARY)


def project(weights, x, microbatch):
    logits = logits_of(weights, x, microbatch)
    return log_softmax_cross_entropy(logits, microbatch["targets"], size=VOCABULARY).mean()


def make_weights() -> dict[str, dict[str, np.ndarray]]:
    random, d = np.random.default_rng(0), FEATURES
    draw = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    blocks = {f"block {i}": {name: draw(*shape) for name, shape in shapes.items()} for i in range(2)}
    return {"shared": {"table": draw(VOCABULARY, d), "positions": draw(LENGTH, d)}, **blocks}


def make_step() -> tuple[TrainStep, TrainState]:
    first = Stage(embed, params="shared", ipu=ALL_IPUS, name="embedding")
    blocks = [Stage(block, params=f"block {i}", ipu=i) for i in range(2)]
    last = Stage(project, "shared", ALL_IPUS, predict=logits_of, predict_specs=PartitionSpec(None, None, "ipu"))
    specs = {"shared": {"table": PartitionSpec("ipu"), "positions": PartitionSpec()}}
    pipeline = Pipeline([first, *blocks, last], gradient_accumulation=M, specs=specs)
    step = make_train_step(pipeline, optax.adam(1e-2))
    return step, step.init(make_weights())


def main(folder: str, updates: str = "20") -> None:
    train(*make_step(), sequences(0), sequences(1), folder=folder, updates=int(updates))


if __name__ == "__main__":
    configure(2)
    main(*sys.argv[1:])
