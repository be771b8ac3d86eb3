"""Add a part of a gradient, or the rows of a scatter-add, to a block of the gradient's accumulator in place.

    accumulator      a block                       what is added
    (L, V, D)        [i, 2:]       a (V-2, D)      part                    sum[i, 2:] += part
    (L, V, D)        [i]           a (V, D)        zeros[ids] += rows      sum[i, ids] += rows
    flat             a table from its beginning    zeros[ids] += rows      sum[ids * D:][:D] += rows

XLA adds to a slice and scatters into an array in place. Indices have the same meaning as in a scatter-add into zeros of
the block's shape: a row outside the block must not reach neighbouring elements of the accumulator.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipu_jax.base.annotations import Value

_LARGEST_INDEX = np.iinfo(np.int32).max
_ELEMENTS_PER_PIECE = 16  # elements of a whole block that are read and written in the time of one piece's update


@dataclasses.dataclass(frozen=True)
class AccumulatorBlock:
    """A block of an accumulator.

    Attributes:
        leaf: the shape of the accumulator, or of the leaf whose elements a flat accumulator begins with.
        flat: whether the accumulator is flat.
        zero: an int32 0 that XLA does not know to be 0. It is added to each index, because XLA fuses an update at a
            constant index into a loop over the whole array.
        start: the block's first index, per dim of the leaf.
        size: the block's size, per dim of the leaf.
        dims: the dims of the leaf that the block's shape contains; along the others the block has one element.
    """

    leaf: tuple[int, ...]
    flat: bool
    zero: Value
    start: tuple[Value, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, leaf: tuple[int, ...], flat: bool, zero: Value) -> "AccumulatorBlock":
        return cls(leaf, flat, zero, (0,) * len(leaf), leaf, tuple(range(len(leaf))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size[d] for d in self.dims)

    @property
    def is_whole(self) -> bool:
        return self.size == self.leaf and len(self.dims) == len(self.leaf)

    @property
    def in_one_piece(self) -> bool:
        """Return whether the block is contiguous in the accumulator, or the accumulator is not flat."""
        return not self.flat or math.prod(self.size[: self._inner(self.size)]) == 1

    def part(self, at: Sequence[Value], shape: Sequence[int]) -> "AccumulatorBlock":
        """Return the part of this block that has this shape and begins at these indices."""
        start, size = list(self.start), list(self.size)
        for d, i, n in zip(self.dims, at, shape, strict=True):
            start[d], size[d] = start[d] + i, n
        return dataclasses.replace(self, start=tuple(start), size=tuple(size))

    def with_dims(self, kept: Sequence[int]) -> "AccumulatorBlock":
        """Return the same block with these dims only; along the others it has one element."""
        return dataclasses.replace(self, dims=tuple(self.dims[d] for d in kept))

    def row(self, i: Value) -> "AccumulatorBlock":
        one = self.part((i, *[0] * (len(self.dims) - 1)), (1, *self.shape[1:]))
        return one.with_dims(range(1, len(self.dims)))

    def add(self, total: Value, part: Value) -> Value:
        """Return the accumulator after adding a part of the block's shape. The block must be in one piece."""
        if part.shape == total.shape == self.leaf:
            return total + part.astype(total.dtype)
        start = (self._position(self.start),) if self.flat else self.start
        block = part.reshape(-1 if self.flat else self.size)
        start = [jnp.asarray(i, self.zero.dtype) + self.zero for i in start]
        old = lax.dynamic_slice(total, start, block.shape)
        return lax.dynamic_update_slice(total, old + block.astype(total.dtype), start)

    def scatter_add(self, total: Value, indices: Value, updates: Value, params: dict[str, Any]) -> Value | None:
        """Return the accumulator after adding the updates of a scatter-add into zeros of the block's shape.

        Args:
            total: the accumulator.
            indices, updates: the equation's inputs; the updates have any float dtype.
            params: the equation's parameters.

        Returns:
            None where the caller must scatter into zeros and add the result: the updates are columns of a flat table,
            where that costs less, or the accumulator has no elements or more than an int32 can count.
        """
        dims, mode = params["dimension_numbers"], params["mode"]
        updates = updates.astype(total.dtype)
        if self.is_whole and not self.flat:
            flags = {name: params[name] for name in ("indices_are_sorted", "unique_indices")}
            return lax.scatter_add(total, indices, updates, dims, mode=mode, **flags)
        update = [1] * len(self.leaf)  # its shape, in dims of the leaf
        beside = (*dims.inserted_window_dims, *dims.operand_batching_dims)
        windows = (d for k, d in enumerate(self.dims) if k not in beside)
        for d, position in zip(windows, dims.update_window_dims, strict=True):
            update[d] = updates.shape[position]
        starts, inside = self._starts(indices, dims, update)
        if mode == lax.GatherScatterMode.CLIP:
            inside = jnp.ones_like(inside)
        order = [k for k in range(updates.ndim) if k not in dims.update_window_dims] + list(dims.update_window_dims)
        updates, count = updates.transpose(order), math.prod(inside.shape)
        if not self.flat:
            starts = [jnp.where(inside, i, size) for i, size in zip(starts, self.leaf, strict=True)]
            axes = tuple(range(len(self.leaf)))
            to_blocks = lax.ScatterDimensionNumbers(tuple(d + 1 for d in axes), (), axes)
            at = jnp.stack([i.reshape(-1) for i in starts], axis=-1)
            return lax.scatter_add(total, at, updates.reshape(count, *update), to_blocks, mode="drop")
        inner = self._inner(update)
        pieces = math.prod(update[:inner])
        many = pieces > 1 and count * pieces * _ELEMENTS_PER_PIECE > math.prod(self.size)
        if many or total.size > _LARGEST_INDEX or not math.prod(self.leaf):
            return None
        offsets = np.ravel_multi_index(np.indices((*update[:inner], *[1] * (len(update) - inner))), self.leaf).astype(
            np.int32
        )
        first = jnp.where(inside, self._position(starts), total.size)[..., None] + offsets.reshape(-1)
        to_pieces = lax.ScatterDimensionNumbers((1,), (), (0,))
        rows = updates.reshape(count * pieces, math.prod(update[inner:]))
        return lax.scatter_add(total, first.reshape(-1, 1), rows, to_pieces, mode="drop")

    def _inner(self, shape: Sequence[int]) -> int:
        """Return the first dim from which an array of this shape is contiguous in the flat leaf."""
        return max((d for d, size in enumerate(self.leaf) if shape[d] < size), default=0)

    def _position(self, index: Sequence[Value]) -> Value:
        """Return the position of an index in the flat leaf."""
        return sum(i * math.prod(self.leaf[d + 1 :]) for d, i in enumerate(index))

    def _starts(self, indices: Value, dims: Value, update: Sequence[int]) -> tuple[list[Value], Value]:
        """Return the first element of each update, per dim of the leaf, and whether the update is inside the block.

        An update outside the block is moved inside.
        """
        shape = indices.shape[:-1]
        starts, inside = [jnp.full(shape, i, jnp.int32) + self.zero for i in self.start], jnp.ones(shape, bool)
        for k, position in enumerate(dims.scatter_dims_to_operand_dims):
            d, index = self.dims[position], indices[..., k]
            # in the dtype of the indices, which may be too small for the bound
            moved = jnp.clip(index, 0, min(self.size[d] - update[d], int(jnp.iinfo(index.dtype).max)))
            inside &= moved == index
            starts[d] += moved.astype(jnp.int32)
        for position, k in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
            starts[self.dims[position]] += lax.broadcasted_iota(jnp.int32, shape, k)
        return starts, inside
