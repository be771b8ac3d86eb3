"""Write the last piece of a model in many ways: a product with a table or matrix of V columns, and a loss of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from support.inputs import normal

B, T, D, V = 4, 6, 16, 50
"""Rows, tokens, features, and a vocabulary that neither 3 nor 4 IPUs divide."""
H, TABLE, MATRIX, BIAS = normal([(B, T, D), (V, D), (D, V), (V,)])
LABELS = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T))).at[0, 0].set(V - 1)
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T)))


class Tail(NamedTuple):
    """A loss of weights and hidden states.

    Attributes:
        loss: of (weights, hidden).
        weights: the weights.
        dims: per weight that lies split, the dim of the vocabulary.
        gathered: whether some of its operations have no rule.
        tolerance: the largest relative error.
    """

    loss: Callable[[Any, Any], Any]
    weights: dict[str, Any] = {"table": TABLE}  # noqa: RUF012, a default of a named tuple
    dims: dict[str, int] = {"table": 0}  # noqa: RUF012, a default of a named tuple
    gathered: bool = False
    tolerance: float = 2e-6


cross_entropy: Any = optax.softmax_cross_entropy_with_integer_labels


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvp(lambda xs, ts: (jnp.round(xs[0]), ts[0]))


@jax.custom_vjp
def clipped(x):
    """Return x; its gradient is clipped, which is not linear."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_vjp
def normed(x):
    """Return x; its gradient is divided by a norm, which mixes rows."""
    return x


normed.defvjp(lambda x: (x, None), lambda _, g: (g / (1 + jnp.linalg.norm(g)),))


def taken(x, labels=LABELS, **how):
    return jnp.take_along_axis(x, labels[..., None], -1, **how)[..., 0]


def focal(logits):
    p = taken(jax.nn.softmax(logits))
    return -((1 - p) ** 2) * jnp.log(p)


def chunks(loss, h, table):
    """Return losses of chunks of tokens, whose logits do not exist at once."""
    return jax.lax.map(lambda of: loss(of[0] @ table.T, of[1]), (h, LABELS))


def running(logits):
    """Return a loss of an average over rows, which a scan computes."""
    mean, losses = jax.lax.scan(
        lambda m, row: (0.9 * m + 0.1 * row[0], jax.nn.logsumexp(m - row[0], -1)), jnp.zeros_like(logits[0]), (logits,)
    )
    return losses + cross_entropy(mean, LABELS[0])


def contrastive(w, h):
    table = w["table"] / jnp.linalg.norm(w["table"], axis=1, keepdims=True)
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
    return cross_entropy(h @ table.T / 0.1, LABELS).mean()


