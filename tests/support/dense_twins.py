"""Dense twins of sharded ops, which use no IPUs. Half types are widened to float32, and rounded once at the end."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def dense_embedding(table: Any, ids: Any) -> Any:
    size = table.shape[0]
    inside = (ids >= 0) & (ids < size)
    return jnp.where(inside[..., None], table[jnp.clip(ids, 0, size - 1)], 0)


def dense_take_along_last_dim(x: Any, indices: Any) -> Any:
    size = x.shape[-1]
    inside = (indices >= 0) & (indices < size)
    picked = jnp.take_along_axis(x, jnp.clip(indices, 0, size - 1)[..., None], axis=-1)[..., 0]
    return jnp.where(inside, picked, 0)


def dense_matmul(x: Any, w: Any, bias: Any) -> Any:
    return x @ w + bias


def dense_tied_projection(hidden: Any, table: Any) -> Any:
    return hidden @ table.T


def dense_rms_norm(x: Any, scale: Any, *, epsilon: float) -> Any:
    wide = _wide(x)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + epsilon) * _wide(scale)).astype(x.dtype)


def dense_layer_norm(x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
    wide = _wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + epsilon) * _wide(scale) + _wide(bias)).astype(x.dtype)


def dense_softmax(logits: Any) -> Any:
    return jax.nn.softmax(_wide(logits)).astype(logits.dtype)


def dense_log_softmax(logits: Any) -> Any:
    return jax.nn.log_softmax(_wide(logits)).astype(logits.dtype)
