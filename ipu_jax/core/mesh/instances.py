"""Place values on the devices of several instances, and read them whole on each.

    instance 0            instance 1                a mesh over the devices of two processes (`jax.distributed`)
    IPU 0 | rows 0-1      IPU 1 | rows 2-3          on_host: rows 0-3 as a NumPy array, on both

An instance sees only the values of its own devices. So a function that reads a whole array communicates, and all
instances must call it, in the same order. If all devices belong to this process, nothing here communicates.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ipu_jax.base.annotations import Device, Dtype, Tree, Value
from ipu_jax.base.keys import is_key

Index = tuple[slice, ...]


def spans_instances(devices: np.ndarray) -> bool:
    """Return whether some of a mesh's devices belong to another process."""
    return any(device.process_index != jax.process_index() for device in devices.flat)


def own_device(mesh: Mesh) -> Device:
    """Return the first device of a mesh that belongs to this process."""
    return next(device for device in mesh.devices.flat if device.process_index == jax.process_index())


def shapes_by(tree: Tree, shardings: Tree) -> Tree:
    """Return the shapes of arrays, placed by a tree of shardings."""
    on = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(on, tree, shardings)


@jax.transfer_guard("allow")  # the caller asks for this transfer
def put(tree: Tree, sharding: Sharding) -> Tree:
    """Return the tree on the devices of a sharding. Every instance passes the same whole values.

    Communicates from host to device only, unless a leaf is already on several instances: then `on_host` reads it.
    """
    if sharding.is_fully_addressable and not any(map(_is_elsewhere, jax.tree.leaves(tree))):
        return jax.device_put(tree, sharding)

    return jax.tree.map(lambda leaf: put_copy(leaf, sharding), tree)


def put_copy(array: Value, sharding: Sharding) -> jax.Array:
    """Return a copy of an array in new memory on the devices of a sharding, so that a program can donate it.

    Every instance passes the same whole values. Communicates like `put`.
    """
    if is_key(array):
        return jax.random.wrap_key_data(put_copy(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array))
    whole = on_host(array)
    # not jax.device_put, which communicates to compare the values of all instances
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))


def taken(arguments: Tree) -> Tree:
    """Return the arguments of a step with NumPy arrays in new memory, so that the caller can refill its own.

    A dispatch returns before the devices have read its arguments, and jax shares NumPy's memory on CPUs. Every call
    that dispatches a user's batch passes it through here. Communicates nothing.

    >>> buffer = np.zeros(2)
    >>> batch = taken({"x": buffer})
    >>> buffer[:] = 7
    >>> batch["x"].tolist()
    [0.0, 0.0]
    """
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, arguments)


@jax.transfer_guard("allow")  # the caller asks for this transfer
def on_host(array: Value) -> np.ndarray:
    """Return a whole array in the memory of each instance, whichever IPUs hold its parts.

    Communicates nothing if every instance holds all parts. Otherwise it communicates one all-gather, and every device
    holds the whole array until it is read: convert a tree leaf by leaf.

    Raises:
        ValueError: the array is on several instances, but not on a mesh.
    """
    if array.size == 0:  # jax may say that a part of it is as long as the whole
        return np.empty(array.shape, array.dtype)
    if not _is_elsewhere(array) or array.is_fully_replicated:
        return np.asarray(array)
    if _is_whole_everywhere(array):
        whole = np.empty(array.shape, array.dtype)
        for shard in array.addressable_shards:
            whole[shard.index] = np.asarray(shard.data)
        return whole
    if not isinstance(array.sharding, NamedSharding):
        raise ValueError(f"an array of several processes has the sharding {array.sharding}: give it a NamedSharding")
    return np.asarray(_gathering(array.sharding.mesh)(array))


def gathered(mesh: Mesh, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the exact numbers that each instance passes: a row per device, (devices, len(numbers)).

    There is one row if all devices belong to this process. Otherwise it communicates one all-gather.

    >>> from ipu_jax.core.mesh.devices import make_mesh
    >>> gathered(make_mesh(1, 2), [0.1, 2.0]).max(0).tolist()
    [0.1, 2.0]
    """
    own = np.array(numbers, np.float64)
    if not spans_instances(mesh.devices):
        return own[None]
    bits = own.view(np.uint32)  # jax would round float64
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.make_array_from_callback((mesh.size, bits.size), sharding, lambda _: bits[None])
    return on_host(rows).view(np.float64)


def bounded(index: Index, shape: Sequence[int]) -> Index:
    """Return the index of a block with a start and a stop per dim.

    >>> bounded((slice(None), slice(2, None)), (3, 4))
    (slice(0, 3, None), slice(2, 4, None))
    """
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def overlap_of(one: Index, other: Index) -> Index | None:
    """Return the block that is in both of two blocks, or None if it has no elements."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def relative(inner: Index, outer: Index) -> Index:
    """Return the index of a block in a larger block."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


class PiecedArray:
    """An array on the host that is made of pieces. A block of it is read when it is asked for, from the pieces in it.

    Args:
        shape, dtype: of the array.
        pieces: per piece, the block that it is, and a function that returns a block of the piece.

    >>> halves = [(slice(0, 2),), lambda index: np.arange(2)[index]], [(slice(2, 4),), lambda index: np.ones(2)[index]]
    >>> array = PiecedArray((4,), np.dtype(int), halves)
    >>> array[1:3,].tolist(), np.asarray(array).tolist()
    ([1, 1], [0, 1, 1, 1])
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Dtype, pieces: Sequence[tuple[Index, Callable[[Index], np.ndarray]]]
    ):
        self.shape, self.dtype, self._pieces = shape, dtype, pieces

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[()], dtype)

    def __getitem__(self, index: Index) -> np.ndarray:
        block = bounded((*index, *[slice(None)] * (len(self.shape) - len(index))), self.shape)
        found = np.empty([part.stop - part.start for part in block], self.dtype)
        for place, read in self._pieces:
            both = overlap_of(block, place)
            if both == block:
                return read(relative(block, place))
            if both is not None:
                found[relative(both, block)] = read(relative(both, place))
        return found


def device_blocks(shape: tuple[int, ...], index_of: Mapping[Device, Index | None]) -> list[tuple[Index, list[Device]]]:
    """Return the blocks into which devices divide an array, in order, and the devices that hold each block.

    Args:
        shape: the shape of the array.
        index_of: per device the index of its block, as a `Sharding` returns it.
    """
    devices_of: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, index in index_of.items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
        devices_of.setdefault(tuple(bounds), []).append(device)
    return [(tuple(slice(*b) for b in bounds), devices_of[bounds]) for bounds in sorted(devices_of)]


def _is_elsewhere(value: Value) -> bool:
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def _is_whole_everywhere(array: jax.Array) -> bool:
    """Return whether every instance holds all parts of an array. All instances must get the same answer."""
    parts = device_blocks(array.shape, array.sharding.devices_indices_map(array.shape))
    holders = [{device.process_index for device in devices} for _, devices in parts]
    return all(held == set().union(*holders) for held in holders)


@functools.cache
def _gathering(mesh: Mesh) -> Any:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))
