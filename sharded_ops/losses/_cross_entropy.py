"""Compute softmax cross-entropy over a last dim that is split over the IPUs of a mesh axis, with the usual options.

    logits_shard --> statistics --> all-gather --> loss of each token --> weights, reduction --> result
                     (_statistics)   3 or 4 floats

The backward pass of a first derivative needs no communication, and sends nothing. To achieve that, two functions have
custom derivative rules, from which jax makes derivatives of any order and mode:

    _row_statistics    computes the log-sum-exp. Its tangent is a plain psum, whose transpose sums the cotangents of all
                       IPUs. That is right for any use of the result, even in a second derivative, where each IPU uses
                       it for its own columns.
    _token_loss        computes the loss. Its tangent is a sum that all IPUs use in the same way (`_replicated_sum`),
                       whose transpose communicates nothing.

The tangent of `_token_loss` recomputes its probabilities (`jax.checkpoint`), so the residuals of the backward pass are
the logits in their original dtype, and two floats per token.

Dims: N tokens (any number of leading dims), V columns; n IPUs.
"""

import functools
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, one_axis, whole_number
from sharded_ops._collectives import as_varying, axes_of_rule, check_same_on_all, gather_to_all, is_typed
from sharded_ops._softmax import checked_split
from sharded_ops._split import axis_size, check_one_per_row
from sharded_ops.losses._options import (
    LossOptions,
    OutOfRange,
    Reduction,
    checked_options,
    checked_targets,
    checked_terms,
    checked_weights,
    reduce_losses,
)
from sharded_ops.losses._statistics import (
    RowStatistics,
    Terms,
    combine_shards,
    entropy_dlogits,
    is_soft,
    loss_dlogits,
    loss_dtargets,
    probabilities,
    shard_start,
    shard_summary,
    softmax_logits,
    statistics,
)


