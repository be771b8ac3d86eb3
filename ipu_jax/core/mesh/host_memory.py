"""Keep arrays in the host's memory between updates, and move them where XLA cannot move them too early.

    weights, gradients     device  --------------------------->  update  -->
    optimizer's state      host    --fetched--> one block's --/    |
                                   <--stored--- one block's -------+      inside the block's guard

XLA starts every copy as early as it can. Outside of a loop that is the beginning of the program, so that all arrays
would be on the device at once. It cannot move a copy out of a guard (guard.py). Of a large array that is updated
element by element, a guard fetches and stores some rows at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from ipu_jax.base.annotations import Value
from ipu_jax.core.mesh.devices import is_described
from ipu_jax.core.mesh.instances import own_device

_TILE: Final = 16  # rows
_AT_ONCE: Final = 2**22  # bytes of an array that are fetched, or a row

HOST: Final = "pinned_host"
"""jax's name of the memory of the host from which a device can copy."""


def fetched(arrays: Sequence[Value]) -> list[Value]:
    """Return arrays in the device's memory. Call it inside the program, in a guard unless all are needed at once."""
    return _in_rows([jax.device_put(array, jax.memory.Space.Device) for array in arrays])


def stored(arrays: Sequence[Value]) -> list[Value]:
    """Return arrays in the host's memory: the inverse of `fetched`."""
    return [jax.device_put(array, jax.memory.Space.Host) for array in _in_rows(arrays)]


def _in_rows(arrays: Sequence[Value]) -> list[Value]:
    """Pin the layouts of arrays, or XLA may want another one on the host, which it cannot make there."""
    in_rows = lambda array: with_layout_constraint(array, Layout(tuple(range(array.ndim))))
    # XLA's CPU backend has one layout, and knows no constraint if it must not simplify
    return [lax.platform_dependent(array, cpu=lambda array: array, default=in_rows) for array in arrays]


def bare(array: Value) -> Value:
    """Return an array in the host's memory without its first two dims, which are 1, where XLA for TPUs can do so there.

    It lays arrays that do not fill its tiles out in an order of its own, and cannot reshape these there.
    """
    fills = array.shape[-1] % 128 == 0 and array.shape[-2] % 8 == 0
    return array[0, 0] if fills else array


def updated_by_rows(
    arrays: Sequence[Value],
    update: Callable[..., list[Value]],
    shape: tuple[int, ...],
    *,
    rows: int | None,
    zero: Value,
) -> list[Value]:
    """Return arrays after an update, for which those in the host's memory are fetched. Call it in a guard.

    Args:
        arrays: the arrays; those in the host's memory as `bare` returns them.
        update: `update(cut, arrays)` returns new arrays, from these in the device's memory and of one shape, or from
            some rows of each; `cut(array)` returns the same rows of any other array.
        shape: the shape.
        rows: how many first rows to update, if each element can be updated without the others: then a few rows are
            fetched at a time. None: all at once.
        zero: 0, which XLA does not know.
    """
    on_host, leading = [is_stored(array) for array in arrays], [array.ndim - len(shape) for array in arrays]

    def of_rows(start: Value, count: int | None, arrays: Sequence[Value]) -> list[Value]:
        cut = lambda array, dim=0: array if count is None else lax.dynamic_slice_in_dim(array, start, count, dim)
        parts = [cut(array, dim) for array, dim in zip(arrays, leading, strict=True)]
        parts = [fetched([part])[0] if on else part for part, on in zip(parts, on_host, strict=True)]
        new = update(cut, [part[(0,) * dim] for part, dim in zip(parts, leading, strict=True)])
        new = [jnp.expand_dims(value, range(dim)) for value, dim in zip(new, leading, strict=True)]
        new = [stored([value])[0] if on else value for value, on in zip(new, on_host, strict=True)]
        if count is None:
            return new
        ways = zip(arrays, new, leading, strict=True)
        return [lax.dynamic_update_slice_in_dim(array, value, start, dim) for array, value, dim in ways]

    together = 0 if rows is None else _rows_at_once(shape, max(array.dtype.itemsize for array in arrays))
    if rows is None or not together or together >= shape[0]:
        return of_rows(zero, None, arrays)
    count, rest = divmod(rows, together)
    new = lax.fori_loop(0, count, lambda i, arrays: of_rows(zero + i * together, together, arrays), [*arrays])
    return of_rows(zero + count * together, rest, new) if rest else new


def _rows_at_once(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows of an array on the host to fetch together, or 0 for all.

    XLA for TPUs slices an array there along one dim, and through no tile of the last two dims.
    """
    if len(shape) < 2:
        return 0
    most = max(1, _AT_ONCE // max(1, math.prod(shape[1:]) * itemsize))
    if len(shape) > 2 or most >= shape[0]:
        return most
    tiles = range(max(_TILE, most // _TILE * _TILE), 0, -_TILE)
    return next((count for count in tiles if shape[0] % count == 0), 0)


def is_stored(array: Value) -> bool:
    """Return whether a value of the program is in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def check_has_host_memory(mesh: Mesh) -> None:
    """Raise `ValueError` unless programs for the devices of a mesh can keep arrays in the host's memory."""
    is_there = not is_described(mesh.devices.flat[0])
    device = own_device(mesh) if is_there else mesh.devices.flat[0]
    try:
        kinds = [memory.kind for memory in device.addressable_memories()]
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # of a described GPU
        kinds = []
    if HOST not in kinds:
        which = device.device_kind if is_there else f"a described {device.device_kind}"
        raise ValueError(
            f"offload=('optimizer',) keeps arrays in the memory {HOST!r}, which jax does not know of {which}: leave "
            "offload out" + ("" if is_there else ", or compile where the GPU is")
        )
