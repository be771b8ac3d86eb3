"""Train a Llama on replicas, IPUs and devices: XLA splits each block among the devices of its IPU.

    mesh (2, 2, tensor=2)           2 replicas of 2 IPUs of 2 devices
    IPU 0   embedding, block \\      Each device has half of the tokens between IPUs, attention and MLP,
    IPU 1                 -> block  and all tokens of half of the heads and hidden units inside of these.

It learns to repeat sequences, continues some, and finds the same next loss on another mesh, from its checkpoint. Run it
again with more updates, and it continues: python -m examples.llama FOLDER UPDATES

B sequences, T and S tokens, D features, G heads of keys and values, R heads of queries for each of them, K features of
a head (Touvron et al. 2023, arXiv:2302.13971; Ainslie et al. 2023, arXiv:2305.13245).
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import with_sharding_constraint as split
from jax.sharding import PartitionSpec

from ipu_jax import Checkpoints, Feed, Pipeline, TrainOptions, configure, fit, make_train_step
from ipu_jax.steps import TrainState, TrainStep

B, MICRO_BATCHES, PERIOD = 4, 4, 3  # sequences of a micro-batch, micro-batches of an update, tokens that are repeated
ROWS, COLUMNS, WHOLE = PartitionSpec("tensor"), PartitionSpec(None, "tensor"), PartitionSpec()
TOKENS, GROUPS, HEADS = COLUMNS, COLUMNS, PartitionSpec(None, None, "tensor")  # of activations (B, T, ...)


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocabulary: int = 8
    tokens: int = 16
    features: int = 32
    groups: int = 4
    queries: int = 2
    head: int = 8
    hidden: int = 64
    blocks: int = 2

    def of_weights(self) -> dict[str, Any]:
        """Return the shape of each weight."""
        v, d, hidden, keys = self.vocabulary, self.features, self.hidden, (self.features, self.groups, self.head)
        queries, out = (d, self.groups, self.queries, self.head), (self.groups, self.queries, self.head, d)
        attention = {"norm 1": (d,), "queries": queries, "keys": keys, "values": keys, "out": out}
        of_block = attention | {"norm 2": (d,), "gate": (d, hidden), "up": (d, hidden), "down": (hidden, d)}
        return {"table": (v, d), "blocks": [of_block] * self.blocks, "norm": (d,), "head": (d, v)}

    def init(self, key) -> dict[str, Any]:
        """Draw the weights. Of this function each IPU makes its own."""
        shapes, tree = jax.tree.flatten(self.of_weights(), is_leaf=lambda leaf: isinstance(leaf, tuple))
        draw = lambda key, shape: 0.1 * jax.random.normal(key, shape) if len(shape) > 1 else jnp.ones(shape)
        return jax.tree.unflatten(tree, map(draw, jax.random.split(key, len(shapes)), shapes))

    def of_specs(self) -> dict[str, Any]:
        """Return how the devices of an IPU split each weight."""
        of_block = dict.fromkeys(("queries", "keys", "values", "gate", "up"), COLUMNS)
        of_block |= {"norm 1": WHOLE, "out": ROWS, "norm 2": WHOLE, "down": ROWS}
        return {"table": COLUMNS, "blocks": [of_block] * self.blocks, "norm": WHOLE, "head": COLUMNS}


def norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain


def rotated(x):
    """Return x (B, T, ..., K), each token turned by its position (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    sin, cos = (wave(angles).reshape(-1, *[1] * (x.ndim - 3), half) for wave in (jnp.sin, jnp.cos))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block(p, x):
    normed_BTD = split(norm(x, p["norm 1"]), WHOLE)
    q_BTGRK = rotated(split(jnp.einsum("btd,dgrk->btgrk", normed_BTD, p["queries"]), HEADS))
    k_BSGK = rotated(split(jnp.einsum("bsd,dgk->bsgk", normed_BTD, p["keys"]), HEADS))
    v_BSGK = split(jnp.einsum("bsd,dgk->bsgk", normed_BTD, p["values"]), HEADS)
    scores = split(jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK), GROUPS) / q_BTGRK.shape[-1] ** 0.5
    chances = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
    read_BTGRK = split(jnp.einsum("bgrts,bsgk->btgrk", chances, v_BSGK), HEADS)
    x = split(x + jnp.einsum("btgrk,grkd->btd", read_BTGRK, p["out"]), TOKENS)
    normed_BTD = split(norm(x, p["norm 2"]), WHOLE)
    hidden = split(jax.nn.silu(normed_BTD @ p["gate"]) * (normed_BTD @ p["up"]), HEADS)
    return split(x + hidden @ p["down"], TOKENS)