@overload
def log_softmax_cross_entropy(
    logits_shard: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> jax.Array: ...


@overload
def log_softmax_cross_entropy(
    logits_shard: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: Literal[True],
    return_entropy: bool = False,
    **options: Unpack[LossOptions],
) -> tuple[jax.Array, ...]: ...


@overload
def log_softmax_cross_entropy(
    logits_shard: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: bool = False,
    return_entropy: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[jax.Array, ...]: ...


def log_softmax_cross_entropy(
    logits_shard: jax.Array,
    labels: ArrayLike,
    *,
    size: int,
    axis: str = "ipu",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    out_of_range: OutOfRange = "ignore",
    weights: ArrayLike | None = None,
    reduction: Reduction = "none",
    return_log_sum_exp: bool = False,
    return_entropy: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """Return the cross-entropy of each token with its label, over a last dim that is split over the IPUs of `axis`.

    Let x be the logits, x' = soft_cap * tanh(x / soft_cap) / temperature, and u_v the weight that the target gives to
    column v. A token's loss is  sum of u_v (lse(x') - x'_v) + z_loss * lse(x')**2.  For a label y, u is 1 at y and 0
    elsewhere; label smoothing turns it into (1 - label_smoothing) * u + label_smoothing / size, as in torch (Szegedy
    et al. 2016, arXiv:1512.00567). The z-loss is from Chowdhery et al. 2022 (arXiv:2204.02311), the soft cap from
    Gemma 2 (arXiv:2408.00118).

    Forward: one all-gather of 3 floats per token, of one more with soft targets, and with the entropy. Backward:
    nothing. (The matmul that made the logits reduces its dx.) Derivatives of every order are supported in both modes.
    Forward mode sends one all-reduce of one float per token, and higher derivatives send a few of these.

    Under check_vma=False the backward pass assumes that all IPUs use the loss in the same way. Each IPU then holds an
    equal part of the loss's cotangent, and the cotangent is n times that part (see the module `_collectives`). A
    program in which only one IPU uses the loss needs check_vma=True, or must multiply by its own correction factor.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32. A logit of -inf gives its column a probability of 0;
            soft_cap turns it into a finite logit.
        labels: (N..) of any integer dtype, the same on all IPUs; or soft targets, floating, split and padded like the
            logits. Soft targets need not add up to 1, and are differentiable too.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.
        label_smoothing: from 0 to 1; spread over the `size` columns of the whole vocabulary.
        z_loss: at least 0; the factor of the squared log-sum-exp in the loss.
        soft_cap: positive; logits are kept between -soft_cap and soft_cap. None leaves them as they are.
        temperature: positive; the capped logits are divided by it.
        ignore_index: a label that does not count: its loss is zero, and so is the gradient of its whole row.
        out_of_range: how to treat any other label outside [0, size), which includes negative labels. "ignore": it does
            not count either. "nan": its loss and its row's gradient are NaN. "clip": the nearest valid label is used.
        weights: (N..), the same on all IPUs; each token's loss is multiplied by its weight.
        reduction: "none"; "sum" over all tokens; or "mean". "mean" divides the sum by the total weight of the tokens
            that count (without weights, by their number), and is 0 if this total is 0. Tokens on other mesh axes are
            not included: to include them, sum numerator and denominator yourself.
        return_log_sum_exp, return_entropy: return lse(x') and the entropy of softmax(x') as well, in this order.

    Returns:
        The loss: (N..), or () if reduced, in float32 (float64 for float64 logits), the same on all IPUs. With
        return_log_sum_exp also the log-sum-exp, and with return_entropy the entropy, (N..) in the same dtype, even for
        tokens that don't count.

    Raises:
        ValueError: the logits are not floating, their shard does not fit `size`, or they are typed as replicated over
            several IPUs; labels are neither integers of shape (N..) that are the same on all IPUs, nor floats of the
            logits' shape; an option is out of range; or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(log_softmax_cross_entropy, size=4)
        >>> losses = jax.shard_map(op, mesh=mesh, in_specs=(P(None, "ipu"), P()), out_specs=P())
        >>> print(jax.jit(losses)(jnp.zeros((2, 4)), jnp.array([3, -1])))  # log(4), and a token without a label
        [1.3862944 0.       ]
    """
    logits_shard = array("logits_shard", logits_shard)
    split = checked_split(logits_shard, whole_number("size", size, at_least=1), one_axis(axis))
    terms = checked_terms(Terms(split, axis, label_smoothing, z_loss, soft_cap, temperature, bool(return_entropy)))
    labels = array_like("labels", labels)
    checked_options(out_of_range, reduction, return_log_sum_exp=return_log_sum_exp, return_entropy=return_entropy)
    if weights is not None:
        weights = checked_weights(weights)
        check_one_per_row("weights", weights, logits_shard)
        check_same_on_all("weights", weights, axis)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        check_one_per_row("labels", labels, logits_shard)
        check_same_on_all("labels", labels, axis)
    wide = jnp.promote_types(logits_shard.dtype, jnp.float32)
    targets, counted_N, faulty_N = checked_targets(labels, logits_shard.shape, wide, terms, ignore_index, out_of_range)
    axes = axes_of_rule(axis, logits_shard, targets)
    x_NV = as_varying(logits_shard, axes)
    targets = as_varying(targets, axes) if is_soft(targets) else targets
    row = _row_statistics(x_NV, targets, terms)
    outputs = _token_loss(x_NV, targets, row, terms, return_log_sum_exp)
    loss = reduce_losses(outputs[0], counted_N, faulty_N, weights, reduction)
    return (loss, *outputs[1:]) if outputs[1:] else loss


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _row_statistics(x_NV: jax.Array, targets: jax.Array, terms: Terms) -> RowStatistics:
    """Return the statistics of all columns, with correct derivatives except for `loss_N`: `_token_loss` adds these.

    Forward: one all-gather of 3 floats per token, of one more with soft targets, and of one more with the entropy.
    """
    first = shard_start(terms)
    shard = statistics(softmax_logits(x_NV, first, terms), targets, first, terms)
    return combine_shards(gather_to_all(shard_summary(shard, targets, terms), terms.axis), targets, terms)


@functools.partial(_row_statistics.defjvp, symbolic_zeros=True)
def _row_statistics_jvp(terms: Terms, primals: Any, tangents: Any) -> tuple[RowStatistics, RowStatistics]:
    (x_NV, targets), (dx_NV, dtargets) = primals, tangents
    row = _row_statistics(x_NV, targets, terms)
    drest_N = jnp.zeros_like(row.rest_N)
    dentropy_N = None if row.entropy_N is None else jnp.zeros_like(row.entropy_N)
    if not isinstance(dx_NV, SymbolicZero):
        drest_N = lax.psum(_log_sum_exp_tangent(terms, x_NV, targets, row, dx_NV), terms.axis)
        if row.entropy_N is not None:
            dentropy_N = lax.psum(_entropy_tangent(terms, x_NV, targets, row, dx_NV), terms.axis)
    dmass_N = None
    if row.mass_N is not None:
        dmass_N = jnp.zeros_like(row.mass_N)
        if not isinstance(dtargets, SymbolicZero):
            dmass_N = lax.psum((1 - terms.label_smoothing) * dtargets.sum(-1), terms.axis)
    zeros_N = jnp.zeros_like(row.base_N)
    return row, RowStatistics(zeros_N, drest_N, zeros_N, dmass_N, dentropy_N)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _token_loss(
    x_NV: jax.Array, targets: jax.Array, row: RowStatistics, terms: Terms, wants_lse: bool
) -> tuple[jax.Array, ...]:
    """Return each token's loss, 0 where the token does not count, and what else is wanted: log-sum-exp, entropy."""
    loss_N = row.loss_N if is_soft(targets) else jnp.where(targets >= 0, row.loss_N, 0)
    lse = (row.base_N + row.rest_N,) if wants_lse else ()
    return (loss_N, *lse) if row.entropy_N is None else (loss_N, *lse, row.entropy_N)


@functools.partial(_token_loss.defjvp, symbolic_zeros=True)
def _token_loss_jvp(terms: Terms, wants_lse: bool, primals: Any, tangents: Any) -> Any:
    (x_NV, targets, row), (dx_NV, dtargets, _) = primals, tangents
    outputs = _token_loss(x_NV, targets, row, terms, wants_lse)
    doutputs = [jnp.zeros_like(output) for output in outputs]
    tangent_of = [_loss_tangent, *[_log_sum_exp_tangent] * wants_lse, *[_entropy_tangent] * terms.entropy]
    if not isinstance(dx_NV, SymbolicZero):
        for i, tangent in enumerate(tangent_of):
            recomputed = jax.checkpoint(functools.partial(tangent, terms), prevent_cse=False)
            doutputs[i] += _replicated_sum(recomputed(x_NV, targets, row, dx_NV), terms.axis)
    if is_soft(targets) and not isinstance(dtargets, SymbolicZero):
        recomputed = jax.checkpoint(functools.partial(_loss_tangent_by_targets, terms), prevent_cse=False)
        doutputs[0] += _replicated_sum(recomputed(x_NV, row, dtargets), terms.axis)
    return outputs, tuple(doutputs)


# Each of the next four functions returns the tangent of this shard's part of a token's loss, log-sum-exp or entropy,
# and is linear in its last argument.


def _loss_tangent(terms: Terms, x_NV: jax.Array, targets: jax.Array, row: RowStatistics, dx_NV: jax.Array) -> jax.Array:
    first = shard_start(terms)
    if terms.soft_cap is not None and not is_soft(targets):
        # A row that does not count can contain NaN, and NaN times zero in the derivative of tanh is NaN.
        x_NV = jnp.where((targets < 0)[..., None], 0, x_NV)
    logits_NV, logits_tangent_NV = jax.jvp(lambda x: softmax_logits(x, first, terms), (x_NV,), (dx_NV,))
    return (loss_dlogits(logits_NV, targets, row, first, terms) * logits_tangent_NV).sum(-1)


def _log_sum_exp_tangent(
    terms: Terms, x_NV: jax.Array, targets: jax.Array, row: RowStatistics, dx_NV: jax.Array
) -> jax.Array:
    first = shard_start(terms)
    logits_NV, logits_tangent_NV = jax.jvp(lambda x: softmax_logits(x, first, terms), (x_NV,), (dx_NV,))
    return (probabilities(logits_NV, row.base_N, row.rest_N) * logits_tangent_NV).sum(-1)


def _entropy_tangent(
    terms: Terms, x_NV: jax.Array, targets: jax.Array, row: RowStatistics, dx_NV: jax.Array
) -> jax.Array:
    first = shard_start(terms)
    logits_NV, logits_tangent_NV = jax.jvp(lambda x: softmax_logits(x, first, terms), (x_NV,), (dx_NV,))
    return (entropy_dlogits(logits_NV, row) * logits_tangent_NV).sum(-1)


def _loss_tangent_by_targets(terms: Terms, x_NV: jax.Array, row: RowStatistics, dtargets_NV: jax.Array) -> jax.Array:
    first = shard_start(terms)
    logits_NV = softmax_logits(x_NV, first, terms)
    return (loss_dtargets(logits_NV, row, first, terms) * dtargets_NV).sum(-1)


def _replicated_sum(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of `x` over the IPUs of `axis`, for a program in which every IPU uses the sum in the same way.

    Forward: one all-reduce of `x`. Backward: nothing is sent. Under check_vma=False `lax.psum` transposes to another
    psum, since each IPU might use the result in its own way. If all IPUs use it in the same way, as they do with a
    loss, their cotangents are equal, and the transpose multiplies one of them by n. Under check_vma=True the types
    already express this, and this is `lax.psum`.

    Args:
        x: any shape and number dtype: this IPU's part of the sum.
        axis: the mesh axis.

    Returns:
        An array like `x`, the same on all IPUs.
    """
    if is_typed(axis):
        return lax.psum(x, axis)
    return _sum_p.bind(x, axes=(axis,), parts=axis_size(axis))


# A custom primitive: nothing else in jax is linear, can be batched, and lets us choose its transpose.
_sum_p = Primitive("replicated_sum")
_sum_p.def_abstract_eval(lambda x, *, axes, parts: x)
mlir.register_lowering(_sum_p, mlir.lower_fun(lambda x, *, axes, parts: lax.psum(x, axes), multiple_results=False))
ad.deflinear2(_sum_p, lambda cotangent, x, *, axes, parts: (cotangent * parts,))
batching.primitive_batchers[_sum_p] = lambda args, dims, **params: (_sum_p.bind(*args, **params), dims[0])
