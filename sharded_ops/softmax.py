"""Softmax and cross-entropy over a last dim that is split over the IPUs of a mesh axis.

No IPU ever holds a whole row of logits. Each reduces its own columns to two floats a token, one all-gather hands these
to all, and every IPU finishes by itself.

The cross-entropy of a token whose label's logit is y is lse(all logits) - y. The two floats of a shard are a
*reference* logit r and the log-sum-exp of the shard's columns, measured from that reference:

    shard without the label:  r = its largest logit    d = lse(shard) - r
    shard with the label:     r = y                    d = lse(shard) - y

                 loss  =  logsumexp over shards of (r - y) + d

So the loss is never the difference of two large numbers: it is as exact as the dense program's, also for a confident
prediction, whose loss is much smaller than its logits. The gradient needs no more than what every IPU then knows, and
sends nothing; it is exact to the rounding of the loss, which is felt from losses of about 1000.

(Megatron-LM and torch's loss_parallel use three all-reduces of a float a token: Shoeybi et al. 2019, arXiv:1909.08053,
section 3.)

Dims: N tokens (any number of leading dims), V columns; n IPUs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from sharded_ops.collectives import as_varying, check_same_on_all, gather_to_all, is_typed, varying_axes
from sharded_ops.layout import (
    Split,
    as_int32,
    check_one_per_row,
    check_shard,
    local_rows,
    mask_padding,
    split_over,
)


def log_softmax(logits_shard: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """`jax.nn.log_softmax` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 floats a token. Backward: one all-reduce of 1 float a token under check_vma=True; one
    reduce-scatter that leaves 2 floats a token on each IPU under check_vma=False.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N.., V) globally, each IPU holds (N.., ceil(V/n)), in the dtype of `logits_shard`. Padding comes out as -inf,
        the logarithm of its probability.

    Raises:
        ValueError: the logits are not floating, their shard does not fit `size`, or `axis` is not the enclosing
            shard_map's.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(log_softmax, size=3)
        >>> sharded = jax.shard_map(op, mesh=mesh, in_specs=P(None, "ipu"), out_specs=P(None, "ipu"))
        >>> logits_NV = jnp.log(jnp.array([[1.0, 2.0, 1.0, 99.0]]))  # 3 columns and one of padding
        >>> print(jnp.exp(jax.jit(sharded)(logits_NV)))
        [[0.25 0.5  0.25 0.  ]]
    """
    split = _checked_split(logits_shard, size, axis)
    logits_NV = _masked_logits(logits_shard, split, axis)
    top_N, log_sum_N = _top_and_log_sum(logits_NV, dim=-1)
    # n shards, each with the two floats of every token
    parts_n2N = gather_to_all(jnp.stack([top_N, log_sum_N]), axis)
    tops_nN, log_sums_nN = parts_n2N[:, 0], parts_n2N[:, 1]
    base_N = lax.stop_gradient(_finite(tops_nN.max(0)))
    log_total_N = _log_sum_exp(tops_nN - base_N + log_sums_nN)
    log_p_NV = (logits_NV - base_N[..., None]) - log_total_N[..., None]
    # Masked once more, so that a cotangent of the padding does not reach the denominator.
    return mask_padding(log_p_NV, -1, split, axis, fill=-jnp.inf).astype(logits_shard.dtype)


def log_softmax_cross_entropy(logits_shard: jax.Array, labels: ArrayLike, *, size: int, axis: str = "ipu") -> jax.Array:
    """The cross-entropy of each token with its label, over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 floats a token. Backward: nothing. (The matmul that made the logits reduces its dx.)

    Under check_vma=False the backward pass takes it that all IPUs use the loss alike, so that the loss's cotangent, of
    which each IPU then holds an equal part, is n times that part (see `collectives`). A program in which only one IPU
    goes on with the loss needs check_vma=True, or to say so with a factor of its own. Only reverse-mode derivatives are
    there, and only the first.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32.
        labels: (N..) of any integer dtype, the same on all IPUs. A label outside [0, size), negative ones included,
            gives a loss of zero, and a gradient of zero to its whole row.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N..) in float32 (float64 for float64 logits), the same on all IPUs.

    Raises:
        ValueError: the logits are not floating or their shard does not fit `size`; `labels` are not integers, differ
            between IPUs or have not the shape (N..); or `axis` is not the enclosing shard_map's.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(log_softmax_cross_entropy, size=4)
        >>> losses = jax.shard_map(op, mesh=mesh, in_specs=(P(None, "ipu"), P()), out_specs=P())
        >>> print(jax.jit(losses)(jnp.zeros((2, 4)), jnp.array([3, -1])))  # log(4), and a token without a label
        [1.3862944 0.       ]
    """
    split = _checked_split(logits_shard, size, axis)
    check_one_per_row("labels", labels, logits_shard)
    check_same_on_all("labels", labels, axis)
    labels_N = as_int32("labels", labels, size)
    axes = varying_axes(logits_shard) | varying_axes(labels_N)
    # A custom rule has to return a gradient that varies as its primal does: over the axis, and wherever labels do.
    logits_NV = as_varying(logits_shard, axes | {axis} if is_typed(axis) else axes)
    return _cross_entropy(logits_NV, labels_N, split, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits_NV: jax.Array, labels_N: jax.Array, split: Split, axis: str) -> jax.Array:
    return _cross_entropy_forward(logits_NV, labels_N, split, axis)[0]


_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _cross_entropy_forward(
    logits_NV: jax.Array, labels_N: jax.Array, split: Split, axis: str
) -> tuple[jax.Array, _Residuals]:
    masked_NV = _masked_logits(logits_NV, split, axis)
    top_N, log_sum_N = _top_and_log_sum(masked_NV, dim=-1)
    columns_N = local_rows(labels_N, split, axis)
    label_logit_N = jnp.take_along_axis(masked_NV, columns_N[..., None], axis=-1, mode="fill")[..., 0]
    reference_N = jnp.where(columns_N < split.local, label_logit_N, top_N)
    log_sum_N = (_finite(top_N) - _finite(reference_N)) + log_sum_N
    # n shards, each with the two floats of every token
    parts_n2N = gather_to_all(jnp.stack([reference_N, log_sum_N]), axis)
    references_nN, log_sums_nN = parts_n2N[:, 0], parts_n2N[:, 1]
    # An index outside [0, size) is -1 here; it may take any shard's reference, as its loss is masked below.
    owner_N = jnp.maximum(labels_N, 0) // split.local
    label_logit_N = jnp.take_along_axis(references_nN, owner_N[None], axis=0)[0]
    # base is the label's logit, or 0 where that is -inf, so that the gradient of the other columns stays finite
    base_N = _finite(label_logit_N)
    log_total_N = _log_sum_exp((_finite(references_nN) - base_N) + log_sums_nN)
    loss_N = jnp.where(labels_N >= 0, log_total_N + (base_N - label_logit_N), 0)
    return loss_N, (logits_NV, labels_N, base_N, log_total_N)


def _cross_entropy_backward(
    split: Split, axis: str, residuals: _Residuals, dloss_N: jax.Array
) -> tuple[jax.Array, None]:
    logits_NV, labels_N, base_N, log_total_N = residuals
    if not is_typed(axis):
        dloss_N = dloss_N * split.parts
    p_NV = jnp.exp((logits_NV.astype(dloss_N.dtype) - base_N[..., None]) - log_total_N[..., None])
    is_label_NV = jnp.arange(split.local) == local_rows(labels_N, split, axis)[..., None]
    dlogits_NV = jnp.where(labels_N[..., None] >= 0, (p_NV - is_label_NV) * dloss_N[..., None], 0)
    return mask_padding(dlogits_NV, -1, split, axis, fill=0).astype(logits_NV.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _checked_split(logits_shard: jax.Array, size: int, axis: str) -> Split:
    split = split_over(size, axis)
    if not jnp.issubdtype(logits_shard.dtype, jnp.floating):
        raise ValueError(
            f"logits_shard has dtype {logits_shard.dtype}, but logits must be floating: convert them first"
        )
    check_shard("logits_shard", logits_shard, -1, split, axis)
    return split


def _masked_logits(logits_NV: jax.Array, split: Split, axis: str) -> jax.Array:
    """The logits in float32 (float64 if they are), with -inf for padding."""
    wide_NV = logits_NV.astype(jnp.promote_types(logits_NV.dtype, jnp.float32))
    return mask_padding(wide_NV, -1, split, axis, fill=-jnp.inf)


def _top_and_log_sum(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """The largest entry t along `dim`, and log(sum(exp(x - t))): both -inf if all of x is.

    Differentiable through the second. Both `where`s are needed: log(0) may not even be a branch not taken, since its
    derivative, inf, would come out of the transposed `where` times zero, as NaN. NaN in `x` is not hidden.
    """
    top = lax.stop_gradient(x).max(dim)
    total = jnp.exp(x - jnp.expand_dims(_finite(top), dim)).sum(dim)
    empty = total == 0
    return top, jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)))


def _log_sum_exp(x_nN: jax.Array) -> jax.Array:
    """log(sum(exp(x))) over the shards."""
    top_N, log_sum_N = _top_and_log_sum(x_nN, dim=0)
    return _finite(top_N) + log_sum_N


def _finite(x: jax.Array) -> jax.Array:
    """`x` with 0 for -inf, so that differences from it are no inf - inf."""
    return jnp.where(x == -jnp.inf, 0, x)
