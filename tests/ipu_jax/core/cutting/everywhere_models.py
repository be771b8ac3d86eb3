"""Models with operations on all IPUs, each with a dense twin that is written apart from them, in plain jax.

No size is divisible by the numbers of IPUs in the tests: a vocabulary of 21, 10 classes, 13 hidden features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ipu_jax import everywhere
from sharded_ops import argmax, embedding, linear_cross_entropy, log_softmax_cross_entropy, matmul
from support.inputs import normal

V, D, T, CLASSES, HIDDEN = 21, 8, 5, 10, 13
BLOCKS = 5


class Example(NamedTuple):
    """A loss, its dense twin, weights, and a function that makes a micro-batch of a random generator."""

    loss: Callable[..., Any]
    dense: Callable[..., Any]
    params: Any
    micro_batch: Callable[[np.random.Generator], Any]
    split: tuple[str, ...]


def weights(*shape: int, seed: int) -> np.ndarray:
    return np.asarray(normal(shape, seed=seed) / np.sqrt(shape[-1]))


def tokens_of(random):
    tokens = random.integers(0, V, (2, T + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


look_up = everywhere(lambda table, ids: embedding(table, ids, size=V), in_specs=(P("ipu"), P()))
head = everywhere(
    lambda table, x, y: linear_cross_entropy(x, table, y, size=V, reduction="mean"), in_specs=(P("ipu"), P(), P())
)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def blocks(params, x):
    for w in params["blocks"]:
        x = x + jnp.tanh(norm(x) @ w["up"]) @ w["down"]
    return norm(x) * params["scale"]


def dense_cross_entropy(logits, targets):
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, targets[..., None], -1).mean()


def with_blocks(**others: Any) -> dict[str, Any]:
    of_block = lambda k: {"up": weights(D, 2 * D, seed=10 + k), "down": weights(2 * D, D, seed=30 + k)}
    return {"blocks": [of_block(k) for k in range(BLOCKS)], "scale": np.ones(D, np.float32), **others}


def tied() -> Example:
    """A table that is looked up and projected to."""

    def loss(params, mb):
        x = look_up(params["table"], mb["tokens"]) + params["positions"]
        return head(params["table"], blocks(params, x), mb["targets"])

    def dense(params, mb):
        x = params["table"][mb["tokens"]] + params["positions"]
        return dense_cross_entropy(blocks(params, x) @ params["table"].T, mb["targets"])

    params = with_blocks(table=weights(V, D, seed=1), positions=weights(T, D, seed=2))
    return Example(loss, dense, params, tokens_of, ("table",))


def head_alone() -> Example:
    """A head with a bias, columns split, whose loss and accuracy are one operation; the table is local."""

    def of_shard(p, x, y):
        logits = matmul(x, p["w"]) + p["b"]
        return log_softmax_cross_entropy(logits, y, size=V).mean(), jnp.sum(argmax(logits, size=V) == y)

    on_all = everywhere(of_shard, in_specs=({"w": P(None, "ipu"), "b": P("ipu")}, P(), P()))

    def loss(params, mb):
        x = blocks(params, params["table"][mb["tokens"]])
        value, correct = on_all(params["head"], x, mb["targets"])
        return value, {"correct": correct}

    def dense(params, mb):
        logits = blocks(params, params["table"][mb["tokens"]]) @ params["head"]["w"] + params["head"]["b"]
        return dense_cross_entropy(logits, mb["targets"])

    of_head = {"w": weights(D, V, seed=3), "b": weights(V, seed=4)}
    return Example(loss, dense, with_blocks(table=weights(V, D, seed=1), head=of_head), tokens_of, ("['w']", "['b']"))


def mlps_in_the_middle() -> Example:
    """Each layer has an MLP whose hidden features are split; padding that were not zero would show: sigmoid(0) is."""
    mlp = everywhere(
        lambda x, up, down: jax.lax.psum(jax.nn.sigmoid(x @ up) @ down, "ipu"), in_specs=(P(), P(None, "ipu"), P("ipu"))
    )

    def run(params, mb, mlp):
        x = mb["x"]
        for w in params["layers"]:
            x = x + jnp.tanh(norm(x) @ w["w"])
            x = x + mlp(norm(x), w["up"], w["down"])
        return jnp.mean((x @ params["out"] - mb["y"]) ** 2)

    of_layer = lambda k: {
        "w": weights(D, D, seed=10 + k),
        "up": weights(D, HIDDEN, seed=20 + k),
        "down": weights(HIDDEN, D, seed=30 + k),
    }
    params = {"layers": [of_layer(k) for k in range(4)], "out": weights(D, 3, seed=5)}
    dense = lambda params, mb: run(params, mb, lambda x, up, down: jax.nn.sigmoid(x @ up) @ down)
    make = lambda random: {"x": random.normal(size=(4, D)).astype("f"), "y": random.normal(size=(4, 3)).astype("f")}
    return Example(lambda params, mb: run(params, mb, mlp), dense, params, make, ("up", "down"))


def two_heads() -> Example:
    """Two heads on one table: one closes over values of the function, and has a cast and a transpose before it."""

    def loss(params, mb):
        x = blocks(params, look_up(params["table"], mb["tokens"]))
        columns = (2 * params["table"].astype(jnp.float32)).T

        def far(columns):
            logits = matmul(x[:, :-1], columns)
            return log_softmax_cross_entropy(logits, mb["targets"][:, 1:], size=V).mean()

        of_far = everywhere(far, in_specs=P(None, "ipu"))(columns)
        return head(params["table"], x, mb["targets"]) + 0.5 * of_far

    def dense(params, mb):
        x = blocks(params, params["table"][mb["tokens"]])
        near = dense_cross_entropy(x @ params["table"].T, mb["targets"])
        return near + 0.5 * dense_cross_entropy(2 * x[:, :-1] @ params["table"].T, mb["targets"][:, 1:])

    return Example(loss, dense, with_blocks(table=weights(V, D, seed=1)), tokens_of, ("table",))


def stacked_tables() -> Example:
    """Two tables in one stacked leaf, under `jax.checkpoint` and `jax.jit`."""

    def loss(params, mb):
        x = look_up(params["tables"][0], mb["tokens"])
        last = jax.checkpoint(jax.jit(lambda x: head(params["tables"][1], blocks(params, x), mb["targets"])))
        return last(x)

    def dense(params, mb):
        x = blocks(params, params["tables"][0][mb["tokens"]])
        return dense_cross_entropy(x @ params["tables"][1].T, mb["targets"])

    return Example(loss, dense, with_blocks(tables=weights(2, V, D, seed=1)), tokens_of, ("tables",))


def read_whole_as_well() -> Example:
    """A table of which a local penalty reads all: it cannot lie split."""

    def loss(params, mb):
        x = blocks(params, look_up(params["table"], mb["tokens"]))
        x = x @ (params["table"].T @ params["table"] / V)
        return head(params["table"], x, mb["targets"])

    def dense(params, mb):
        x = blocks(params, params["table"][mb["tokens"]])
        x = x @ (params["table"].T @ params["table"] / V)
        return dense_cross_entropy(x @ params["table"].T, mb["targets"])

    return Example(loss, dense, with_blocks(table=weights(V, D, seed=1)), tokens_of, ())


EXAMPLES = {
    make.__name__: make
    for make in (tied, head_alone, mlps_in_the_middle, two_heads, stacked_tables, read_whole_as_well)
}
