"""Compute the weighted sum of the tokens' losses and, in the same pass, its gradients: gradients="forward".

Dims: N tokens, D features, V rows of the shard; C columns of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._collectives import ON_A_VMAPPED_AXIS, as_varying, gather_to_all, is_typed, varying_axes
from sharded_ops.losses._statistics import (
    Terms,
    combine_shards,
    loss_dlogits,
    shard_start,
    shard_summary,
    softmax_logits,
    statistics,
)
from sharded_ops.losses._token_losses import (
    Chunks,
    Operands,
    counted_tokens,
    for_chunks,
    in_range,
    is_narrow,
    logits,
    matmul,
    table_rows,
    token_losses,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sum_of_losses(operands: Operands, factors_N: jax.Array, terms: Terms, chunks: Chunks) -> jax.Array:
    """Return the sum of each token's loss times its factor. If differentiated, the forward pass computes the gradients.

    Forward: one all-gather of 3 floats per token; if differentiated, one all-gather for each chunk of tokens instead,
    with 3 floats per token. Backward: nothing.
    """
    outputs: Any = token_losses(operands, terms, chunks, False)
    return (outputs[0] * factors_N).sum()


def _forward(operands: Operands, factors_N: jax.Array, terms: Terms, chunks: Chunks) -> tuple[jax.Array, Any]:
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
        dchunk_ND, dtable_VD = _products(dlogits_NV, chunk_ND, table_VD, dtable_VD, chunks.columns, terms)
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


def _products(
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


def _backward(terms: Terms, chunks: Chunks, residuals: Any, dsum: jax.Array) -> tuple[Any, jax.Array]:
    loss_N, gradients, like = residuals
    scale = dsum if is_typed(terms.axis) else dsum * terms.split.parts
    dhidden_ND, dtable_VD, dbias_V = jax.tree.map(
        lambda gradient, like: (gradient * scale).astype(like.dtype), gradients, like
    )
    return Operands(dhidden_ND, dtable_VD, dbias_V, None), loss_N * dsum


sum_of_losses.defvjp(_forward, _backward, **ON_A_VMAPPED_AXIS)
