"""The two ways in which `linear_cross_entropy` computes loss and gradients, tile by tile (see `projection`).

Dims: N tokens, D features, V rows of the shard; C columns of a tile, K floats a token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops.collectives import as_varying, gather_to_all, is_typed, varying_axes
from sharded_ops.tiles import (
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


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many tokens and how many of the shard's columns a tile has, the last ones excepted."""

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

    shape = (3 if terms.label_smoothing else 2, targets_N.size)
    sent_KN = _over(targets_N.size, chunks.tokens, of_tokens, as_varying(jnp.zeros(shape, wide), axes))
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
            slopes_NC = _slopes(
                _logits(chunk_ND, tile_CD), labels_N, of_whole, factors_N, first_column(terms) + column, terms
            ).astype(table_VD.dtype)
            dchunk_ND = cut(dhidden_ND) + _matmul(slopes_NC, tile_CD)
            dtile_CD = dtile_CD + _matmul(slopes_NC.T, chunk_ND)
            return lax.dynamic_update_slice_in_dim(dhidden_ND, dchunk_ND, start, axis=0), dtile_CD

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
    """The sum of each token's loss times its factor, whose forward pass makes the gradients as well."""
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
        x_NV = _logits(chunk_ND, table_VD)
        of_shard = statistics(logits_of(x_NV, first, terms), labels_N, first, terms)
        whole = put_together(gather_to_all(numbers_sent(of_shard, labels_N, terms), terms.axis), labels_N, terms)
        chunk_loss_N = as_varying(jnp.where(labels_N >= 0, whole.loss_N, 0), varying_axes(loss_N))

        def of_columns(column: Any, columns: int, found: Any) -> Any:
            dchunk_ND, dtable_VD = found
            x_NC = lax.dynamic_slice_in_dim(x_NV, column, columns, axis=1)
            tile_CD = _rows(table_VD, column, columns, terms)
            dtile_CD = lax.dynamic_slice_in_dim(dtable_VD, column, columns)
            slopes_NC = _slopes(x_NC, labels_N, whole, chunk_factors_N, first + column, terms).astype(table_VD.dtype)
            dtile_CD = dtile_CD + _matmul(slopes_NC.T, chunk_ND)
            dtable_VD = lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)
            return dchunk_ND + _matmul(slopes_NC, tile_CD), dtable_VD

        zeros_ND = as_varying(jnp.zeros(chunk_ND.shape, wide), axes)
        found = _over(table_VD.shape[0], chunks.columns, of_columns, (zeros_ND, dtable_VD))
        return put(loss_N, chunk_loss_N), put(dhidden_ND, found[0].astype(hidden_ND.dtype)), found[1]

    start_with = (
        as_varying(jnp.zeros(targets_N.shape, wide), axes - {terms.axis}),
        as_varying(jnp.zeros_like(hidden_ND), axes),
        as_varying(jnp.zeros(table_VD.shape, wide), axes),
    )
    loss_N, dhidden_ND, dtable_VD = _over(targets_N.size, chunks.tokens, of_tokens, start_with)
    return (loss_N * factors_N).sum(), (loss_N, dhidden_ND, dtable_VD.astype(table_VD.dtype))


def _sum_backward(
    terms: Terms, chunks: Chunks, residuals: Any, dsum: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    loss_N, dhidden_ND, dtable_VD = residuals
    scale = dsum if is_typed(terms.axis) else dsum * terms.split.parts
    scaled = [(gradient * scale).astype(gradient.dtype) for gradient in (dhidden_ND, dtable_VD)]
    return scaled[0], scaled[1], None, loss_N * dsum


sum_of_losses.defvjp(_sum_forward, _sum_backward)


def _over(extent: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """`carry = body(start, width, carry)` for each chunk of the extent; the last may be smaller."""
    full, rest = divmod(extent, chunk)
    if full == 1:
        carry = body(0, chunk, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda k, carry: body(k * chunk, chunk, carry), carry)
    return body(full * chunk, rest, carry) if rest else carry


def _rows(table_VD: jax.Array, column: Any, columns: int, terms: Terms) -> jax.Array:
    """The table's rows of a tile, with 0 for padding: it may hold NaN, which would go through slopes of zero."""
    tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
    if not terms.split.padding:
        return tile_CD
    is_real_C = first_column(terms) + column + jnp.arange(columns) < terms.split.size
    return jnp.where(is_real_C[:, None], tile_CD, 0)


def _logits(hidden_ND: jax.Array, tile_CD: jax.Array) -> jax.Array:
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    return lax.dot_general(hidden_ND, tile_CD, (((1,), (1,)), ((), ())), preferred_element_type=wide)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _slopes(
    x_NC: jax.Array, labels_N: jax.Array, whole: Whole, factors_N: jax.Array, first: jax.Array, terms: Terms
) -> jax.Array:
    """The derivative of the sum of losses times factors by the raw logits of a tile."""
    logits_NC, pull = jax.vjp(lambda x_NC: logits_of(x_NC, first, terms), x_NC)
    return pull(slopes(logits_NC, labels_N, whole, first, terms) * factors_N[:, None])[0]


def _masses(column: Any, columns: int, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """By smoothing: the weight of the shard's columns before `column`, and of the tile that starts there."""
    real = terms.split.size - first_column(terms)
    until, beyond = (jnp.clip(real, 0, end) for end in (column, column + columns))
    weight = terms.label_smoothing / terms.split.size
    return until * weight, (beyond - until) * weight
