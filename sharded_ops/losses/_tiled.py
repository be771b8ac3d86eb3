"""The two ways in which `linear_cross_entropy` computes loss and gradients, tile by tile (see `projection`).

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
    Statistics,
    Terms,
    Whole,
    first_column,
    logits_of,
    merged,
    numbers_sent,
    put_together,
    slopes,
    statistics,
)

_Carry = TypeVar("_Carry")

_FLOATS = 3  # a token, of `numbers_sent` for labels


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The numbers of tokens and of the shard's columns in a tile; the last tiles may have fewer."""

    tokens: int
    columns: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def loss(hidden_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array, terms: Terms, chunks: Chunks) -> jax.Array:
    """Each token's loss, whose backward pass makes the logits again."""
    return _loss_forward(hidden_ND, table_VD, targets_N, terms, chunks)[0]


def _loss_forward(
    hidden_ND: jax.Array, table_VD: jax.Array, targets_N: jax.Array, terms: Terms, chunks: Chunks
) -> tuple[jax.Array, Any]:
    axes = varying_axes(hidden_ND)
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)

    def of_tokens(start: Any, tokens: int, sent_KN: jax.Array) -> jax.Array:
        chunk_ND, labels_N = (lax.dynamic_slice_in_dim(x, start, tokens) for x in (hidden_ND, targets_N))
        chunk_ND = _read(chunk_ND, labels_N)

        def with_tile(column: Any, columns: int, before: Statistics) -> Statistics:
            tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
            first = first_column(terms) + column
            tile = statistics(logits_of(_logits(chunk_ND, tile_CD), first, terms), labels_N, first, terms)
            return merged(before, tile, _masses(column, columns, terms))

        nothing_N = as_varying(jnp.zeros(tokens, wide), axes)
        empty_N = nothing_N - jnp.inf
        spread_N = nothing_N if terms.label_smoothing else None
        start_with = Statistics(empty_N, empty_N, nothing_N, spread_N, None)
        of_shard = _over(table_VD.shape[0], chunks.columns, with_tile, start_with)
        numbers_KN = numbers_sent(of_shard, labels_N, terms)
        return lax.dynamic_update_slice_in_dim(sent_KN, numbers_KN, start, axis=1)

    sent_KN = as_varying(jnp.zeros((_FLOATS, targets_N.size), wide), axes)
    sent_KN = _over(targets_N.size, chunks.tokens, of_tokens, sent_KN)
    whole = put_together(gather_to_all(sent_KN, terms.axis), targets_N, terms)
    loss_N = jnp.where(targets_N >= 0, whole.loss_N, 0)
    return loss_N, (hidden_ND, table_VD, targets_N, whole)


def _loss_backward(
    terms: Terms, chunks: Chunks, residuals: Any, dloss_N: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    hidden_ND, table_VD, targets_N, whole = residuals
    axes = varying_axes(hidden_ND)
    if not is_typed(terms.axis):
        dloss_N = dloss_N * terms.split.parts

    def of_columns(column: Any, columns: int, found: Any) -> Any:
        dhidden_ND, dtable_VD = found
        tile_CD = _rows(table_VD, column, columns, terms)

        def of_tokens(start: Any, tokens: int, found: Any) -> Any:
            dhidden_ND, dtile_CD = found
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
            chunk_ND, labels_N, factors_N, of_whole = jax.tree.map(cut, (hidden_ND, targets_N, dloss_N, whole))
            chunk_ND = _read(chunk_ND, labels_N)
            slopes_NC = _slopes(
                _logits(chunk_ND, tile_CD), labels_N, of_whole, factors_N, first_column(terms) + column, terms
            )
            of_chunk_ND, of_tile_CD = _products(slopes_NC, chunk_ND, tile_CD)
            dchunk_ND = cut(dhidden_ND) + of_chunk_ND
            return lax.dynamic_update_slice_in_dim(dhidden_ND, dchunk_ND, start, axis=0), dtile_CD + of_tile_CD

        dtile_CD = as_varying(jnp.zeros(tile_CD.shape, dhidden_ND.dtype), axes)
        dhidden_ND, dtile_CD = _over(targets_N.size, chunks.tokens, of_tokens, (dhidden_ND, dtile_CD))
        dtile_CD = dtile_CD.astype(dtable_VD.dtype)
        return dhidden_ND, lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)

    zeros_ND = as_varying(jnp.zeros(hidden_ND.shape, dloss_N.dtype), axes)
    zeros_VD = as_varying(jnp.zeros_like(table_VD), axes)
    dhidden_ND, dtable_VD = _over(table_VD.shape[0], chunks.columns, of_columns, (zeros_ND, zeros_VD))
    return dhidden_ND.astype(hidden_ND.dtype), dtable_VD, None


loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def sum_of_losses(
    hidden_ND: jax.Array,
    table_VD: jax.Array,
    targets_N: jax.Array,
    factors_N: jax.Array,
    terms: Terms,
    chunks: Chunks,
) -> jax.Array:
    """Return the sum of each token's loss times its factor, whose forward pass makes the gradients as well."""
    return (_loss_forward(hidden_ND, table_VD, targets_N, terms, chunks)[0] * factors_N).sum()


def _sum_forward(
    hidden_ND: jax.Array,
    table_VD: jax.Array,
    targets_N: jax.Array,
    factors_N: jax.Array,
    terms: Terms,
    chunks: Chunks,
) -> tuple[jax.Array, Any]:
    axes = varying_axes(hidden_ND)
    first, wide = first_column(terms), factors_N.dtype

    def of_tokens(start: Any, tokens: int, found: Any) -> Any:
        loss_N, dhidden_ND, dtable_VD = found
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        chunk_ND, labels_N, chunk_factors_N = map(cut, (hidden_ND, targets_N, factors_N))
        chunk_ND = _read(chunk_ND, labels_N)
        x_NV = _logits(chunk_ND, table_VD)
        of_shard = statistics(logits_of(x_NV, first, terms), labels_N, first, terms)
        whole = put_together(gather_to_all(numbers_sent(of_shard, labels_N, terms), terms.axis), labels_N, terms)
        chunk_loss_N = as_varying(jnp.where(labels_N >= 0, whole.loss_N, 0), varying_axes(loss_N))

        def of_columns(column: Any, columns: int, found: Any) -> Any:
            dchunk_ND, dtable_VD = found
            x_NC = lax.dynamic_slice_in_dim(x_NV, column, columns, axis=1)
            tile_CD = _rows(table_VD, column, columns, terms)
            slopes_NC = _slopes(x_NC, labels_N, whole, chunk_factors_N, first + column, terms)
            of_chunk_ND, of_tile_CD = _products(slopes_NC, chunk_ND, tile_CD)
            dtile_CD = lax.dynamic_slice_in_dim(dtable_VD, column, columns) + of_tile_CD
            dtable_VD = lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)
            return dchunk_ND + of_chunk_ND, dtable_VD

        zeros_ND = as_varying(jnp.zeros(chunk_ND.shape, wide), axes)
        found = _over(table_VD.shape[0], chunks.columns, of_columns, (zeros_ND, dtable_VD))
        return put(loss_N, chunk_loss_N), put(dhidden_ND, found[0].astype(dhidden_ND.dtype)), found[1]

    # What is kept is yet to be multiplied with the loss's cotangent, such as a loss scale: it may be in no narrower a
    # range than the product's. bfloat16 has float32's.
    kept = wide if _is_narrow(hidden_ND.dtype) else hidden_ND.dtype
    start_with = (
        as_varying(jnp.zeros(targets_N.shape, wide), axes - {terms.axis}),
        as_varying(jnp.zeros(hidden_ND.shape, kept), axes),
        as_varying(jnp.zeros(table_VD.shape, wide), axes),
    )
    loss_N, dhidden_ND, dtable_VD = _over(targets_N.size, chunks.tokens, of_tokens, start_with)
    operands = jnp.zeros(0, hidden_ND.dtype)  # says the dtype of the gradients
    return (loss_N * factors_N).sum(), (loss_N, dhidden_ND, dtable_VD.astype(kept), operands)


