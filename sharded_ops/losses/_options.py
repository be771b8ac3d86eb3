"""Check and apply the options of both cross-entropies: terms of the loss, labels, weights and reduction.

Dims: N tokens (any number of leading dims).
"""

import dataclasses
from typing import Any, Literal, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sharded_ops._arguments import array_like, one_of, real_number, shown, whole_number
from sharded_ops._split import as_int32, mask_padding
from sharded_ops.losses._statistics import Terms

OutOfRange = Literal["ignore", "nan", "clip"]
Reduction = Literal["none", "mean", "sum"]


class LossOptions(TypedDict, total=False):
    """The options of both losses besides what they return, for their overloads."""

    size: Required[int]
    axis: str
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    temperature: float
    ignore_index: int | None
    out_of_range: OutOfRange
    weights: ArrayLike | None
    reduction: Reduction


def checked_terms(terms: Terms) -> Terms:
    """Return the terms with their numbers as Python floats.

    Raises:
        ValueError: a number is outside its range; names the option, its value and the rule.
    """
    cap = terms.soft_cap
    return dataclasses.replace(
        terms,
        label_smoothing=real_number("label_smoothing", terms.label_smoothing, at_least=0, at_most=1),
        z_loss=real_number("z_loss", terms.z_loss, at_least=0),
        soft_cap=None if cap is None else real_number("soft_cap", cap, above=0, instead="None for no cap"),
        temperature=real_number("temperature", terms.temperature, above=0),
    )


def checked_options(out_of_range: Any, reduction: Any, **bools: Any) -> None:
    """Raise for an unknown value of one of these options; `bools` must be bools.

    Raises:
        ValueError: names the option, its value and the choices.
    """
    one_of("out_of_range", out_of_range, ("ignore", "nan", "clip"))
    one_of("reduction", reduction, ("none", "mean", "sum"))
    for name, value in bools.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}={shown(value)} is not a bool: give True or False")


def checked_weights(weights: ArrayLike) -> jax.Array:
    """Return the weights as a jax array of real numbers or bools.

    Raises:
        ValueError: the weights are not an array, or have another dtype.
    """
    own = array_like("weights", weights)
    if not any(jnp.issubdtype(own.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"weights has dtype {own.dtype}, but must be real numbers: give floats")
    return jnp.asarray(own)


def checked_targets(
    labels: Any, shape: tuple[int, ...], dtype: Any, terms: Terms, ignore_index: int | None, out_of_range: OutOfRange
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return the targets that the losses read, which tokens count (None: all), and which are faulty (None: none).

    Args:
        labels: integers; or soft targets, of the shape of the logits.
        shape, dtype: of the logits on each IPU, as they are computed.
        terms: they say how the columns are split.
        ignore_index, out_of_range: the options of the losses.

    Returns:
        Labels as int32, with -1 for each label that does not count; soft targets with 0 in the padding.

    Raises:
        ValueError: soft targets have another shape, or come with options that only apply to labels; or labels or
            `ignore_index` are not integers.
    """
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        if ignore_index is not None:
            ignore_index = whole_number("ignore_index", ignore_index, instead="None if all labels count")
        inside_N = as_int32("labels", labels, terms.split.size)
        own = labels if isinstance(labels, jax.Array) else np.asarray(labels)
        ignored_N = jnp.zeros(own.shape, bool)
        limits = jnp.iinfo(own.dtype)
        if ignore_index is not None and limits.min <= ignore_index <= limits.max:
            ignored_N = own == own.dtype.type(ignore_index)
        if out_of_range == "clip":
            inside_N = jnp.where(own < 0, 0, jnp.where(inside_N < 0, terms.split.size - 1, inside_N))
        targets_N = jnp.where(ignored_N, -1, inside_N)
        faulty_N = (targets_N < 0) & ~ignored_N if out_of_range == "nan" else None
        return targets_N, targets_N >= 0, faulty_N
    if np.shape(labels) != shape:
        raise ValueError(
            f"labels are floating, so they are soft targets, of shape {np.shape(labels)}; they must have the shape of "
            f"the logits, {shape} on each IPU: split them as the logits, or give integers for labels"
        )
    if ignore_index is not None or out_of_range != "ignore":
        raise ValueError(
            f"ignore_index={ignore_index!r} and out_of_range={out_of_range!r} speak of labels, but soft targets were "
            "given: leave both out, and give a token that does not count a weight of 0"
        )
    return mask_padding(jnp.asarray(labels, dtype), -1, terms.split, terms.axis, fill=0), None, None


def reduce_losses(
    loss_N: jax.Array,
    counted_N: jax.Array | None,
    faulty_N: jax.Array | None,
    weights: ArrayLike | None,
    reduction: Reduction,
) -> jax.Array:
    """Return the tokens' losses, weighted and reduced. Sends nothing.

    Args:
        loss_N: the loss of each token, 0 for tokens that don't count.
        counted_N: which tokens count; None if all tokens count.
        faulty_N: the tokens whose loss and gradient must become NaN; None if there are none.
        weights: the weight of each token; None for 1.
        reduction: "none", "mean" or "sum".
    """
    weights_N = None if weights is None else jnp.asarray(weights).astype(loss_N.dtype)
    if weights_N is not None:
        # The weight of a token that doesn't count can be NaN, and must not be read.
        weights_N = weights_N if counted_N is None else jnp.where(counted_N, weights_N, 0)
        loss_N = loss_N * weights_N
    if faulty_N is not None:
        # Multiplying by NaN, rather than putting NaN in, makes the gradient NaN as well.
        loss_N = loss_N * jnp.where(faulty_N, jnp.nan, 1)
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    if weights_N is None:
        weights_N = jnp.ones_like(loss_N) if counted_N is None else counted_N.astype(loss_N.dtype)
    count = weights_N.sum()
    return jnp.where(count == 0, loss_N.sum() * 0, loss_N.sum() / jnp.where(count == 0, 1, count))
