"""Add the gradient of a gather to an accumulator of which the table's gradient is a part.

    traced       zeros(V, D)[ids] += updates                   the table's gradient: a scatter-add into zeros
    into_rows    total[i, ids] += updates                      total: (L, V, D), the gradients of L stacked tables
    into_flat    total[first + ids * D:][:D] += updates        total: flat; the table's gradient begins at `first`

XLA does both in place. The indices mean what they mean in the traced equation: one that is out of bounds must not reach
a neighbour in the accumulator.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

_INT32 = np.iinfo(np.int32)
_ELEMENTS_PER_PIECE = 16  # of a whole table, which are read and written in the time of one piece's update


def into_rows(total: Any, row: Sequence[Any], indices: Any, updates: Any, params: dict[str, Any]) -> Any:
    """Return `total` with a scatter-add's blocks added to its sub-array at the leading indices `row`.

    Args:
        total: `(*leading, *table)`.
        row: int32 scalars, one per leading dim.
        indices, updates: the equation's; updates of any float dtype.
        params: the equation's parameters.
    """
    dims, lead = params["dimension_numbers"], tuple(range(len(row)))
    dtype = indices.dtype if indices.dtype.itemsize >= _INT32.dtype.itemsize else _INT32.dtype
    of_row = [jnp.broadcast_to(jnp.asarray(i, dtype), (*indices.shape[:-1], 1)) for i in row]
    shifted = lambda at: tuple(d + len(lead) for d in at)  # noqa: E731
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=dims.update_window_dims,
        inserted_window_dims=lead + shifted(dims.inserted_window_dims),
        scatter_dims_to_operand_dims=lead + shifted(dims.scatter_dims_to_operand_dims),
        operand_batching_dims=shifted(dims.operand_batching_dims),
        scatter_indices_batching_dims=dims.scatter_indices_batching_dims,
    )
    at = jnp.concatenate([*of_row, indices.astype(dtype)], axis=-1)
    return lax.scatter_add(total, at, updates.astype(total.dtype), dims, mode=params["mode"])


def into_flat(
    total: Any, shape: tuple[int, ...], first: Any, indices: Any, updates: Any, params: dict[str, Any]
) -> Any | None:
    """Return `total` with a scatter-add's blocks added to the elements from `first` on, as to an array of `shape`.

    Args:
        total: `(n,)`.
        shape: of the table.
        first: int32 scalar.
        indices, updates, params: as for `into_rows`.

    Returns:
        None where it costs more than to scatter into zeros and to add these: the blocks are columns of a table, say.
    """
    dims = params["dimension_numbers"]
    beside = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    block = [1] * len(shape)
    for d, position in zip((d for d in range(len(shape)) if d not in beside), dims.update_window_dims, strict=True):
        block[d] = updates.shape[position]
    # a block's elements are contiguous from its last dim that is not whole; the dims before it number its pieces
    inner = max((d for d, size in enumerate(shape) if block[d] < size), default=0)
    pieces = math.prod(indices.shape[:-1]) * math.prod(block[:inner])
    divided = math.prod(block[:inner]) > 1
    if total.size > _INT32.max or (divided and pieces * _ELEMENTS_PER_PIECE > math.prod(shape)):
        return None
    start, inside = _start_of_blocks(shape, block, indices, dims)
    if params["mode"] != lax.GatherScatterMode.CLIP:
        start = jnp.where(inside, start, total.size - first)  # beyond the end, so that XLA drops it
    offsets = np.zeros((), np.int32)
    for d in range(inner):
        offsets = offsets[..., None] + np.arange(block[d], dtype=np.int32) * math.prod(shape[d + 1 :])
    start = (first + start[..., None] + offsets.reshape(-1)).reshape(pieces, 1)
    order = [d for d in range(updates.ndim) if d not in dims.update_window_dims] + list(dims.update_window_dims)
    updates = updates.transpose(order).reshape(pieces, math.prod(block[inner:]))
    flat = lax.ScatterDimensionNumbers((1,), (), (0,))
    return lax.scatter_add(total, start, updates.astype(total.dtype), flat, mode="drop")


def _start_of_blocks(shape: Sequence[int], block: Sequence[int], indices: Any, dims: Any) -> tuple[Any, Any]:
    """Return the first element of each block in the flat table, moved inside of it, and whether it was inside."""
    start, inside = jnp.zeros(indices.shape[:-1], jnp.int32), jnp.ones(indices.shape[:-1], bool)
    for k, d in enumerate(dims.scatter_dims_to_operand_dims):
        # the bound in the indices' own dtype, which may be too small to exceed it
        last = min(shape[d] - block[d], int(jnp.iinfo(indices.dtype).max))
        clipped = jnp.clip(indices[..., k], 0, last)
        inside &= clipped == indices[..., k]
        start += clipped.astype(jnp.int32) * math.prod(shape[d + 1 :])
    for d, k in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
        start += lax.broadcasted_iota(jnp.int32, start.shape, k) * math.prod(shape[d + 1 :])
    return start, inside