def _sum_backward(
    terms: Terms, chunks: Chunks, residuals: Any, dsum: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    loss_N, dhidden_ND, dtable_VD, operands = residuals
    scale = dsum if is_typed(terms.axis) else dsum * terms.split.parts
    scaled = [(gradient * scale).astype(operands.dtype) for gradient in (dhidden_ND, dtable_VD)]
    return scaled[0], scaled[1], None, loss_N * dsum


sum_of_losses.defvjp(_sum_forward, _sum_backward)


def _over(extent: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """Return `carry = body(start, width, carry)` for each chunk of the extent; the last may be smaller."""
    full, rest = divmod(extent, chunk)
    if full == 1:
        carry = body(0, chunk, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda k, carry: body(k * chunk, chunk, carry), carry)
    return body(full * chunk, rest, carry) if rest else carry


def _read(chunk_ND: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Return a chunk's tokens, with 0 for those that don't count: they may hold NaN, which would go through slopes of
    zero.
    """
    return jnp.where((labels_N < 0)[:, None], 0, chunk_ND)


def _rows(table_VD: jax.Array, column: Any, columns: int, terms: Terms) -> jax.Array:
    """Return the table's rows of a tile, with 0 for padding: it may hold NaN, which would go through slopes of zero."""
    tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
    if not terms.split.padding:
        return tile_CD
    is_real_C = first_column(terms) + column + jnp.arange(columns) < terms.split.size
    return jnp.where(is_real_C[:, None], tile_CD, 0)


def _logits(hidden_ND: jax.Array, tile_CD: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    return lax.dot_general(hidden_ND, tile_CD, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def _products(slopes_NC: jax.Array, chunk_ND: jax.Array, tile_CD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a tile's summands of the gradients of tokens and rows, (N, D) and (C, D), in the slopes' dtype.

    The matmuls are those of the operands' dtype. For float16 the slopes, which may be as small as 1/V times a weight of
    1/N, first get as large as it can hold, and what that multiplied is taken off the products.
    """
    dtype = tile_CD.dtype
    if not _is_narrow(dtype):
        slopes_NC = slopes_NC.astype(dtype)
        return _matmul(slopes_NC, tile_CD), _matmul(slopes_NC.T, chunk_ND)
    largest = jnp.where(jnp.isfinite(slopes_NC), jnp.abs(slopes_NC), 0).max(initial=0)
    # 1e-30: of slopes that are all 0 nothing shall become infinite.
    scale = lax.stop_gradient(float(jnp.finfo(dtype).max) / 4 / jnp.maximum(largest, 1e-30))
    slopes_NC = (slopes_NC * scale).astype(dtype)
    return _matmul(slopes_NC, tile_CD) / scale, _matmul(slopes_NC.T, chunk_ND) / scale


def _is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether small numbers of float32 are 0 in this dtype, as in float16, and not in bfloat16."""
    return bool(jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _slopes(
    x_NC: jax.Array, labels_N: jax.Array, whole: Whole, factors_N: jax.Array, first: jax.Array, terms: Terms
) -> jax.Array:
    """Return the derivative of the sum of losses times factors by the raw logits of a tile."""
    logits_NC, pull = jax.vjp(lambda x_NC: logits_of(x_NC, first, terms), x_NC)
    return pull(slopes(logits_NC, labels_N, whole, first, terms) * factors_N[:, None])[0]


def _masses(column: Any, columns: int, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """By smoothing: the weight of the shard's columns before `column`, and of the tile that starts there."""
    real = terms.split.size - first_column(terms)
    until, beyond = (jnp.clip(real, 0, end) for end in (column, column + columns))
    weight = terms.label_smoothing / terms.split.size
    return until * weight, (beyond - until) * weight
