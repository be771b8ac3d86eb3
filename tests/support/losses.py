"""Run the split cross-entropy and its dense twins, which are written independently."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sharded_ops import log_softmax_cross_entropy
from support.harness import assert_close, split_vjp

TOKENS = 6
COLUMNS = P(None, "ipu")

# exp and log are exact to a few ulps each, and a denominator is a sum of at most 10 terms.
ROUNDINGS = 20

# Rows of 7 logits on 3 IPUs, which hold columns 0-2, 3-5 and 6; each with a label.
EXTREMES = [
    ([1e4, -1e4, 0, 1, 2, 3, 4], 0),
    ([1e4, -1e4, 0, 1, 2, 3, 1e4], 1),
    ([-1e4] * 7, 6),
    ([-np.inf] * 3 + [0, 1, 2, 3], 4),  # all logits on IPU 0 are -inf
    ([0, 1, 2, 3, 4, 5, -np.inf], 5),  # all logits on IPU 2 are -inf
    ([0, 1, 2, -np.inf, -np.inf, -np.inf, -np.inf], 0),  # only IPU 0 has a finite logit
    ([0, 1, 2, -np.inf, 4, 5, 6], 3),  # the label's logit is -inf: the loss is inf, and there is a gradient
    ([-5, -4, -3, -np.inf, -4, -5, -6], 3),  # and its shard's log-sum-exp is below 0
    ([0, 1, 2, 3, 4, 5, -np.inf], 6),  # and its whole shard is -inf
    ([1e38, -1e38, 0, 0, 0, 0, 0], 0),
    ([1010, 1000, 1000, 1000, 1000, 1000, 1000], 0),  # a confident prediction, whose loss is 3e-4
]


def dense_loss(
    logits: Any,
    target: Any,
    weights: Any,
    *,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    soft_cap: Any = None,
    temperature: Any = 1.0,
    ignore_index: Any = None,
    out_of_range: Any = "ignore",
    reduction: Any = "none",
    weighted: Any = False,
    soft: Any = False,
) -> Any:
    """Return the loss by torch's formulas, on whole rows of logits, from the likelihoods of target and all columns."""
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    x = x / temperature
    size = x.shape[-1]
    log_p = jax.nn.log_softmax(x)
    if soft:
        counts = jnp.ones(x.shape[:-1], bool)
        nll = -(target.astype(x.dtype) * log_p).sum(-1)
        spread = -log_p.sum(-1) / size
    else:
        counts = jnp.ones(target.shape, bool) if ignore_index is None else target != ignore_index
        if out_of_range == "ignore":
            counts = counts & (target >= 0) & (target < size)
        nll = -jnp.take_along_axis(log_p, jnp.clip(target, 0, size - 1)[..., None], axis=-1)[..., 0]
        spread = -log_p.mean(-1)
    loss = (1 - label_smoothing) * nll + z_loss * jax.nn.logsumexp(x, -1) ** 2
    if label_smoothing:  # without it, 0 times inf would be NaN
        loss += label_smoothing * spread
    factor = weights.astype(x.dtype) if weighted else jnp.ones(loss.shape, x.dtype)
    loss = jnp.where(counts, loss, 0) * factor
    if reduction == "none":
        return loss
    count = jnp.where(counts, factor, 0).sum()
    return loss.sum() if reduction == "sum" else loss.sum() / jnp.where(count == 0, 1, count)


def of_each(
    options: Sequence[dict[str, Any]], loss: Callable[..., Any], labels: Any, weights: Any, soft: Any = None
) -> Any:
    """Return (options, tokens): the loss of each entry, which says what it uses by `soft` and `weighted`.

    A sum or a mean stands at each of its tokens. `loss` takes a target, weights or None, and the entry's other options.
    """
    rows = []
    for entry in options:
        others = {k: v for k, v in entry.items() if k not in ("soft", "weighted")}
        target = soft if entry.get("soft") else labels
        found = loss(target, weights=weights if entry.get("weighted") else None, **others)
        rows += found if isinstance(found, tuple) else [found]
    return jnp.stack([jnp.broadcast_to(row, labels.shape) for row in rows])


def dense_of_each(options: Sequence[dict[str, Any]], logits: Any, labels: Any, weights: Any, soft: Any = None) -> Any:
    """Return the same as `of_each` of `dense_loss`, which has no chunks and one way to make gradients."""

    of_program = ("gradients", "token_chunk", "column_chunk", "return_log_sum_exp", "return_entropy")

    def loss(target: Any, **entry: Any) -> Any:
        others = {k: v for k, v in entry.items() if k not in of_program}
        is_soft = jnp.issubdtype(target.dtype, jnp.floating)
        found = dense_loss(logits, target, soft=is_soft, weighted=entry["weights"] is not None, **others)
        cap = entry.get("soft_cap")
        x = logits if cap is None else cap * jnp.tanh(logits / cap)
        log_p = jax.nn.log_softmax(x := x / entry.get("temperature", 1.0))
        others = {
            "return_log_sum_exp": jax.nn.logsumexp(x, -1),
            "return_entropy": -jnp.where(log_p == -jnp.inf, 0, jnp.exp(log_p) * log_p).sum(-1),
        }
        return (found, *(each for name, each in others.items() if entry.get(name)))

    return of_each(options, loss, labels, weights, soft)


def sharded_cross_entropy(mode, n, size, logits, labels, ct, **options):
    """Return the loss of whole logits, which are padded with `fill`, and their gradient."""
    loss, (dlogits,) = split_vjp(
        log_softmax_cross_entropy, mode, n, [logits], [labels], dims=[1], ct=ct, size=size, **options
    )
    return loss, dlogits


def assert_like_dense_linear(got: Any, want: Any, operands: Any, ct: Any) -> float:
    """Compare losses and gradients of hidden, table, perhaps bias, and weights; return how large a loss may be."""
    (rows, grads), (want_rows, of_want) = got, want
    hidden, table, *bias, weights = (np.abs(operand.astype(np.float32)) for operand in operands)
    logit = (hidden @ table.T + (bias[0] if bias else 0)).max()
    largest = 1 + max(np.abs(want_rows).max(), logit) * max(1.0, weights.max())
    features = hidden.shape[-1]
    assert_close(rows, want_rows, largest, 10 * features)
    assert_close(grads[-1], of_want[len(grads) - 1], largest * (1 + np.abs(ct).sum()), 10 * features)
    # Each token's dlogits, which add up to a few times its cotangent, are rounded to the dtype; then the sums are.
    slope = 2 * (1 + np.abs(ct).sum()) * max(1.0, weights.max())
    roundings = 10 if operands[0].dtype == jnp.float32 else 2
    for found, wanted, size in zip(grads, of_want, (table.max(), hidden.max(), 1)[: len(grads) - 1], strict=False):
        assert_close(found, wanted, slope * size, roundings)
    return largest


def in_float64(logits, labels):
    """Return losses, gradients of logits and logarithms of probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    is_label = np.arange(logits.shape[-1]) == labels[:, None]
    return -log_p[is_label], np.exp(log_p) - is_label, log_p
