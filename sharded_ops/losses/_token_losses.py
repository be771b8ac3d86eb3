"""Compute losses tile by tile, and gradients in the backward pass, or in the same pass as the losses.

    token_losses     each token's loss                  gradients="backward"
    sum_of_losses    the weighted sum of the losses     gradients="forward"

Padding of the table can be NaN, and so can the rows
of tokens that don't count: neither reaches a product here.

Dims: N tokens, D features, V rows of the shard; C columns of a tile, K floats per token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._collectives import ON_A_VMAPPED_AXIS, as_varying, gather_to_all, is_typed, varying_axes
from sharded_ops.losses._statistics import (
    RowStatistics,
    Statistics,
    Terms,
    combine_shards,
    entropy_dlogits,
    is_soft,
    loss_dlogits,
    loss_dtargets,
    merge_tiles,
    probabilities,
    shard_start,
    shard_summary,
    softmax_logits,
    statistics,
)

_Carry = TypeVar("_Carry")

_FLOATS = 3  # per token in the `shard_summary`, besides one with soft targets, and one with the entropy


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The size of a tile: tokens, and columns of the shard. The last tiles can have fewer tokens or columns."""

    tokens: int
    columns: int


class Operands(NamedTuple):
    """Tokens, this IPU's rows of the table and of the bias, and labels or soft targets."""

    hidden_ND: jax.Array
    table_VD: jax.Array
    bias_V: jax.Array | None
    targets: Any  # an array; as a cotangent None for labels


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def token_losses(
    operands: Operands, terms: Terms, chunks: Chunks, wants_lse: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return each token's loss, with `wants_lse` its log-sum-exp, and with `terms.entropy` its entropy.

    The backward pass computes the logits again.

    Forward: one all-gather of 3 floats per token, one more with soft targets, and one more with the entropy. Backward:
    nothing.
    """
    return _forward(operands, terms, chunks, wants_lse)[0]


def _forward(
    operands: Operands, terms: Terms, chunks: Chunks, wants_lse: bool
) -> tuple[tuple[jax.Array, jax.Array | None, jax.Array | None], Any]:
    hidden_ND, table_VD, bias_V, targets = operands
    axes = varying_axes(hidden_ND)
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    soft = is_soft(targets)

    def summarise_tokens(start: Any, tokens: int, summary_KN: jax.Array) -> jax.Array:
        chunk_ND, of_chunk = (lax.dynamic_slice_in_dim(x, start, tokens) for x in (hidden_ND, targets))
        chunk_ND = _read_tokens(chunk_ND, of_chunk, wants_lse or terms.entropy)

        def merge_tile(column: Any, columns: int, before: Statistics) -> Statistics:
            tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
            first = shard_start(terms) + column
            logits_NC = softmax_logits(logits(chunk_ND, tile_CD, bias_tile(bias_V, column, columns)), first, terms)
            tile = statistics(logits_NC, _of_columns(of_chunk, column, columns), first, terms)
            return merge_tiles(before, tile, _tile_smoothing_masses(column, columns, terms))

        zeros_N = as_varying(jnp.zeros(tokens, wide), axes)
        lowest_N = zeros_N - jnp.inf
        gap_N = zeros_N if terms.label_smoothing or soft else None
        mass_N, depth_N = (zeros_N if wanted else None for wanted in (soft, terms.entropy))
        no_columns = Statistics(lowest_N, lowest_N, None if soft else zeros_N, gap_N, mass_N, depth_N)
        shard = for_chunks(table_VD.shape[0], chunks.columns, merge_tile, no_columns)
        chunk_summary_KN = shard_summary(shard, of_chunk, terms)
        return lax.dynamic_update_slice_in_dim(summary_KN, chunk_summary_KN, start, axis=1)

    tokens = hidden_ND.shape[0]
    summary_KN = as_varying(jnp.zeros((_FLOATS + soft + terms.entropy, tokens), wide), axes)
    summary_KN = for_chunks(tokens, chunks.tokens, summarise_tokens, summary_KN)
    row = combine_shards(gather_to_all(summary_KN, terms.axis), targets, terms)
    loss_N = row.loss_N if soft else jnp.where(targets >= 0, row.loss_N, 0)
    outputs = (loss_N, row.base_N + row.rest_N if wants_lse else None, row.entropy_N)
    return outputs, (operands, row)


def _backward(terms: Terms, chunks: Chunks, wants_lse: bool, residuals: Any, cotangents: Any) -> tuple[Any]:
    (hidden_ND, table_VD, bias_V, targets), row = residuals
    axes = varying_axes(hidden_ND)
    if not is_typed(terms.axis):
        cotangents = jax.tree.map(lambda cotangent: cotangent * terms.split.parts, cotangents)
    wide = cotangents[0].dtype

    def add_columns(column: Any, columns: int, carry: Any) -> Any:
        dhidden_ND, dshard, dtargets_NV = carry
        tile = table_rows(table_VD, column, columns, terms), bias_tile(bias_V, column, columns)
        first = shard_start(terms) + column

        def add_tokens(start: Any, tokens: int, carry: Any) -> Any:
            dhidden_ND, dtile, dtargets_NV = carry
            cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
            chunk_ND, of_chunk, of_outputs, chunk_row = jax.tree.map(cut, (hidden_ND, targets, cotangents, row))
            chunk_ND = _read_tokens(chunk_ND, of_chunk, wants_lse or terms.entropy)
            of_tile = _of_columns(of_chunk, column, columns)
            dchunk_ND, parts, dtargets_NC = _tile_gradients(
                chunk_ND, tile, of_tile, chunk_row, of_outputs, first, terms
            )
            if dtargets_NC is not None:
                dtargets_NV = lax.dynamic_update_slice(dtargets_NV, dtargets_NC, (start, column))
            dhidden_ND = lax.dynamic_update_slice_in_dim(dhidden_ND, cut(dhidden_ND) + dchunk_ND, start, axis=0)
            return dhidden_ND, jax.tree.map(jnp.add, dtile, parts), dtargets_NV

        zeros = jax.tree.map(lambda x: as_varying(jnp.zeros(x.shape, wide), axes), tile)
        carry = (dhidden_ND, zeros, dtargets_NV)
        dhidden_ND, dtile, dtargets_NV = for_chunks(hidden_ND.shape[0], chunks.tokens, add_tokens, carry)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=column, axis=0)
        dshard = jax.tree.map(lambda whole, part: put(whole, part.astype(whole.dtype)), dshard, dtile)
        return dhidden_ND, dshard, dtargets_NV

    zeros = (
        as_varying(jnp.zeros(hidden_ND.shape, wide), axes),
        jax.tree.map(lambda x: as_varying(jnp.zeros_like(x), axes), (table_VD, bias_V)),
        as_varying(jnp.zeros_like(targets), axes) if is_soft(targets) else None,
    )
    dhidden_ND, dshard, dtargets_NV = for_chunks(table_VD.shape[0], chunks.columns, add_columns, zeros)
    dtable_VD, dbias_V = dshard
    return (Operands(dhidden_ND.astype(hidden_ND.dtype), dtable_VD, dbias_V, dtargets_NV),)


token_losses.defvjp(_forward, _backward, **ON_A_VMAPPED_AXIS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sum_of_losses(operands: Operands, factors_N: jax.Array, terms: Terms, chunks: Chunks) -> jax.Array:
    """Return the sum of each token's loss times its factor. If differentiated, the forward pass computes the gradients.

    Forward: one all-gather of 3 floats per token; if differentiated, one all-gather for each chunk of tokens instead,
    with 3 floats per token. Backward: nothing.
    """
    outputs: Any = token_losses(operands, terms, chunks, False)
    return (outputs[0] * factors_N).sum()


def _sum_forward(operands: Operands, factors_N: jax.Array, terms: Terms, chunks: Chunks) -> tuple[jax.Array, Any]:
    hidden_ND, table_VD, bias_V, targets_N = operands
    axes = varying_axes(hidden_ND)
    first, wide = shard_start(terms), factors_N.dtype

    def losses(chunk_ND: jax.Array, labels_N: jax.Array, factors_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the loss of each token of a chunk, and the derivative of their weighted sum by the logits."""
        raw_NV = logits(chunk_ND, table_VD, bias_V)
        logits_NV, pull = jax.vjp(lambda x_NV: softmax_logits(x_NV, first, terms), raw_NV)
        shard = statistics(logits_NV, labels_N, first, terms)
        row = combine_shards(gather_to_all(shard_summary(shard, labels_N, terms), terms.axis), labels_N, terms)
        (dlogits_NV,) = pull(loss_dlogits(logits_NV, labels_N, row, first, terms) * factors_N[:, None])
        return jnp.where(labels_N >= 0, row.loss_N, 0), dlogits_NV

    def add_tokens(start: Any, tokens: int, carry: Any) -> Any:
        loss_N, dhidden_ND, dtable_VD, dbias_V = carry
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tokens)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        chunk_ND, labels_N, chunk_factors_N = map(cut, (hidden_ND, targets_N, factors_N))
        chunk_ND = counted_tokens(chunk_ND, labels_N)
        chunk_loss_N, dlogits_NV = losses(chunk_ND, labels_N, chunk_factors_N)
        chunk_loss_N = as_varying(chunk_loss_N, varying_axes(loss_N))
        if dbias_V is not None:
            dbias_V += dlogits_NV.sum(0)
        dchunk_ND, dtable_VD = _sum_products(dlogits_NV, chunk_ND, table_VD, dtable_VD, chunks.columns, terms)
        dhidden_ND = put(dhidden_ND, dchunk_ND.astype(dhidden_ND.dtype))
        return put(loss_N, chunk_loss_N), dhidden_ND, dtable_VD, dbias_V

    # The kept gradients are still to be multiplied by the loss's cotangent, such as a loss scale. So their dtype must
    # not have a narrower range than float32; bfloat16 has the same range.
    kept_dtype = wide if is_narrow(hidden_ND.dtype) else hidden_ND.dtype
    zeros = (
        as_varying(jnp.zeros(targets_N.shape, wide), axes - {terms.axis}),
        as_varying(jnp.zeros(hidden_ND.shape, kept_dtype), axes),
        as_varying(jnp.zeros(table_VD.shape, wide), axes),
        None if bias_V is None else as_varying(jnp.zeros(bias_V.shape, wide), axes),
    )
    loss_N, dhidden_ND, dtable_VD, dbias_V = for_chunks(targets_N.size, chunks.tokens, add_tokens, zeros)
    # empty arrays that record the dtypes of the operands, which the gradients must have
    like = jax.tree.map(lambda operand: jnp.zeros(0, operand.dtype), (hidden_ND, table_VD, bias_V))
    gradients = (dhidden_ND, dtable_VD.astype(kept_dtype), dbias_V)
    return (loss_N * factors_N).sum(), (loss_N, gradients, like)