OF_LOGITS: dict[str, Callable[[Any], Any]] = {
    "optax": lambda z: cross_entropy(z, LABELS),
    "log_softmax, take_along_axis": lambda z: -taken(jax.nn.log_softmax(z)),
    "one_hot": lambda z: -jnp.sum(jax.nn.one_hot(LABELS, V) * jax.nn.log_softmax(z), -1),
    "logsumexp": lambda z: jax.nn.logsumexp(z, -1) - taken(z),
    "label smoothing": lambda z: optax.softmax_cross_entropy(z, optax.smooth_labels(jax.nn.one_hot(LABELS, V), 0.1)),
    "soft cap, z-loss": lambda z: cross_entropy(30 * jnp.tanh(z / 30), LABELS) + 1e-2 * jax.nn.logsumexp(z, -1) ** 2,
    "masked": lambda z: cross_entropy(z, LABELS) * (LABELS % 3 > 0) / (LABELS % 3 > 0).mean(),
    "vmap": lambda z: jax.vmap(jax.vmap(lambda a, b: -jax.nn.log_softmax(a)[b]))(z, LABELS),
    "focal": focal,
    "entropy": lambda z: cross_entropy(z, LABELS) + 0.1 * (jax.nn.softmax(z) * jax.nn.log_softmax(z)).sum(-1),
    "kl": lambda z: optax.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(z[::-1])),
    "flat": lambda z: cross_entropy(z.reshape(-1, V), LABELS.reshape(-1)),
    "map": lambda z: jax.lax.map(lambda of: cross_entropy(*of), (z, LABELS)),
    "checkpoint": lambda z: jax.checkpoint(cross_entropy)(z, LABELS),
    "relu": lambda z: cross_entropy(jax.nn.relu(jnp.where(z < 0.1, 0.0, z)), LABELS),
    "hinge": lambda z: jnp.maximum(
        0, 1 + jnp.where(jnp.arange(V) == LABELS[..., None], -jnp.inf, z).max(-1) - taken(z)
    ),
    "max of ties": lambda z: jnp.round(z).max(-1) * 0 + (z * 0).max(-1) + jnp.minimum(z, 0.1).max(-1) + z.min(-1),
    "max of equal ones": lambda z: (z - jax.lax.stop_gradient(z)).max(-1),
    "whole scale": lambda z: cross_entropy(z / jnp.exp(BIAS), LABELS),
    "straight through": lambda z: cross_entropy(straight_through(z), LABELS),
    "clipped gradient": lambda z: cross_entropy(clipped(z), LABELS) + clipped(cross_entropy(z, LABELS)),
    "clipped mean": lambda z: clipped(cross_entropy(z, LABELS).mean()),
    "first columns": lambda z: cross_entropy(z[..., : V - 11], jnp.minimum(LABELS, V - 12)),
    "masked columns": lambda z: cross_entropy(
        jnp.where(jnp.arange(V) < V - 7, z, -jnp.inf), jnp.minimum(LABELS, V - 8)
    ),
    "position weights": lambda z: (jax.nn.softmax(z) / (V - jnp.arange(V)) ** 2).sum(-1),
    "product": lambda z: jnp.prod(1 + 0.1 * jnp.tanh(z), -1) + jnp.any(z > 2, -1) + jnp.all(z < 9, -1),
    "labels out of range": lambda z: jnp.nan_to_num(taken(z, LABELS * 2 - V)) + taken(z, LABELS * 2 - V, mode="clip"),
    "pair of products": lambda z: jnp.tanh(jax.nn.softmax(z) @ TABLE).sum(-1),
    "swapped": lambda z: cross_entropy(z.swapaxes(0, 2).swapaxes(0, 2), LABELS),
    "argmax": lambda z: cross_entropy(z, z.argmax(-1)) + (z.argmin(-1) == LABELS),
    "gates": lambda z: jax.nn.logsumexp(jax.nn.silu(z) * jax.nn.gelu(z) + jax.nn.elu(z), -1),
}
GATHERED: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda z: cross_entropy(z, LABELS) + jax.lax.top_k(z, 3)[0].sum(-1),
    "cumsum": lambda z: cross_entropy(z, LABELS) + jnp.cumsum(z, -1)[..., -1] * 0.01,
    "sort": lambda z: (jnp.sort(z, -1) * jnp.arange(V)).mean(-1),
    "normed gradient": lambda z: cross_entropy(normed(z), LABELS),
    "scan over rows": running,
    "two rows": lambda z: cross_entropy(z.reshape(B, T, 2, V // 2), LABELS[..., None] % 25).sum(-1),
}
half = lambda x: x.astype(jnp.bfloat16)
OF_TABLES: dict[str, Tail] = {
    "h @ W + b": Tail(
        lambda w, h: cross_entropy(h @ w["out"] + w["bias"], LABELS).mean(),
        {"out": MATRIX, "bias": BIAS},
        {"out": 1, "bias": 0},
    ),
    "whole bias": Tail(
        lambda w, h: cross_entropy(h @ w["out"] + w["bias"], LABELS).mean(), {"out": MATRIX, "bias": BIAS}, {"out": 1}
    ),
    "einsum": Tail(lambda w, h: cross_entropy(jnp.einsum("btd,vd->btv", h, w["table"]), LABELS).mean()),
    "half": Tail(
        lambda w, h: cross_entropy((half(h) @ half(w["table"]).T).astype(jnp.float32), LABELS).mean(), tolerance=8e-3
    ),
    "linen Dense": Tail(
        lambda w, h: cross_entropy(nn.Dense(V).apply({"params": w}, h), LABELS).mean(),
        {"kernel": MATRIX, "bias": BIAS},
        {"kernel": 1, "bias": 0},
    ),
    "cosine": Tail(contrastive),
    "chunks": Tail(lambda w, h: chunks(cross_entropy, h, w["table"]).mean()),
    "checkpointed chunks": Tail(lambda w, h: chunks(jax.checkpoint(cross_entropy), h, w["table"]).mean()),
    "shared hidden": Tail(lambda w, h: cross_entropy(jnp.tanh(h) @ w["table"].T, LABELS).mean() + (h**2).mean()),
    "table[tokens]": Tail(lambda w, h: (w["table"][TOKENS] * h).sum()),
    "tied": Tail(lambda w, h: cross_entropy((w["table"][TOKENS] + h) @ w["table"].T, LABELS).mean()),
    "table[ids out of range]": Tail(lambda w, h: (w["table"][TOKENS * 2 - V] * h).sum()),
    "take": Tail(lambda w, h: (jnp.take(w["table"], TOKENS, axis=0) * h).sum()),
    "take columns": Tail(
        lambda w, h: (jnp.take(w["out"], TOKENS, axis=1) ** 2).sum() * h.sum(), {"out": MATRIX}, {"out": 1}
    ),
    "at, fill": Tail(lambda w, h: (w["table"].at[TOKENS * 2 - V].get(mode="fill", fill_value=0.5) * h).sum()),
    "one_hot @": Tail(lambda w, h: ((jax.nn.one_hot(TOKENS, V) @ w["table"]) * h).sum()),
    "weight decay": Tail(lambda w, h: cross_entropy(h @ w["table"].T, LABELS).mean() + 0.1 * (w["table"] ** 2).sum()),
}
TAILS: dict[str, Tail] = {
    **{
        name: Tail(lambda w, h, of=of: of(h @ w["table"].T).mean(), gathered=name in GATHERED)
        for name, of in (OF_LOGITS | GATHERED).items()
    },
    **OF_TABLES,
}


@jax.custom_jvp
def doubled(x):
    return 2 * jnp.tanh(x)


doubled.defjvp(lambda xs, ts: (2 * jnp.tanh(xs[0]), ts[0] / jnp.cosh(xs[0])))

_Step = Callable[[Any, int, Any], tuple[Any, int]]
"""Change a value, with V rows along a dim; return it, and this dim."""
STEPS: list[_Step] = [
    *(
        lambda x, dim, _, of=of: (of(x), dim)
        for of in (jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.softplus, doubled, clipped)
    ),
    *(lambda x, dim, _, of=of: (of(x, axis=dim), dim) for of in (jax.nn.softmax, jax.nn.log_softmax)),
    *(
        lambda x, dim, _, of=of: (x - of(x, axis=dim, keepdims=True), dim)
        for of in (jnp.max, jnp.min, jnp.mean, jnp.var)
    ),
    lambda x, dim, _: (jax.checkpoint(lambda x: jnp.tanh(x) / (1 + jnp.abs(x).sum(dim, keepdims=True)))(x), dim),
    lambda x, dim, w: (x * jnp.moveaxis(w.reshape(-1, *[1] * (x.ndim - 1)), 0, dim), dim),
    lambda x, dim, _: (jnp.where(jnp.arange(x.shape[-1]) % 3 > 0, x, 0.5), dim),
    lambda x, dim, _: (x + jax.lax.broadcasted_iota(jnp.float32, x.shape, dim) / 10, dim),
    lambda x, dim, _: (1 / (x.shape[dim] - jax.lax.broadcasted_iota(jnp.float32, x.shape, dim)) + x, dim),
    lambda x, dim, _: (jnp.swapaxes(x, 0, dim), 0),
    lambda x, dim, _: (jnp.moveaxis(x, dim, -1), x.ndim - 1),
    lambda x, dim, _: (x.reshape(-1, *x.shape[2:]), dim - 1) if dim > 1 else (x, dim),
    lambda x, dim, _: (x[1:], dim) if dim > 0 and len(x) > 1 else (x, dim),
    lambda x, dim, _: (x.sum(0), dim - 1) if dim > 0 else (x[None], 1),
    lambda x, dim, _: (jnp.stack([x, jnp.cos(x)]), dim + 1) if x.ndim < 4 else (x, dim),
    lambda x, dim, _: (jax.lax.slice_in_dim(x, 0, x.shape[dim] - 1, axis=dim), dim) if x.shape[dim] > 4 else (x, dim),
    lambda x, dim, _: (x - jnp.take(x, jnp.array([1, -1, 99]), dim, mode="clip").sum(dim, keepdims=True), dim),
    lambda x, dim, _: (x + jnp.take(x, jnp.array([2, 99]), dim, fill_value=0.5).sum(dim, keepdims=True), dim),
    lambda x, dim, _: (x - (x.argmax(dim, keepdims=True) - x.argmin(dim, keepdims=True)) / 9, dim),
    lambda x, dim, _: (x * (x > 0.2).any(dim, keepdims=True) + (x < 0.7).all(dim, keepdims=True), dim),
    lambda x, dim, _: (jnp.flip(x, dim), dim),
    lambda x, dim, _: (jnp.cumsum(x, 0) / 4, dim),
    lambda x, dim, _: (jnp.tensordot(x, jnp.cos(jnp.vander(jnp.arange(x.shape[dim]) / 9)), [[dim], [0]]), x.ndim - 1),
    lambda x, dim, _: (jax.lax.map(lambda row: row / (1 + jnp.exp(row).sum(max(dim - 1, 0), keepdims=True)), x), dim),
]


def random_tail(seed: int, size: int, length: int = 5) -> Tail:
    """Return a loss of steps drawn at random, on a product with a table of `size` rows."""
    rng = np.random.default_rng(seed)
    steps = [STEPS[k] for k in rng.permutation(len(STEPS))[:length]]
    weights = {"bias": BIAS[:size], "table": TABLE[:size]}

    def loss(w, h):
        table = w["table"] / jnp.linalg.norm(w["table"], axis=1, keepdims=True)  # NaN for a row of zeros
        x, dim = h @ table.T, 2
        for step in steps:
            bias = w["bias"][: x.shape[dim]]
            x, dim = step(x, dim, bias)
        return (jnp.sin(x) * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum()

    return Tail(loss, weights, {"bias": 0, "table": 0}, tolerance=5e-5)
