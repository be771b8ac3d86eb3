"""Compute the loss and gradients of `linear_cross_entropy` tile by tile, in either of its two ways.

`_linear_cross_entropy` draws both ways: `token_losses` computes the gradients in the backward pass, `sum_of_losses` in
the forward pass.

Dims: N tokens, D features, V rows of the shard; C columns of a tile, K floats per token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._collectives import as_varying, gather_to_all, is_typed, varying_axes
from sharded_ops.losses._statistics import (
    RowStatistics,
    Statistics,
    Terms,
    combine_shards,
    loss_dlogits,
    merge_tiles,
    shard_start,
    shard_summary,
    softmax_logits,
    statistics,
)

_Carry = TypeVar("_Carry")

_SUMMARY_FLOATS = 3  # floats per token in the `shard_summary` for labels


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The size of a tile: tokens, and columns of the shard. The last tiles may have fewer of either."""

    tokens: int
    columns: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(
    hidden_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array, terms: Terms, chunks: Chunks
) -> jax.Array:
    """Return each token's loss. The backward pass computes the logits again.

    Forward: one all-gather of 3 floats per token. Backward: nothing.
    """
    return _token_losses_forward(hidden_ND, table_VD, targets_N, terms, chunks)[0]


def _token_losses_forward(
    hidden_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array, terms: Terms, chunks: Chunks
) -> tuple[jax.Array, Any]:
    axes = varying_axes(hidden_ND)
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def summarise_tokens(start: Any, tokens: int, summary_KN: jax.Array) -> jax.Array:
        chunk_ND, labels_N = (lax.dynamic_slice_in_dim(x, start, tokens) for x in (hidden_ND, targets_N))
        chunk_ND = _counted_tokens(chunk_ND, labels_N)

        def merge_tile(column: Any, columns: int, before: Statistics) -> Statistics:
            tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
            first = shard_start(terms) + column
            tile = statistics(softmax_logits(_logits(chunk_ND, tile_CD), first, terms), labels_N, first, terms)
            return merge_tiles(before, tile, _tile_smoothing_masses(column, columns, terms))

        zeros_N = as_varying(jnp.zeros(tokens, wide), axes)
        lowest_N = zeros_N - jnp.inf
        gap_N = zeros_N if terms.label_smoothing else None
        no_columns = Statistics(lowest_N, lowest_N, zeros_N, gap_N, None)
        shard = _for_chunks(table_VD.shape[0], chunks.columns, merge_tile, no_columns)
        chunk_summary_KN = shard_summary(shard, labels_N, terms)
        return lax.dynamic_update_slice_in_dim(summary_KN, chunk_summary_KN, start, axis=1)

    summary_KN = as_varying(jnp.zeros((_SUMMARY_FLOATS, targets_N.size), wide), axes)
    summary_KN = _for_chunks(targets_N.size, chunks.tokens, summarise_tokens, summary_KN)
    row = combine_shards(gather_to_all(summary_KN, terms.axis), targets_N, terms)
    loss_N = jnp.where(targets_N >= 0, row.loss_N, 0)
    return loss_N, (hidden_ND, table_VD, targets_N, row)


def _token_losses_backward(
    terms: Terms, chunks: Chunks, residuals: Any, dloss_N: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    hidden_ND, table_VD, targets_N, row = residuals
    axes = varying_axes(hidden_ND)
    if not is_typed(terms.axis):
        dloss_N = dloss_N * terms.split.parts

    def add_columns(column: Any, columns: int, carry: Any) -> Any:
        dhidden_ND, dtable_VD = carry
        tile_CD = _table_rows(table_VD, column, columns, terms)

        def add_tokens(start: Any, tokens: int, carry: Any) -> Any:
            dhidden_ND, dtile_CD = carry
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
            chunk_ND, labels_N, factors_N, chunk_row = jax.tree.map(cut, (hidden_ND, targets_N, dloss_N, row))
            chunk_ND = _counted_tokens(chunk_ND, labels_N)
            dlogits_NC = _raw_dlogits(
                _logits(chunk_ND, tile_CD), labels_N, chunk_row, factors_N, shard_start(terms) + column, terms
            )
            dlogits_NC, scale = _in_range(dlogits_NC, tile_CD.dtype)
            dchunk_ND = cut(dhidden_ND) + _matmul(dlogits_NC, tile_CD) / scale
            dtile_CD = dtile_CD + _matmul(dlogits_NC.T, chunk_ND) / scale
            return lax.dynamic_update_slice_in_dim(dhidden_ND, dchunk_ND, start, axis=0), dtile_CD

        dtile_CD = as_varying(jnp.zeros(tile_CD.shape, dhidden_ND.dtype), axes)
        dhidden_ND, dtile_CD = _for_chunks(targets_N.size, chunks.tokens, add_tokens, (dhidden_ND, dtile_CD))
        dtile_CD = dtile_CD.astype(dtable_VD.dtype)
        return dhidden_ND, lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)

    zeros_ND = as_varying(jnp.zeros(hidden_ND.shape, dloss_N.dtype), axes)
    zeros_VD = as_varying(jnp.zeros_like(table_VD), axes)
    dhidden_ND, dtable_VD = _for_chunks(table_VD.shape[0], chunks.columns, add_columns, (zeros_ND, zeros_VD))
    return dhidden_ND.astype(hidden_ND.dtype), dtable_VD, None