def _sum_products(
    dlogits_NV: jax.Array, chunk_ND: jax.Array, table_VD: jax.Array, dtable_VD: jax.Array, columns: int, terms: Terms
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of a chunk's tokens, and the table's gradient with the chunk's part added tile by tile."""
    dlogits_NV, scale = in_range(dlogits_NV, table_VD.dtype)

    def add_columns(column: Any, columns: int, carry: Any) -> Any:
        dchunk_ND, dtable_VD = carry
        dlogits_NC = lax.dynamic_slice_in_dim(dlogits_NV, column, columns, axis=1)
        if terms.split.padding:
            dchunk_ND += matmul(dlogits_NC, table_rows(table_VD, column, columns, terms)) / scale
        dtile_CD = lax.dynamic_slice_in_dim(dtable_VD, column, columns) + matmul(dlogits_NC.T, chunk_ND) / scale
        return dchunk_ND, lax.dynamic_update_slice_in_dim(dtable_VD, dtile_CD, column, axis=0)

    # One matmul with the whole table, unless rows of padding must be replaced, which would copy the table.
    if terms.split.padding:
        dchunk_ND = as_varying(jnp.zeros(chunk_ND.shape, dtable_VD.dtype), varying_axes(dtable_VD))
    else:
        dchunk_ND = matmul(dlogits_NV, table_VD) / scale
    return for_chunks(table_VD.shape[0], columns, add_columns, (dchunk_ND, dtable_VD))


def _sum_backward(terms: Terms, chunks: Chunks, residuals: Any, dsum: jax.Array) -> tuple[Any, jax.Array]:
    loss_N, gradients, like = residuals
    scale = dsum if is_typed(terms.axis) else dsum * terms.split.parts
    dhidden_ND, dtable_VD, dbias_V = jax.tree.map(
        lambda gradient, like: (gradient * scale).astype(like.dtype), gradients, like
    )
    return Operands(dhidden_ND, dtable_VD, dbias_V, None), loss_N * dsum


sum_of_losses.defvjp(_sum_forward, _sum_backward, **ON_A_VMAPPED_AXIS)


def _tile_gradients(
    chunk_ND: jax.Array, tile: Any, of_tile: jax.Array, row: RowStatistics, of_outputs: Any, first: Any, terms: Terms
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None], jax.Array | None]:
    """Return a tile's parts of the gradients of hidden (N, D), table (C, D) and bias (C,), and soft targets (N, C)."""
    tile_CD, bias_C = tile
    logits_NC, pull = jax.vjp(lambda x_NC: softmax_logits(x_NC, first, terms), logits(chunk_ND, tile_CD, bias_C))
    (dlogits_NC,) = pull(_dlogits(logits_NC, of_tile, row, of_outputs, first, terms))
    dbias_C = None if bias_C is None else dlogits_NC.sum(0)
    dtargets_NC = loss_dtargets(logits_NC, row, first, terms) * of_outputs[0][:, None] if is_soft(of_tile) else None
    dlogits_NC, scale = in_range(dlogits_NC, tile_CD.dtype)
    dchunk_ND = matmul(dlogits_NC, tile_CD) / scale
    return dchunk_ND, (matmul(dlogits_NC.T, chunk_ND) / scale, dbias_C), dtargets_NC


