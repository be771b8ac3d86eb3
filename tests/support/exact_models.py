"""Small transformers as functions, for tests that compare bits: listed, tied and stacked layers, dropout and state.

They are written without regard to the order of additions: norms by `jnp.var`, attention, a checkpoint, a nested jit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from support.layers import normal

M, ROWS, T, D, V = 4, 3, 5, 8, 13


def drawn(*shape: int, seed: int = 0) -> Any:
    return normal(*shape, seed=seed) / np.sqrt(shape[-2])


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def block(w, x):
    h = normalised(x)
    scores = (h @ w["q"]) @ (h @ w["k"]).swapaxes(-1, -2)
    x = x + jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)) @ (h @ w["v"])
    return x + jax.nn.gelu(normalised(x) @ w["up"]) @ w["down"]


def block_weights(seed: int, *lead: int) -> Any:
    shapes = {"q": (D, D), "k": (D, D), "v": (D, D), "up": (D, 2 * D), "down": (2 * D, D)}
    return {name: drawn(*lead, *shape, seed=seed) for name, shape in shapes.items()}


def embedded(p, mb):
    return p["table"][mb["ids"]] + p["positions"]


def cross_entropy(logits, mb):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), mb["labels"]).mean()


def narrow(p, mb):
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(normalised(x) @ w), None), embedded(p, mb), p["narrow"])
    return cross_entropy(x @ p["out"], mb)


def listed(p, mb):
    x = embedded(p, mb)
    for w in p["layers"]:
        x = block(w, x)
    return cross_entropy(normalised(x) @ p["out"], mb)


def scanned(p, mb):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), p["stacked"])
    x, _ = lax.scan(lambda x, w: (jax.jit(block)(w, x), None), embedded(p, mb), rounded)
    return cross_entropy(jnp.tanh(x) @ p["out"], mb)


def with_dropout_and_state(p, state, mb, key):
    x, seen = embedded(p, mb), []
    for w, old in zip(p["layers"], state["means"], strict=True):
        key, own = jax.random.split(key)
        x = block(w, x) * jax.random.bernoulli(own, 0.8, x.shape)
        seen.append(0.9 * old + 0.1 * x.mean((0, 1)))
    return cross_entropy(x @ p["out"], mb), {"aux": x.max()}, {"means": seen}


def tied(p, mb):
    x = embedded(p, mb)
    for w in p["layers"]:
        x = jax.checkpoint(block)(w, x)
    return cross_entropy(x @ p["table"].T, mb)


WEIGHTS: Any = {
    "table": drawn(V, D, seed=5),
    "positions": drawn(T, D, seed=6),
    "layers": [block_weights(k) for k in range(4)],
    "stacked": block_weights(7, 4),
    "narrow": drawn(4, D, D, seed=9),
    "out": drawn(D, V, seed=8),
}
STATE: Any = {"means": [np.zeros(D, np.float32)] * 4}
