"""Compute a transformer's layers for one sequence and one head at a time: the oracle of the benchmarks' models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normalised(p: Any, x: jax.Array) -> jax.Array:
    """Return the layer norm of (T, D) tokens, computed in float32."""
    wide = x.astype(jnp.float32)
    unit = (wide - wide.mean(1)[:, None]) / jnp.sqrt(wide.var(1)[:, None] + 1e-5)
    return unit.astype(x.dtype) * p["scale"] + p["bias"]


def attended(p: Any, x: jax.Array) -> jax.Array:
    """Return causal attention over (T, D) tokens; the weights are "qkv" (D, 3, N, K) and "out" (N, K, D)."""
    total = jnp.zeros_like(x)
    for head in range(p["out"].shape[0]):
        query, key, value = (x @ p["qkv"][:, part, head] for part in range(3))
        scores = (query @ key.T).astype(jnp.float32) / np.sqrt(key.shape[1])
        weights = jnp.exp(scores) * np.tri(len(x))
        total += (weights / weights.sum(1, keepdims=True)).astype(x.dtype) @ value @ p["out"][head]
    return total


def gelu(x: jax.Array) -> jax.Array:
    """Return the tanh approximation, which `jax.nn.gelu` uses."""
    return x * (jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)) + 1) / 2


def block(p: Any, x: jax.Array) -> jax.Array:
    """Apply attention and an MLP to (T, D) tokens, with a norm before each."""
    x = x + attended(p["attention"], normalised(p["norm1"], x))
    return x + gelu(normalised(p["norm2"], x) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross-entropy over T tokens, from logits (T, V) and targets (T,)."""
    return (jnp.log(jnp.exp(logits).sum(1)) - logits[jnp.arange(len(targets)), targets]).mean()