def _dlogits(
    logits_NC: jax.Array, of_tile: jax.Array, row: RowStatistics, of_outputs: Any, first: jax.Array, terms: Terms
) -> jax.Array:
    """Return the derivative of sum(output * its cotangent), over loss, log-sum-exp and entropy, by a tile's logits."""
    dloss_N, dlse_N, dentropy_N = of_outputs
    dlogits_NC = loss_dlogits(logits_NC, of_tile, row, first, terms) * dloss_N[:, None]
    if dlse_N is not None:
        dlogits_NC += probabilities(logits_NC, row.base_N, row.rest_N) * dlse_N[:, None]
    return dlogits_NC if dentropy_N is None else dlogits_NC + entropy_dlogits(logits_NC, row) * dentropy_N[:, None]


def _read_tokens(chunk_ND: jax.Array, of_chunk: jax.Array, reads_all: bool) -> jax.Array:
    """Return the tokens, with 0 for those that are not read. With soft targets or `reads_all`, all are read."""
    return chunk_ND if reads_all or is_soft(of_chunk) else counted_tokens(chunk_ND, of_chunk)


def _of_columns(of_chunk: jax.Array, column: Any, columns: int) -> jax.Array:
    """Return the targets of a tile: labels unchanged, and for soft targets only the tile's columns."""
    return lax.dynamic_slice_in_dim(of_chunk, column, columns, axis=1) if is_soft(of_chunk) else of_chunk