token_losses.defvjp(_token_losses_forward, _token_losses_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def sum_of_losses(
    hidden_ND: jax.Array,
    table_VD: jax.Array,
    targets_N: jax.Array,
    factors_N: jax.Array,
    terms: Terms,
    chunks: Chunks,
) -> jax.Array:
    """Return the sum of each token's loss times its factor. If differentiated, the forward pass computes the gradients.

    Forward: one all-gather of 3 floats per token, or if differentiated as many floats in one all-gather for each chunk
    of tokens. Backward: nothing.
    """
    return (_token_losses_forward(hidden_ND, table_VD, targets_N, terms, chunks)[0] * factors_N).sum()


def _sum_forward(
    hidden_ND: jax.Array,
    table_VD: jax.Array,
    targets_N: jax.Array,
    factors_N: jax.Array,
    terms: Terms,
    chunks: Chunks,
) -> tuple[jax.Array, Any]:
    axes = varying_axes(hidden_ND)
    first, wide = shard_start(terms), factors_N.dtype

    def add_tokens(start: Any, tokens: int, carry: Any) -> Any:
        loss_N, dhidden_ND, dtable_VD = carry
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        chunk_ND, labels_N, chunk_factors_N = map(cut, (hidden_ND, targets_N, factors_N))
        chunk_ND = _counted_tokens(chunk_ND, labels_N)
        logits_NV, pull = jax.vjp(lambda x_NV: softmax_logits(x_NV, first, terms), _logits(chunk_ND, table_VD))
        shard = statistics(logits_NV, labels_N, first, terms)
        row = combine_shards(gather_to_all(shard_summary(shard, labels_N, terms), terms.axis), labels_N, terms)
        chunk_loss_N = as_varying(jnp.where(labels_N >= 0, row.loss_N, 0), varying_axes(loss_N))

        (dlogits_NV,) = pull(loss_dlogits(logits_NV, labels_N, row, first, terms) * chunk_factors_N[:, None])
        dlogits_NV, scale = _in_range(dlogits_NV, table_VD.dtype)
        # One matmul with the whole table, unless rows of padding must be replaced, which would be a copy of it.
        dchunk_ND = (
            as_varying(jnp.zeros(chunk_ND.shape, wide), axes)
            if terms.split.padding
            else _matmul(dlogits_NV, table_VD) / scale
        )

        def add_columns(column: Any, columns: int, carry: Any) -> Any:
            dchunk_ND, dtable_VD = carry
            dlogits_NC = lax.dynamic_slice_in_dim(dlogits_NV, column, columns, axis=1)
            if terms.split.padding:
                dchunk_ND += _matmul(dlogits_NC, _table_rows(table_VD, column, columns, terms)) / scale
            dtile_CD = lax.dynamic_slice_in_dim(dtable_VD, column, columns) + _matmul(dlogits_NC.T, chunk_ND) / scale
            return dchunk_ND, lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)

        carry = (dchunk_ND, dtable_VD)
        dchunk_ND, dtable_VD = _for_chunks(table_VD.shape[0], chunks.columns, add_columns, carry)
        return put(loss_N, chunk_loss_N), put(dhidden_ND, dchunk_ND.astype(dhidden_ND.dtype)), dtable_VD

    # The gradients that are kept are still to be multiplied by the loss's cotangent, such as a loss scale. So the dtype
    # that they are kept in must not have a narrower range than float32; bfloat16 has the same range.
    kept_dtype = wide if _is_narrow(hidden_ND.dtype) else hidden_ND.dtype
    zeros = (
        as_varying(jnp.zeros(targets_N.shape, wide), axes - {terms.axis}),
        as_varying(jnp.zeros(hidden_ND.shape, kept_dtype), axes),
        as_varying(jnp.zeros(table_VD.shape, wide), axes),
    )
    loss_N, dhidden_ND, dtable_VD = _for_chunks(targets_N.size, chunks.tokens, add_tokens, zeros)
    operands = jnp.zeros(0, hidden_ND.dtype)  # carries the dtype that the gradients must have
    return (loss_N * factors_N).sum(), (loss_N, dhidden_ND, dtable_VD.astype(kept_dtype), operands)


