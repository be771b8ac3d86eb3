"""Find the columns of a split row that `sample` may draw: a nucleus, or the columns that are probable enough.

The nucleus is the fewest of the largest columns whose probabilities add up to top_p. Sorting would need whole rows, but
the least logit alone determines a nucleus. So this logit is searched for by the bits of a float, four bits at a time:

    threshold  0011 ....     the largest one so far with enough probability above it
    15 of      0011 0001 .. 0011 1111     each IPU adds up its columns from each threshold on,
                                          one all-reduce of 15 numbers per token adds up the IPUs' sums

Columns that equal the least logit tie; as many of them as needed are taken, lower columns first.

Dims: N tokens (any number of leading dims), V columns; n IPUs, T thresholds.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._collectives import as_varying, gather_to_all
from sharded_ops._split import Split, mask_padding, varying_axes

_DIGIT = 4  # bits of the threshold that are determined at once


def odds(logits_NK: jax.Array, top_N1: jax.Array, temperature_N1: jax.Array) -> jax.Array:
    """Return how probable each column is, relative to the row's largest one: from 0 to 1."""
    # Logits equal to the top one are treated separately, as inf - inf is NaN. At temperature 0 the others get 0.
    below_NK = (logits_NK - top_N1) / jnp.maximum(temperature_N1, jnp.finfo(logits_NK.dtype).tiny)
    return jnp.exp(jnp.where(logits_NK == top_N1, 0, below_NK))


def kept_columns(
    logits_NV: jax.Array,
    temperature_N1: jax.Array,
    top_p_N1: jax.Array | None,
    min_p_N1: jax.Array | None,
    split: Split,
    axis: str,
) -> jax.Array:
    """Return which columns of this IPU's shard can be drawn, (N.., V) bool. NaN can, since `sample` draws the first.

    Forward: one all-reduce of 1 number per token; with `top_p_N1` also the collectives of `_in_nucleus`.
    """
    logits_NV = mask_padding(lax.stop_gradient(logits_NV), -1, split, axis, fill=-jnp.inf)
    is_nan_NV = jnp.isnan(logits_NV)
    top_N = lax.pmax(jnp.where(is_nan_NV, -jnp.inf, logits_NV).max(-1), axis)
    p_NV = mask_padding(odds(logits_NV, top_N[..., None], temperature_N1), -1, split, axis, fill=0)
    kept_NV = jnp.ones(logits_NV.shape, bool)
    if top_p_N1 is not None:
        kept_NV &= _in_nucleus(logits_NV, jnp.where(is_nan_NV, 0, p_NV), top_N, top_p_N1, axis)
    if min_p_N1 is not None:
        kept_NV &= p_NV >= min_p_N1
    return kept_NV | is_nan_NV


def _in_nucleus(logits_NV: jax.Array, p_NV: jax.Array, top_N: jax.Array, top_p_N1: jax.Array, axis: str) -> jax.Array:
    """Return which columns are in the nucleus. The row's largest column always is.

    Forward, per token: one all-reduce of 1 number, one of 15 for each 4 bits of a logit, and one all-gather of 2.
    """
    ranks_NV, top_rank_N = _rank(logits_NV), _rank(top_N)
    needed_N = top_p_N1[..., 0] * lax.psum(p_NV.sum(-1), axis)
    digits_T = jnp.arange(1, 1 << _DIGIT, dtype=ranks_NV.dtype)

    def find_digit(k: jax.Array, threshold_N: jax.Array) -> jax.Array:
        shift = (ranks_NV.dtype.itemsize * 8 - _DIGIT * (k + 1)).astype(ranks_NV.dtype)
        thresholds_NT = threshold_N[..., None] | (digits_T << shift)
        above_NTV = ranks_NV[..., None, :] >= thresholds_NT[..., None]
        mass_NT = lax.psum(jnp.where(above_NTV, p_NV[..., None, :], 0).sum(-1), axis)
        digit_N = (mass_NT >= needed_N[..., None]).sum(-1).astype(ranks_NV.dtype)
        return threshold_N | (digit_N << shift)

    rounds = ranks_NV.dtype.itemsize * 8 // _DIGIT
    zeros_N = as_varying(jnp.zeros(top_N.shape, ranks_NV.dtype), varying_axes(needed_N))
    least_N = lax.fori_loop(0, rounds, find_digit, zeros_N)
    least_N1 = jnp.minimum(least_N, top_rank_N)[..., None]
    above_NV, ties_NV = ranks_NV > least_N1, ranks_NV == least_N1
    of_shard_2N = jnp.stack([jnp.where(above_NV, p_NV, 0).sum(-1), ties_NV.sum(-1).astype(p_NV.dtype)])
    parts_n2N = gather_to_all(of_shard_2N, axis)
    is_before_n1 = (jnp.arange(parts_n2N.shape[0]) < lax.axis_index(axis)).reshape(-1, *(1,) * top_N.ndim)
    tied_before_N = jnp.where(is_before_n1, parts_n2N[:, 1], 0).sum(0)
    number_NV = tied_before_N[..., None] + jnp.cumsum(ties_NV, -1) - 1  # of a tied column among all tied ones, from 0
    # The mass before a tied column; all tied columns have the same probability.
    before_NV = parts_n2N[:, 0].sum(0)[..., None] + number_NV * p_NV
    is_first_NV = (number_NV == 0) & (least_N1 == top_rank_N[..., None])
    tied_NV = ties_NV & ((before_NV < needed_N[..., None]) | is_first_NV)
    # A top_p of 1 keeps every column, even if the rounded probabilities of the first few add up to 1.
    return above_NV | tied_NV | (top_p_N1 >= 1)


def _rank(logits: jax.Array) -> jax.Array:
    """Return unsigned integers in the same order as the logits, 0 above -0."""
    bits = logits.dtype.itemsize * 8
    unsigned = jnp.uint32 if bits == 32 else jnp.uint64
    raw = lax.bitcast_convert_type(logits, unsigned)
    sign = unsigned(1 << (bits - 1))
    return jnp.where(raw & sign != 0, ~raw, raw | sign)
