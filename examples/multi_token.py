"""Train multi-token prediction: a second head predicts the token after the next one, with the same split table.

    IPU 0   table, rows 0-14  \\  blocks 0-1 \\   / table: loss of the \\            / table: loss of the
    IPU 1   table, rows 15-28  ->            ->   next, embeds it    -> block 2 -> token after it

Run it: python -m examples.multi_token
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax import Pipeline, configure, everywhere, verify
from sharded_ops import embedding, linear_cross_entropy

V, LENGTH, FEATURES, B, M = 29, 6, 8, 4, 4
ROWS = PartitionSpec("ipu")  # each IPU has its rows of the table


def norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(p, x):
    return x + jax.nn.gelu(jnp.cumsum(norm(x), axis=1) @ p["up"]) @ p["down"]


def mean_loss(table, x, labels):
    return linear_cross_entropy(norm(x), table, labels, size=V, reduction="mean")


embed = everywhere(lambda table, tokens: embedding(table, tokens, size=V), in_specs=(ROWS, None))
cross_entropy = everywhere(mean_loss, in_specs=(ROWS, None, None))


def loss(params, microbatch):
    table, (first, second, third) = params["table"], params["blocks"]
    tokens, following, after_it = (microbatch["tokens"][:, k : k + LENGTH] for k in range(3))
    x = block(second, block(first, embed(table, tokens)))
    loss_of_next, embedded = cross_entropy(table, x, following), embed(table, following)
    x = jnp.concatenate([norm(x), norm(embedded)], axis=-1) @ params["join"]
    return loss_of_next + 0.3 * cross_entropy(table, block(third, x), after_it)


def make_data() -> tuple[dict, dict]:
    """Return weights, and a batch of M micro-batches of B sequences."""
    random, d = np.random.default_rng(0), FEATURES
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)
    blocks = [{"up": draw(d, 16), "down": draw(16, d)} for _ in range(3)]
    weights = {"table": draw(V, d), "blocks": blocks, "join": draw(2 * d, d)}
    return weights, {"tokens": random.integers(0, V, (M, B, LENGTH + 2)).astype(np.int32)}


def make_pipeline(schedule: str) -> Pipeline:
    weights, batch = make_data()
    one = {"tokens": batch["tokens"][0]}
    return Pipeline.from_function(loss, weights, one, ipus=2, gradient_accumulation=M, schedule=schedule)


def main() -> None:
    weights, batch = make_data()
    for schedule in ("1f1b", "zb-h1"):
        pipeline = make_pipeline(schedule)
        print(f"{schedule}:", verify(pipeline, pipeline.shard(weights), batch))


if __name__ == "__main__":
    configure(2)
    main()
