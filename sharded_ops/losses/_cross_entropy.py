"""Softmax cross-entropy over a last dim that is split over the IPUs of a mesh axis, with the options that people use.

    logits_shard --> statistics --> all-gather --> loss of each token --> weights, reduction --> result
                     (_statistics)   3 or 4 floats

Derivatives of any order and in any mode come of two rules, because backward nothing shall be sent, and in a first
derivative nothing need be:

    _whole    the log-sum-exp. Its tangent is a plain psum, whose transpose sums the cotangents of all IPUs: right for
              any use of it, as in a second derivative, where each IPU has a use of its own.
    _told     the loss. Its tangent is a sum that all IPUs use alike (_replicated_sum.py), whose transpose
              sends nothing.

The tangent of `_told` computes its probabilities again (`jax.checkpoint`): what is kept for the backward pass is the
logits, as they came, and two floats per token.

Dims: N tokens (any number of leading dims), V columns; n IPUs.
"""

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, one_axis, one_of, real_number, shown, whole_number
from sharded_ops._collectives import as_varying, check_same_on_all, gather_to_all, is_typed, varying_axes
from sharded_ops._softmax import checked_split
from sharded_ops._split import as_int32, check_one_per_row, mask_padding
from sharded_ops.losses._replicated_sum import sum_used_alike
from sharded_ops.losses._statistics import (
    Terms,
    Whole,
    first_column,
    is_soft,
    logits_of,
    numbers_sent,
    probabilities,
    put_together,
    slopes,
    statistics,
)

OutOfRange = Literal["ignore", "nan", "clip"]
Reduction = Literal["none", "mean", "sum"]


@overload
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
    return_log_sum_exp: Literal[False] = False,
) -> jax.Array: ...