def _tile_smoothing_masses(column: Any, columns: int, terms: Terms) -> tuple[jax.Array, jax.Array]:
    """Return the total weights that label smoothing gives to the shard's columns before `column`, and to the tile."""
    real = terms.split.size - shard_start(terms)
    until, beyond = (jnp.clip(real, 0, end) for end in (column, column + columns))
    weight = terms.label_smoothing / terms.split.size
    return until * weight, (beyond - until) * weight


def for_chunks(extent: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """Run `carry = body(start, width, carry)` for each chunk of the extent, and return the last carry.

    The last chunk can be smaller than `chunk`.
    """
    full, rest = divmod(extent, chunk)
    if full == 1:
        carry = body(0, chunk, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda k, carry: body(k * chunk, chunk, carry), carry)
    return body(full * chunk, rest, carry) if rest else carry


def counted_tokens(chunk_ND: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Return a chunk's tokens, with 0 for tokens that don't count.

    Their dlogits are zero, but the tokens themselves can be NaN, and NaN times zero is NaN.
    """
    return jnp.where((labels_N < 0)[:, None], 0, chunk_ND)


def table_rows(table_VD: jax.Array, column: Any, columns: int, terms: Terms) -> jax.Array:
    """Return the table's rows of a tile, with 0 for padding. Padding can be NaN, and NaN times zero dlogits is NaN."""
    tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
    if not terms.split.padding:
        return tile_CD
    is_real_C = shard_start(terms) + column + jnp.arange(columns) < terms.split.size
    return jnp.where(is_real_C[:, None], tile_CD, 0)


def logits(hidden_ND: jax.Array, tile_CD: jax.Array, bias_C: jax.Array | None) -> jax.Array:
    """Return the raw logits of a tile, (N, C), in float32 for half types."""
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    logits_NC = lax.dot_general(hidden_ND, tile_CD, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return logits_NC if bias_C is None else logits_NC + bias_C.astype(wide)


def bias_tile(bias_V: jax.Array | None, column: Any, columns: int) -> jax.Array | None:
    """Return the bias of a tile's columns, (C,); None without a bias."""
    return None if bias_V is None else lax.dynamic_slice_in_dim(bias_V, column, columns)


def in_range(dlogits: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | float]:
    """Return dlogits times a scale, in `dtype`, and the scale. The caller must divide products with dlogits by it.

    In float16, dlogits as small as 1/V times a weight of 1/N would be rounded to 0. So they are first scaled up as far
    as float16 allows. The scale is 1 for other dtypes.
    """
    if not is_narrow(dtype):
        return dlogits.astype(dtype), 1.0
    largest = jnp.where(jnp.isfinite(dlogits), jnp.abs(dlogits), 0).max(initial=0)
    # The 1e-30 keeps the scale finite where all dlogits are 0.
    scale = lax.stop_gradient(float(jnp.finfo(dtype).max) / 4 / jnp.maximum(largest, 1e-30))
    return (dlogits * scale).astype(dtype), scale


def is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether small float32 numbers become 0 in this dtype: true for float16, but not for bfloat16."""
    return bool(jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
