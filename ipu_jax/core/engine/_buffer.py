"""Read and write the rows of a buffer of the stash, and count its bytes on chips that store arrays in tiles."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ipu_jax.base.annotations import Value


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of rings of one kind and dtype: rows of one shape, or flat, where each element is a row.

    Attributes:
        kind: the rings' kind.
        dtype: their dtype's name.
        row: the shape of a value without dims of 1, which a TPU may pad to 8 or 128; None: flat.
        platform: where it lies, such as "tpu".
        number: distinguishes buffers for values of one shape that may be split in different ways.
    """

    kind: str
    dtype: str
    row: tuple[int, ...] | None
    platform: str
    number: int = 0

    @classmethod
    def of(cls, kind: str, value: Value, platform: str) -> "Buffer":
        """Return the buffer for rings of a value, which has a shape and a dtype."""
        return cls(kind, np.dtype(value.dtype).name, tuple(n for n in value.shape if n != 1), platform)

    @property
    def flat(self) -> "Buffer":
        return dataclasses.replace(self, row=None)

    @property
    def name(self) -> str:
        of_row = "flat" if self.row is None else "x".join(map(str, self.row))
        number = [str(self.number)] if self.number else []
        return ":".join([self.kind, self.dtype, of_row, *number])

    @property
    def nbytes_of_row(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.row or ())

    def rows_of(self, shape: tuple[int, ...]) -> int:
        """Return how many rows a value of this shape takes."""
        return math.prod(shape) if self.row is None else 1

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the array, which has room for these rows.

        It is longer than one micro-batch: XLA recognises a slice as long as its array as the whole array, and may read
        it before the guard.
        """
        return (int(rows) + 1,) if self.row is None else (max(int(rows), 2), *self.row)

    def nbytes(self, rows: int) -> int:
        """Return the bytes of the array without padding, and without a flat one's last element."""
        return self.nbytes_of_row * (int(rows) if self.row is None else self.shape(rows)[0])

    def padded_nbytes(self, rows: int) -> int:
        """Return the same with the padding to tiles that a TPU adds."""
        if self.row is None or self.platform != "tpu":
            return self.nbytes(rows)
        shape = self.shape(rows)
        return np.dtype(self.dtype).itemsize * _padded([shape[dim] for dim in self._order(shape)])

    def write(self, array: Value, at: Value, value: Value) -> Value:
        """Return the array with a value written at row `at`."""
        if self.row is None:
            return lax.dynamic_update_slice(array, value.reshape(-1), (at,))
        return lax.dynamic_update_index_in_dim(array, jnp.squeeze(value), at, 0)

    def read(self, array: Value, at: Value, shape: tuple[int, ...]) -> Value:
        """Return the value of this shape at row `at`."""
        if self.row is None:
            return lax.dynamic_slice(array, (at,), (math.prod(shape),)).reshape(shape)
        row = lax.dynamic_index_in_dim(array, at, keepdims=False)
        return lax.expand_dims(row, [dim for dim, size in enumerate(shape) if size == 1])

    def pinned(self, array: Value) -> Value:
        """Return the array in its layout, so that a task which wants another one rearranges a row and not the array.

        Otherwise XLA gives each guard's loop a layout of its own, and copies the whole array between them in each tick.
        """
        # XLA's CPU backend has one layout, and jax.export refuses the call of a constraint
        if self.platform == "cpu" or self.row is None:
            return array
        return with_layout_constraint(array, Layout(self._order(array.shape)))

    def _order(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dims from the outermost one to the innermost: rows first, and last the two that pad the least."""
        dims = tuple(range(len(shape)))
        if self.platform != "tpu" or len(shape) < 3:
            return dims
        # of orders that pad the same the first one: the value's own, or else the one that moves the last dims the least
        pairs = [(a, b) for b, a in itertools.permutations(reversed(dims[1:]), 2)]
        orders = [(*(dim for dim in dims if dim not in pair), *pair) for pair in pairs]
        return min(orders, key=lambda order: _padded([shape[dim] for dim in order], least=8))


def _padded(shape: Sequence[int], least: int = 1) -> int:
    """Return the elements that an array of this shape, outermost dim first, takes on a TPU.

    XLA pads the last dim to a multiple of 128 and the one before to 1, 2, 4 or a multiple of 8 (compiled for v5e).
    """
    *outer, rows, columns = (1, *shape)
    tile = max(least, min(8, 1 << max(rows - 1, 0).bit_length()))
    return math.prod(outer) * -(-rows // tile) * tile * -(-columns // 128) * 128
