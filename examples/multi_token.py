"""Train multi-token prediction: a second head predicts the token after the next one, with the same split table.

    IPU 0   table, rows 0-14  \\  block 0 \\           / table: loss of the   \\            / table: loss of the
    IPU 1   table, rows 15-28  ->           -> block 1 -> next, embeds it      -> block 2 -> token after it

Run it: python -m examples.multi_token
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, configure, verify
from sharded_ops import embedding, linear_cross_entropy

VOCABULARY, LENGTH, FEATURES, B, M = 29, 6, 8, 4, 4


def norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def cross_entropy(p, x, labels):
    return linear_cross_entropy(norm(x), p["table"], labels, size=VOCABULARY, reduction="mean")


def embed(p, x, microbatch):
    return embedding(p["table"], microbatch["tokens"][:, :-2], size=VOCABULARY)


def block(p, x, microbatch):
    return x + jax.nn.gelu(jnp.cumsum(norm(x), axis=1) @ p["up"]) @ p["down"]


def predict_next(p, x, microbatch):
    labels = microbatch["tokens"][:, 1:-1]
    return Outputs((x, embedding(p["table"], labels, size=VOCABULARY)), loss=cross_entropy(p, x, labels))


def join(p, x_and_next, microbatch):
    x = jnp.concatenate([norm(each) for each in x_and_next], axis=-1) @ p["join"]
    return block(p, x, microbatch)


def predict_next_but_one(p, x, microbatch):
    return 0.3 * cross_entropy(p, x, microbatch["tokens"][:, 2:])


def make_pipeline(schedule: str) -> Pipeline:
    functions = (embed, block, block, predict_next, join, predict_next_but_one)
    groups = ("shared", "block 0", "block 1", "shared", "block 2", "shared")
    ipus = (ALL_IPUS, 0, 1, ALL_IPUS, 1, ALL_IPUS)
    stages = [Stage(*each, name=each[0].__name__) for each in zip(functions, groups, ipus, strict=True)]
    specs = {"shared": {"table": PartitionSpec("ipu")}}
    return Pipeline(stages, gradient_accumulation=M, schedule=schedule, specs=specs)


def make_data() -> tuple[dict, dict]:
    """Return weights, and a batch of M micro-batches of B sequences."""
    random, d = np.random.default_rng(0), FEATURES
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)
    blocks = {f"block {k}": {"up": draw(d, 16), "down": draw(16, d)} for k in range(3)}
    weights = {"shared": {"table": draw(VOCABULARY, d)}, **blocks}
    weights["block 2"]["join"] = draw(2 * d, d)
    return weights, {"tokens": random.integers(0, VOCABULARY, (M, B, LENGTH + 2)).astype(np.int32)}


def main() -> None:
    weights, batch = make_data()
    for schedule in ("1f1b", "zb-h1"):
        pipeline = make_pipeline(schedule)
        print(f"{schedule}:", verify(pipeline, pipeline.shard(weights), batch))


if __name__ == "__main__":
    configure(2)
    main()