def logits(params, tokens):
    x = split(params["table"][tokens], TOKENS)
    for p in params["blocks"]:
        x = block(p, x)
    return split(norm(x, params["norm"]), WHOLE) @ params["head"]


def loss(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["tokens"]), batch["targets"]).mean()


def make_step(sizes: Sizes, replicas: int, ipus: int, tensor: int) -> TrainStep:
    micro_batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((B, sizes.tokens), jnp.int32))
    options: dict[str, Any] = {"ipus": ipus, "replicas": replicas, "axes": {"tensor": tensor}}
    options |= {"specs": sizes.of_specs(), "gradient_accumulation": MICRO_BATCHES // replicas}
    pipeline = Pipeline.from_function(loss, jax.eval_shape(sizes.init, jax.random.key(0)), micro_batch, **options)
    return make_train_step(pipeline, optax.adamw(1e-2), TrainOptions(max_gradient_norm=1.0))


def sequences(seed: int, sizes: Sizes, count: int = 2048) -> dict[str, np.ndarray]:
    """Return sequences that repeat a few random tokens, and the same shifted by one token."""
    repeated = np.random.default_rng(seed).integers(sizes.vocabulary, size=(count, PERIOD), dtype=np.int32)
    tokens = np.tile(repeated, (1, sizes.tokens // PERIOD + 1))
    return {"tokens": tokens[:, : sizes.tokens], "targets": tokens[:, 1 : sizes.tokens + 1]}


def continued(step: TrainStep, state: TrainState, tokens: np.ndarray) -> np.ndarray:
    """Return sequences (replicas, micro-batches, B, T) whose first tokens are kept, and all others predicted."""
    tokens = np.where(np.arange(tokens.shape[-1]) < PERIOD, tokens, 0)
    run = step.model.forward(lambda params, tokens: logits(params, tokens).argmax(-1), tokens[0, 0])
    for t in range(PERIOD, tokens.shape[-1]):
        tokens[..., t] = run(state.params, tokens)[..., t - 1]
    return tokens


def next_loss(step: TrainStep, start: TrainState, data: dict, folder: str) -> float:
    """Return the loss of the first update after the last checkpoint."""
    found = Checkpoints(folder, step).restore(start, resume="must")
    assert found is not None  # "must" raises if there is none
    with Feed(data, step=step, micro_batch=B, state=found.feed) as feed:
        return float(step(found.state, next(iter(feed)))[1].loss)


def main(folder: str, updates: str = "96") -> None:
    step, other = (make_step(Sizes(), *shape) for shape in ((2, 2, 2), (1, 2, 4)))
    start, data = lambda step: step.init(Sizes().init, jax.random.key(0)), sequences(0, Sizes())
    with Feed(data, step=step, micro_batch=B) as feed:
        state = fit(step, start(step), feed, updates=int(updates), checkpoints=folder).state
    expected = sequences(1, Sizes(), 2 * B)["tokens"].reshape(2, 1, B, -1)
    right = continued(step, state, expected) == expected
    print(f"predicted {right[..., PERIOD:].mean():.0%} of the tokens of other sequences")
    losses = [next_loss(each, start(each), data, folder) for each in (step, other)]
    print(f"next loss {losses[0]:.6f}, and on 2 IPUs of 4 devices {losses[1]:.6f}")


if __name__ == "__main__":
    configure(8)
    main(*sys.argv[1:])
