"""Compute the ops densely, by plain jnp on whole arrays. Half types are computed in float32 and rounded once."""

from typing import Any

import jax.numpy as jnp


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def embedding(table: Any, ids: Any, *, exact: bool) -> Any:
    rows = jnp.arange(table.shape[0]) == ids[..., None].astype(jnp.int32)
    return jnp.einsum("...v,vd->...d", rows.astype(table.dtype), table)


def take_along_last_dim(x: Any, ids: Any, *, exact: bool) -> Any:
    chosen = jnp.arange(x.shape[-1]) == ids[..., None].astype(jnp.int32)
    return jnp.where(chosen, x, 0).sum(-1)


def matmul(x: Any, w: Any, bias: Any, *, exact: bool) -> Any:
    return (jnp.einsum("...d,dv->...v", _wide(x), _wide(w)) + _wide(bias)).astype(x.dtype)


def tied_projection(hidden: Any, table: Any, *, exact: bool, wide: bool = False) -> Any:
    logits = jnp.einsum("...d,vd->...v", _wide(hidden), _wide(table))
    return logits if wide else logits.astype(hidden.dtype)


def softmax(x: Any, *, exact: bool) -> Any:
    powers = jnp.exp(_wide(x) - _wide(x).max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(x.dtype)


def log_softmax(x: Any, *, exact: bool) -> Any:
    centred = _wide(x) - _wide(x).max(-1, keepdims=True)
    return (centred - jnp.log(jnp.exp(centred).sum(-1, keepdims=True))).astype(x.dtype)


def layer_norm(x: Any, scale: Any, bias: Any, *, exact: bool, epsilon: float) -> Any:
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdims=True)
    y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return (y * _wide(scale) + _wide(bias)).astype(x.dtype)


def rms_norm(x: Any, scale: Any, *, exact: bool, epsilon: float) -> Any:
    wide = _wide(x)
    return (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * _wide(scale)).astype(x.dtype)


def top_k(x: Any, k: int) -> tuple[Any, Any]:
    order = jnp.argsort(-_wide(x), axis=-1, stable=True)[..., :k]
    return jnp.take_along_axis(x, order, axis=-1), order


def chosen(x: Any, k: int) -> Any:
    """Return the column of the largest number (k=0) or of the k largest numbers, as floats with a gradient of zero."""
    _, order = top_k(x, max(k, 1))
    return (order[..., 0] if k == 0 else order).astype(jnp.float32) + 0 * _wide(x).sum()


def moved(name: str, x: Any, owner: int) -> Any:
    """Return the result of a collective: `x`, (N, ipus, D), contains each IPU's value."""
    if name == "to_all":
        return x[:, owner]
    if name == "reduce_to":
        total = _wide(x).sum(1).astype(x.dtype)
        mine = (jnp.arange(x.shape[1]) == owner)[None, :, None]
        return jnp.where(mine, total[:, None], 0)
    return _wide(x).sum(1).astype(x.dtype)


def cross_entropy(
    logits: Any,
    labels: Any,
    weights: Any,
    weighted: bool,
    *,
    exact: bool,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    temperature: float,
    ignore_index: int | None,
    out_of_range: str,
    reduction: str,
) -> Any:
    """Return the loss as the docstring of `log_softmax_cross_entropy` defines it, from all columns at once."""
    x, v = _wide(logits), logits.shape[-1]
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = x / temperature
    top = x.max(-1, keepdims=True)
    log_sum = (top + jnp.log(jnp.exp(x - top).sum(-1, keepdims=True)))[..., 0]
    if jnp.issubdtype(labels.dtype, jnp.floating):
        target, counts = _wide(labels), jnp.ones(labels.shape[:-1], bool)
    else:
        labels = labels.astype(jnp.int32)
        counts = (labels >= 0) & (labels < v) if out_of_range == "ignore" else jnp.ones(labels.shape, bool)
        if ignore_index is not None:
            counts &= labels != ignore_index
        target = (jnp.arange(v) == jnp.clip(labels, 0, v - 1)[..., None]).astype(x.dtype)
    target = (1 - label_smoothing) * target + label_smoothing / v
    loss = (target * (log_sum[..., None] - x)).sum(-1) + z_loss * log_sum**2
    loss = jnp.where(counts, loss, 0)
    weight = weights.astype(loss.dtype) if weighted else jnp.ones(loss.shape, loss.dtype)
    if reduction == "none":
        return loss * weight
    total, mass = (loss * weight).sum(), (counts * weight).sum()
    return total if reduction == "sum" else total / jnp.where(mass == 0, 1, mass)
