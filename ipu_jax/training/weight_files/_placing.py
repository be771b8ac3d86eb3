"""Place arrays that are read one by one: each IPU gets its own rows, and no leaf is read whole without need."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ipu_jax.base.keys import is_key
from ipu_jax.core.weights.packed_layout import Leaf, PackedLayout
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.training.weight_files._tensors import TensorInfo
from ipu_jax.training.weight_files.names import named_leaves, names_of_groups

Read = Callable[[str], np.ndarray]


def wanted_leaves(like: Any) -> dict[str, TensorInfo]:
    """Return the shape and dtype of each leaf of weights, by its name.

    Raises:
        ValueError: a leaf has no shape and dtype, or two leaves have the same name.
    """
    if isinstance(like, Sharded):
        return {
            name: TensorInfo(leaf.whole_shape, jnp.dtype(leaf.dtype))
            for group, names in zip(like.layout.groups, names_of_groups(like.layout), strict=True)
            for name, leaf in zip(names, group.leaves, strict=True)
        }
    wanted = {}
    for name, leaf in named_leaves(like):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or is_key(leaf):
            raise ValueError(f"like has the leaf {name!r}, {leaf!r}, which is no array: give arrays or their shapes")
        wanted[name] = TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype))
    return wanted


def placed(like: Any, read: Read) -> Any:
    """Return weights like these, with the values that `read` returns by name. Communicates only from host to device."""
    if isinstance(like, Sharded):
        return _placed_sharded(like, read)
    return jax.tree.unflatten(
        jax.tree.structure(like), [_placed_leaf(leaf, name, read) for name, leaf in named_leaves(like)]
    )


def _placed_leaf(leaf: Any, name: str, read: Read) -> Any:
    dtype = np.dtype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        whole = np.empty(leaf.shape, dtype)
        whole[...] = read(name)
        return whole
    return _on_devices(tuple(leaf.shape), sharding, _rows_of_leaf(tuple(leaf.shape), dtype, lambda: read(name)))


def _placed_sharded(like: Sharded, read: Read) -> Sharded:
    layout = like.layout
    names = dict(zip((g.name for g in layout.groups), names_of_groups(layout), strict=True))
    slots = [
        _on_devices((layout.ipus, *slot.shape), _sharding_of(array), _rows_of_slot(layout, k, names, read))
        for k, (slot, array) in enumerate(zip(layout.slots, like.slots, strict=True))
    ]
    concurrent = {
        group.name: [
            _on_devices(
                tuple(array.shape),
                _sharding_of(array),
                _rows_of_leaf(leaf.shape, jnp.dtype(leaf.dtype), lambda name=name, leaf=leaf: read(name)[leaf.within]),
            )
            for name, leaf, array in zip(names[group.name], group.leaves, like.concurrent[group.name], strict=True)
        ]
        for group in layout.groups
        if group.ipu is None
    }
    return Sharded(slots, concurrent, layout)


def _sharding_of(array: Any) -> Sharding:
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"like has {array!r}, which says not where it is: give what pipeline.shard_shapes(...) returns"
        )
    return sharding


def _rows_of_leaf(
    shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], np.ndarray]
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return a function that reads a block of a leaf, with zeros where the block extends beyond the leaf."""
    known: list[np.ndarray] = []

    def block(index: tuple[slice, ...]) -> np.ndarray:
        if not known:
            known.append(read())
        rows = np.zeros([part.stop - part.start for part in index], dtype)
        real = known[0][index]  # a slice beyond the end takes the rows that exist
        rows[tuple(map(slice, real.shape))] = real
        return rows

    return block


def _rows_of_slot(
    layout: PackedLayout, k: int, names: dict[str, list[str]], read: Read
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return a function that reads the rows of a slot, each with the leaf of its IPU and zeros after it."""
    slot = layout.slots[k]
    leaves: dict[int, tuple[str, Leaf]] = {
        group.ipu: (name, leaf)
        for group in layout.groups
        if group.ipu is not None
        for name, leaf in zip(names[group.name], group.leaves, strict=True)
        if leaf.slot == k
    }

    def block(index: tuple[slice, ...]) -> np.ndarray:
        rows = np.zeros((index[0].stop - index[0].start, *slot.shape), slot.dtype)
        for number, ipu in enumerate(range(index[0].start, index[0].stop)):
            if ipu in leaves:
                name, leaf = leaves[ipu]
                rows[number : number + 1].reshape(-1)[: leaf.size].reshape(leaf.shape)[...] = read(name)[leaf.within]
        return rows[(slice(None), *index[1:])]

    return block


def _on_devices(
    shape: tuple[int, ...], sharding: Sharding, block: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Return an array of which each device gets its block. A block is read after the previous block has arrived."""
    arrays: dict[Any, jax.Array] = {}
    for index, devices in _blocks(shape, sharding):
        rows = block(index)
        for number, device in enumerate(devices):
            # each device gets its own copy: an array on a CPU shares the memory of `rows`, and may be donated
            own = rows if number == len(devices) - 1 else rows.copy()
            arrays[device] = jax.block_until_ready(jax.device_put(own, device))
    ordered = [arrays[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered)


def _blocks(shape: tuple[int, ...], sharding: Sharding) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    for bounds, devices in sorted(devices_of.items(), key=lambda item: item[0]):
        yield tuple(slice(*b) for b in bounds), devices