@overload
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
    return_log_sum_exp: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of each token with its label, over a last dim that is split over the IPUs of `axis`.

    With x the logits, x' = soft_cap * tanh(x / soft_cap) / temperature, and u the weights that the target gives to the
    columns, a token's loss is  sum of u_v (lse(x') - x'_v) + z_loss * lse(x')**2.  For a label y, u is 1 at y; label
    smoothing makes it (1 - label_smoothing) * u + label_smoothing / size, as in torch (Szegedy et al. 2016,
    arXiv:1512.00567). The z-loss is that of Chowdhery et al. 2022 (arXiv:2204.02311), the cap that of Gemma 2
    (arXiv:2408.00118).

    Forward: one all-gather of 3 floats per token, of 4 with soft targets. Backward: nothing.
    (The matmul that made the logits reduces its dx.) Derivatives of every order and in both modes are there; forward
    mode sends one all-reduce of a float per token, and higher derivatives a few of them.

    Under check_vma=False the backward pass takes it that all IPUs use the loss alike, so that the loss's cotangent, of
    which each IPU then holds an equal part, is n times that part (see `collectives`). A program in which only one IPU
    goes on with the loss needs check_vma=True, or to say so with a factor of its own.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32. A logit of -inf is a column that cannot be; capped
            it is no longer -inf.
        labels: (N..) of any integer dtype, the same on all IPUs; or soft targets, floating, split and padded as the
            logits are. Soft targets need not add up to 1, and have derivatives too.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.
        label_smoothing: from 0 to 1; spread over the `size` columns of the whole vocabulary.
        z_loss: at least 0; what the square of the log-sum-exp costs.
        soft_cap: positive; logits stay within plus and minus this. None leaves them as they are.
        temperature: positive; what capped logits are divided by.
        ignore_index: a label that does not count: a loss of zero, and a gradient of zero to its whole row.
        out_of_range: what another label outside [0, size) does, negative ones included. "ignore": it does not count
            either. "nan": its loss and its row's gradient are NaN. "clip": it is moved to the nearest label.
        weights: (N..), the same on all IPUs; each token's loss is multiplied with it.
        reduction: "none"; "sum" over all tokens; "mean", the sum over the weights of all tokens that count (their
            number, without weights), and 0 if these add up to 0. Tokens on other mesh axes are not in it: there, sum
            both yourself.
        return_log_sum_exp: return lse(x') as well.

    Returns:
        The loss: (N..), or () if reduced, in float32 (float64 for float64 logits), the same on all IPUs. And if asked
        for the log-sum-exp, (N..) in the same dtype, of tokens that don't count as well.

    Raises:
        ValueError: the logits are not floating, their shard does not fit `size`, or by their type they are the same
            on all IPUs; labels are no integers of shape (N..) that are the same on all IPUs, nor floats of the logits'
            shape; an option is outside its range; or `axis` is not one of the enclosing shard_map's.

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
    terms = checked_terms(Terms(split, axis, label_smoothing, z_loss, soft_cap, temperature))
    labels = array_like("labels", labels)
    checked_options(out_of_range, reduction)
    if not isinstance(return_log_sum_exp, bool | np.bool_):
        raise ValueError(f"return_log_sum_exp={shown(return_log_sum_exp)} is not a bool: give True or False")
    if weights is not None:
        weights = checked_weights(weights)
        check_one_per_row("weights", weights, logits_shard)
        check_same_on_all("weights", weights, axis)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        _check_soft(labels, logits_shard, ignore_index, out_of_range)
        targets = jnp.asarray(labels, jnp.promote_types(logits_shard.dtype, jnp.float32))
        targets = mask_padding(targets, -1, split, axis, fill=0)
        faulty_N = None
    else:
        check_one_per_row("labels", labels, logits_shard)
        check_same_on_all("labels", labels, axis)
        targets, faulty_N = checked_labels(labels, split.size, ignore_index, out_of_range)
    # What a rule returns for an operand has to vary as that does: over the axis, and wherever another operand does.
    axes = varying_axes(logits_shard) | varying_axes(targets) | ({axis} if is_typed(axis) else set())
    x_NV = as_varying(logits_shard, axes)
    targets = as_varying(targets, axes) if is_soft(targets) else targets
    whole = _whole(x_NV, targets, terms)
    told = _told(x_NV, targets, whole, terms, return_log_sum_exp)
    counted_N = None if is_soft(targets) else targets >= 0
    loss = reduced(told[0], counted_N, faulty_N, weights, reduction)
    return (loss, told[1]) if return_log_sum_exp else loss


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _whole(x_NV: jax.Array, targets: jax.Array, terms: Terms) -> Whole:
    """Return the statistics of all columns. Their derivatives are right but the loss's, which `_told` gives."""
    first = first_column(terms)
    of_shard = statistics(logits_of(x_NV, first, terms), targets, first, terms)
    return put_together(gather_to_all(numbers_sent(of_shard, targets, terms), terms.axis), targets, terms)


@functools.partial(_whole.defjvp, symbolic_zeros=True)
def _whole_jvp(terms: Terms, primals: Any, tangents: Any) -> tuple[Whole, Whole]:
    (x_NV, targets), (dx_NV, dtargets) = primals, tangents
    whole = _whole(x_NV, targets, terms)
    drest_N = jnp.zeros_like(whole.rest_N)
    if not isinstance(dx_NV, SymbolicZero):
        drest_N = lax.psum(_log_sum_exp_slope(terms, x_NV, targets, whole, dx_NV), terms.axis)
    dmass_N = None
    if whole.mass_N is not None:
        dmass_N = jnp.zeros_like(whole.mass_N)
        if not isinstance(dtargets, SymbolicZero):
            dmass_N = lax.psum((1 - terms.label_smoothing) * dtargets.sum(-1), terms.axis)
    nothing_N = jnp.zeros_like(whole.base_N)
    return whole, Whole(nothing_N, drest_N, nothing_N, dmass_N)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _told(x_NV: jax.Array, targets: jax.Array, whole: Whole, terms: Terms, wants_lse: bool) -> tuple[jax.Array, ...]:
    """Return the loss, 0 where it does not count, and the log-sum-exp if it is wanted."""
    loss_N = whole.loss_N if is_soft(targets) else jnp.where(targets >= 0, whole.loss_N, 0)
    return (loss_N, whole.base_N + whole.rest_N) if wants_lse else (loss_N,)


@functools.partial(_told.defjvp, symbolic_zeros=True)
def _told_jvp(terms: Terms, wants_lse: bool, primals: Any, tangents: Any) -> Any:
    (x_NV, targets, whole), (dx_NV, dtargets, _) = primals, tangents
    told = _told(x_NV, targets, whole, terms, wants_lse)
    dtold = [jnp.zeros_like(value) for value in told]
    slope_of = (_loss_slope, _log_sum_exp_slope)
    if not isinstance(dx_NV, SymbolicZero):
        for i in range(len(told)):
            again = jax.checkpoint(functools.partial(slope_of[i], terms), prevent_cse=False)
            dtold[i] += sum_used_alike(again(x_NV, targets, whole, dx_NV), terms.axis)
    if is_soft(targets) and not isinstance(dtargets, SymbolicZero):
        gaps = functools.partial(_target_slope, terms)
        dtold[0] += sum_used_alike(jax.checkpoint(gaps, prevent_cse=False)(x_NV, whole, dtargets), terms.axis)
    return told, tuple(dtold)


# The tangents of what a shard adds to a token's loss and log-sum-exp; each linear in its last argument.


def _loss_slope(terms: Terms, x_NV: jax.Array, targets: jax.Array, whole: Whole, dx_NV: jax.Array) -> jax.Array:
    first = first_column(terms)
    if terms.soft_cap is not None and not is_soft(targets):
        # A row that does not count may hold NaN, which would go through the derivative of tanh times zero.
        x_NV = jnp.where((targets < 0)[..., None], 0, x_NV)
    logits_NV, dlogits_NV = jax.jvp(lambda x: logits_of(x, first, terms), (x_NV,), (dx_NV,))
    return (slopes(logits_NV, targets, whole, first, terms) * dlogits_NV).sum(-1)


def _log_sum_exp_slope(terms: Terms, x_NV: jax.Array, targets: jax.Array, whole: Whole, dx_NV: jax.Array) -> jax.Array:
    first = first_column(terms)
    logits_NV, dlogits_NV = jax.jvp(lambda x: logits_of(x, first, terms), (x_NV,), (dx_NV,))
    return (probabilities(logits_NV, whole.base_N, whole.rest_N) * dlogits_NV).sum(-1)


def _target_slope(terms: Terms, x_NV: jax.Array, whole: Whole, dtargets_NV: jax.Array) -> jax.Array:
    logits_NV = logits_of(x_NV, first_column(terms), terms)
    gaps_NV = (whole.base_N[..., None] - logits_NV) + whole.rest_N[..., None]
    gaps_NV = mask_padding(gaps_NV, -1, terms.split, terms.axis, fill=0)
    return (1 - terms.label_smoothing) * (gaps_NV * dtargets_NV).sum(-1)


def checked_terms(terms: Terms) -> Terms:
    """Return the terms, their numbers as Python floats, refused where one is outside its range.

    Raises:
        ValueError: names the option, its value and the rule.
    """
    cap = terms.soft_cap
    return dataclasses.replace(
        terms,
        label_smoothing=real_number("label_smoothing", terms.label_smoothing, at_least=0, at_most=1),
        z_loss=real_number("z_loss", terms.z_loss, at_least=0),
        soft_cap=None if cap is None else real_number("soft_cap", cap, above=0, instead="None for no cap"),
        temperature=real_number("temperature", terms.temperature, above=0),
    )


def checked_options(out_of_range: Any, reduction: Any) -> None:
    """Refuse an unknown way to treat labels out of range, or to reduce.

    Raises:
        ValueError: names the option, its value and what there is.
    """
    one_of("out_of_range", out_of_range, ("ignore", "nan", "clip"))
    one_of("reduction", reduction, ("none", "mean", "sum"))


def checked_weights(weights: ArrayLike) -> jax.Array:
    """Return the weights as a jax array, of real numbers or bools.

    Raises:
        ValueError: they are no array, or not of these.
    """
    own = array_like("weights", weights)
    if not any(jnp.issubdtype(own.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"weights has dtype {own.dtype}, but must be real numbers: give floats")
    return jnp.asarray(own)


def checked_labels(
    labels: ArrayLike, size: int, ignore_index: int | None, out_of_range: OutOfRange
) -> tuple[jax.Array, jax.Array | None]:
    """Labels as int32, with -1 for each that does not count; and with "nan" which of them are out of range.

    Raises:
        ValueError: the labels are not integers, or `ignore_index` is not one.
    """
    if ignore_index is not None:
        ignore_index = whole_number("ignore_index", ignore_index, instead="None if all labels count")
    inside_N = as_int32("labels", labels, size)
    own = labels if isinstance(labels, jax.Array) else np.asarray(labels)
    ignored_N = jnp.zeros(own.shape, bool)
    limits = jnp.iinfo(own.dtype)
    if ignore_index is not None and limits.min <= ignore_index <= limits.max:
        ignored_N = own == own.dtype.type(ignore_index)
    if out_of_range == "clip":
        inside_N = jnp.where(own < 0, 0, jnp.where(inside_N < 0, size - 1, inside_N))
    targets_N = jnp.where(ignored_N, -1, inside_N)
    return targets_N, (targets_N < 0) & ~ignored_N if out_of_range == "nan" else None


def reduced(
    loss_N: jax.Array,
    counted_N: jax.Array | None,
    faulty_N: jax.Array | None,
    weights: ArrayLike | None,
    reduction: Reduction,
) -> jax.Array:
    """Return the tokens' losses, weighted and reduced. Sends nothing.

    Args:
        loss_N: 0 for tokens that don't count.
        counted_N: which tokens count; None: all of them.
        faulty_N: whose loss and gradient are NaN.
        weights: of tokens, if they have any.
        reduction: none, mean or sum.
    """
    weights_N = None if weights is None else jnp.asarray(weights).astype(loss_N.dtype)
    if weights_N is not None:
        # Of tokens that don't count no weight is read either, be it NaN.
        weights_N = weights_N if counted_N is None else jnp.where(counted_N, weights_N, 0)
        loss_N = loss_N * weights_N
    if faulty_N is not None:
        # NaN as a factor, not a value, is in the gradient as well.
        loss_N = loss_N * jnp.where(faulty_N, jnp.nan, 1)
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    if weights_N is None:
        weights_N = jnp.ones_like(loss_N) if counted_N is None else counted_N.astype(loss_N.dtype)
    count = weights_N.sum()
    return jnp.where(count == 0, loss_N.sum() * 0, loss_N.sum() / jnp.where(count == 0, 1, count))


def _check_soft(targets: ArrayLike, logits_NV: jax.Array, ignore_index: int | None, out_of_range: str) -> None:
    if np.shape(targets) != logits_NV.shape:
        raise ValueError(
            f"labels are floating, so they are soft targets, of shape {np.shape(targets)}; they must have the shape of "
            f"the logits, {logits_NV.shape} on each IPU: split them as the logits, or give integers for labels"
        )
    if ignore_index is not None or out_of_range != "ignore":
        raise ValueError(
            f"ignore_index={ignore_index!r} and out_of_range={out_of_range!r} speak of labels, but soft targets were "
            "given: leave both out, and give a token that does not count a weight of 0"
        )