def _sum_backward(
    terms: Terms, chunks: Chunks, residuals: Any, dsum: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    loss_N, dhidden_ND, dtable_VD, operands = residuals
    scale = dsum if is_typed(terms.axis) else dsum * terms.split.parts
    scaled = [(gradient * scale).astype(operands.dtype) for gradient in (dhidden_ND, dtable_VD)]
    return scaled[0], scaled[1], None, loss_N * dsum


sum_of_losses.defvjp(_sum_forward, _sum_backward)


def _for_chunks(extent: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """Run `carry = body(start, width, carry)` for each chunk of the extent, and return the last carry.

    The last chunk may be smaller than `chunk`.
    """
    full, rest = divmod(extent, chunk)
    if full == 1:
        carry = body(0, chunk, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda k, carry: body(k * chunk, chunk, carry), carry)
    return body(full * chunk, rest, carry) if rest else carry


def _counted_tokens(chunk_ND: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Return a chunk's tokens, with 0 for those that don't count.

    Their dlogits are zero, but they may be NaN, and NaN times zero is NaN.
    """
    return jnp.where((labels_N < 0)[:, None], 0, chunk_ND)


def _table_rows(table_VD: jax.Array, column: Any, columns: int, terms: Terms) -> jax.Array:
    """Return the table's rows of a tile, with 0 for padding, which may be NaN: NaN times dlogits of zero is NaN."""
    tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
    if not terms.split.padding:
        return tile_CD
    is_real_C = shard_start(terms) + column + jnp.arange(columns) < terms.split.size
    return jnp.where(is_real_C[:, None], tile_CD, 0)


def _logits(hidden_ND: jax.Array, tile_CD: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    return lax.dot_general(hidden_ND, tile_CD, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def _in_range(dlogits: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | float]:
    """Return dlogits times a scale, in `dtype`, and the scale by which products with them are to be divided.

    In float16 dlogits as small as 1/V times a weight of 1/N would be rounded to 0. So they are first scaled up as far
    as float16 allows. The scale is 1 for other dtypes.
    """
    if not _is_narrow(dtype):
        return dlogits.astype(dtype), 1.0
    largest = jnp.where(jnp.isfinite(dlogits), jnp.abs(dlogits), 0).max(initial=0)
    # The 1e-30 keeps the scale finite where all dlogits are 0.
    scale = lax.stop_gradient(float(jnp.finfo(dtype).max) / 4 / jnp.maximum(largest, 1e-30))
    return (dlogits * scale).astype(dtype), scale


def _is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether small numbers of float32 become 0 in this dtype: true for float16, and not for bfloat16."""
    return bool(jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _raw_dlogits(
    x_NC: jax.Array, labels_N: jax.Array, row: RowStatistics, factors_N: jax.Array, first: jax.Array, terms: Terms
) -> jax.Array:
    """Return the derivative of the sum of (loss times factor) by the raw logits of a tile."""
    logits_NC, pull = jax.vjp(lambda x_NC: softmax_logits(x_NC, first, terms), x_NC)
    return pull(loss_dlogits(logits_NC, labels_N, row, first, terms) * factors_N[:, None])[0]


def _tile_smoothing_masses(column: Any, columns: int, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """Return the total weight that label smoothing gives to the shard's columns before `column`, and to the tile that
    starts there.
    """
    real = terms.split.size - shard_start(terms)
    until, beyond = (jnp.clip(real, 0, end) for end in (column, column + columns))
    weight = terms.label_smoothing / terms.split.size
    return until * weight, (beyond - until) * weight
