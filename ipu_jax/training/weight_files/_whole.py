"""Read whole weights on one instance, leaf by leaf, wherever their parts are.

             IPU 0       IPU 1       IPU 2              read by instance 0, which has IPUs 0 and 1
    slot     mlp/w       head/w      out/w, 0 ...       mlp/w: a copy of row 0. out/w: row 2 is sent, and no other row
    table    rows 0-3    rows 4-7    rows 8-9, 0 ...    rows 0-7: copies. Rows 8-9 are sent

Only one leaf is whole at a time, and only on the host of the instance that reads it. A part on another instance is sent
by one psum over all IPUs. Then each IPU holds two more arrays of the part's size. The other instances drop it at once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.keys import is_key
from ipu_jax.core.optimizer.blocks import Blocks, blocks_of_layout, blocks_of_tree
from ipu_jax.core.weights.arguments import check_alive
from ipu_jax.core.weights.packed_layout import Group, Leaf, PackedLayout
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.weight_files.names import named_leaves, names_of_groups

Region = tuple[slice, ...]
Read = Callable[[int], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class WholeLeaf:
    """A leaf that can be read whole.

    Attributes:
        name: the name of the leaf, from `named_leaves`.
        shape, dtype: shape and dtype of the whole leaf, without padding.
        read: returns the leaf on the instance with the given process index, None on others. All instances must call it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class WholeLeaves:
    """The leaves of a tree of weights, and the instance that reads them.

    Attributes:
        leaves: in the tree's own order; groups in the order of their stages.
        mesh: the devices of all instances between which parts are sent; None if every instance can read everything.
        reader: the process index of the instance that reads.
    """

    leaves: list[WholeLeaf]
    mesh: Mesh | None
    reader: int

    @property
    def reads_here(self) -> bool:
        return jax.process_index() == self.reader

    def arrays(self, leaves: list[WholeLeaf]) -> Iterator[np.ndarray | None]:
        """Return an iterator that reads one leaf after the other, and keeps none of the leaves."""
        return (leaf.read(self.reader) for leaf in leaves)


def whole_leaves(weights: Any, *, average: bool = False) -> WholeLeaves:
    """Return the leaves of placed weights or of a plain tree; of a `TrainState`, its weights or their average.

    Communicates nothing yet.

    Raises:
        ValueError: a leaf is not an array or was used up by a call, two leaves have the same name, `average` is set but
            there is no average, or arrays are on the devices of different instances.
    """
    if average and (not isinstance(weights, TrainState) or weights.ema is None):
        raise ValueError(
            f"average=True needs the average of a training: give the state of a step with TrainOptions(ema_decay=...), "
            f"not {'a state without one' if isinstance(weights, TrainState) else type(weights).__name__}"
        )
    params = weights.params if isinstance(weights, TrainState) else weights
    used = (params, weights.ema) if average else params
    _check_concrete(used)
    mesh, reader = _mesh_and_reader(used)
    averages = (weights.ema or []) if average else []
    if isinstance(params, Sharded):
        return WholeLeaves(_of_sharded(params, _averages(params, averages) if averages else {}), mesh, reader)
    leaves = _of_tree(params)
    for number in range(len(leaves) if averages else 0):
        dtype, read = _read_average(_average_blocks(params, averages), averages, number)
        leaves[number] = dataclasses.replace(leaves[number], dtype=dtype, read=read)
    return WholeLeaves(leaves, mesh, reader)


def _check_concrete(weights: Any) -> None:
    """Raise `ValueError` for leaves that have no values, or no longer have them."""
    for leaf in jax.tree.leaves(weights):
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            raise ValueError(f"weights has {leaf}, which has no values: give arrays, and export outside of jax.jit")
    check_alive("weights", weights)


def _mesh_and_reader(weights: Any) -> tuple[Mesh | None, int]:
    """Return the mesh of arrays that are on several instances, and the instance that reads: the first of the mesh."""
    meshes: list[Mesh] = []
    for leaf in jax.tree.leaves(weights):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not is_key(leaf):
            if not isinstance(leaf.sharding, NamedSharding):
                raise ValueError(
                    f"an array of several processes has the sharding {leaf.sharding}: give a NamedSharding"
                )
            meshes.append(leaf.sharding.mesh)  # pyright: ignore[reportArgumentType]
    if not meshes:
        return None, 0
    instances = [{device.process_index for device in mesh.devices.flat} for mesh in meshes]
    if any(found != instances[0] for found in instances):
        raise ValueError("weights are on the devices of different instances: export each part on its own")
    return meshes[0], min(instances[0])


def _of_sharded(params: Sharded, averages: dict[int, tuple[np.dtype[Any], Read]]) -> list[WholeLeaf]:
    """Return the leaves of placed weights; `averages` are read in place of weights, by number in `_leaves_of`."""
    layout = params.layout
    parts: dict[str, list[tuple[int, WholeLeaf]]] = {}  # by name, each with its first row
    names = [name for of_group in names_of_groups(layout) for name in of_group]
    shapes = {name: leaf.whole_shape for name, (_, _, leaf) in zip(names, _leaves_of(layout), strict=True)}
    for number, (name, (group, i, leaf)) in enumerate(zip(names, _leaves_of(layout), strict=True)):
        if group.ipu is None:
            read = functools.partial(_concurrent_leaf, params.concurrent[group.name][i], leaf)
        else:
            read = functools.partial(_slot_row, params.slots[leaf.slot], group.ipu, leaf)
        dtype, read = averages.get(number, (jnp.dtype(leaf.dtype), read))
        parts.setdefault(name, []).append(((leaf.rows or (0,))[0], WholeLeaf(name, leaf.shape, dtype, read)))
    if layout.whole is not None:  # in the user's order
        parts = {
            name: parts[name] for name, _ in named_leaves(jax.tree.unflatten(layout.whole.treedef, layout.whole.paths))
        }
    return [_in_one(shapes[name], of_leaf) for name, of_leaf in parts.items()]


def _leaves_of(layout: PackedLayout) -> list[tuple[Group, int, Leaf]]:
    return [(group, i, leaf) for group in layout.groups for i, leaf in enumerate(group.leaves)]


def _in_one(shape: tuple[int, ...], parts: list[tuple[int, WholeLeaf]]) -> WholeLeaf:
    """Return the leaf whose rows these parts are."""
    ordered = [leaf for _, leaf in sorted(parts, key=lambda part: part[0])]
    if len(ordered) == 1:
        return ordered[0]

    def read(reader: int) -> np.ndarray | None:
        read_parts = [leaf.read(reader) for leaf in ordered]
        here = [part for part in read_parts if part is not None]
        return np.concatenate(here) if here else None

    return dataclasses.replace(ordered[0], shape=shape, read=read)


def _of_tree(tree: Any) -> list[WholeLeaf]:
    leaves = []
    for name, leaf in named_leaves(tree):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"leaf {name!r} is {leaf!r}, which is no array: make it one, with a dtype of its own")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"leaf {name!r} is {leaf.dtype}, which no file holds: export jax.random.key_data(...) of it"
            )
        whole = tuple(slice(0, size) for size in leaf.shape)
        read = functools.partial(_read_region, leaf, whole)
        leaves.append(WholeLeaf(name, tuple(leaf.shape), np.dtype(leaf.dtype).newbyteorder("="), read))
    return leaves


def _averages(params: Sharded, averages: list[Any]) -> dict[int, tuple[np.dtype[Any], Read]]:
    """Return how the average of each trained leaf is read, with its dtype, by number in `_leaves_of`."""
    blocks, layout, numbers = _average_blocks(params, averages), params.layout, itertools.count()
    at = jax.tree.leaves(layout.arranged({g.name: [next(numbers) for _ in g.leaves] for g in layout.groups}))
    trained = [number for number, is_frozen in zip(at, layout.frozen_leaves(), strict=True) if not is_frozen]
    return {number: _read_average(blocks, averages, k) for k, number in enumerate(trained)}


def _average_blocks(params: Any, averages: list[Any]) -> Blocks:
    # an array is (replicas, ...) if each replica has a part of the average, and (1, ...) if each has all of it
    replicas = averages[0].shape[0] if averages else 1
    of_layout = isinstance(params, Sharded)
    return (
        blocks_of_layout(params.layout, replicas=replicas) if of_layout else blocks_of_tree(params, replicas=replicas)
    )


def _read_average(blocks: Blocks, averages: list[Any], number: int) -> tuple[np.dtype[Any], Read]:
    array = averages[blocks.block_of(number)]
    return np.dtype(array.dtype), functools.partial(_averaged_leaf, array, blocks, number)


def _slot_row(slot: Any, ipu: int, leaf: Leaf, reader: int) -> np.ndarray | None:
    row = _read_region(slot, (slice(ipu, ipu + 1), *(slice(0, size) for size in slot.shape[1:])), reader)
    return None if row is None else row.reshape(-1)[: leaf.size].reshape(leaf.shape)


def _concurrent_leaf(array: Any, leaf: Leaf, reader: int) -> np.ndarray | None:
    return _read_region(array, tuple(slice(0, size) for size in leaf.shape), reader)


def _averaged_leaf(array: Any, blocks: Blocks, number: int, reader: int) -> np.ndarray | None:
    block = blocks[blocks.block_of(number)]
    ipus = slice(0, array.shape[1])
    if block.is_slot:
        owner = block.leaves.index(number)
        ipus = slice(owner, owner + 1)
    part = _read_region(array, (slice(0, array.shape[0]), ipus, *(slice(0, size) for size in array.shape[2:])), reader)
    if part is None:
        return None
    if block.is_slot:  # as if it had the parts of all IPUs; only the owner's part is used, and nothing is copied
        part = np.broadcast_to(part, (part.shape[0], blocks.ipus, *part.shape[2:]))
    return blocks.host_leaf(number, part)


def _read_region(array: Any, region: Region, reader: int) -> np.ndarray | None:
    """Return a region of an array on the instance `reader`, and None on others.

    All instances must call it. Communicates one psum for each part that the reader does not have.
    """
    is_here = jax.process_index() == reader
    if not isinstance(array, jax.Array):
        return (
            np.asarray(array)[region].astype(np.dtype(array.dtype).newbyteorder("="), copy=False) if is_here else None
        )
    shape = tuple(part.stop - part.start for part in region)
    whole = None
    for index, devices in _parts(array):
        overlap = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(index, region, strict=True))
        if any(part.start >= part.stop for part in overlap):
            continue
        if any(device.process_index == reader for device in devices):
            part = _own_shard(array, index) if is_here else None
        else:
            part = _sent_shard(array, devices[0], is_here)
        if part is None:
            continue
        part = part[_relative(overlap, index)]
        if overlap == region:
            return part
        whole = np.empty(shape, array.dtype) if whole is None else whole
        whole[_relative(overlap, region)] = part
    if not is_here:
        return None
    return np.empty(shape, array.dtype) if whole is None else whole  # no part overlaps a region without elements


def _parts(array: jax.Array) -> list[tuple[Region, list[Any]]]:
    """Return the parts of an array and the devices that hold each part, the same on all instances."""
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), array.shape, strict=True)]
        devices_of.setdefault(tuple(bounds), []).append(device)
    return [(tuple(slice(*b) for b in bounds), devices_of[bounds]) for bounds in sorted(devices_of)]


def _relative(inner: Region, outer: Region) -> Region:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def _own_shard(array: jax.Array, index: Region) -> np.ndarray:
    for shard in array.addressable_shards:
        if all(
            part.indices(size)[:2] == (wanted.start, wanted.stop)
            for part, size, wanted in zip(shard.index, array.shape, index, strict=True)
        ):
            # jax keeps the host's copy of an array as long as the array lives; a temporary array frees it soon
            data = shard.data
            return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))
    raise AssertionError("the sharding says that this instance has the part")


def _sent_shard(array: jax.Array, device: Any, is_here: bool) -> np.ndarray | None:
    """Return the shard of one device if `is_here`, else None. All instances of the array's mesh must call it."""
    assert isinstance(array.sharding, NamedSharding)
    mesh = array.sharding.mesh
    place = np.argwhere(mesh.devices == device)[0].astype(np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    sent = jax.block_until_ready(_sending(mesh, array.sharding.spec)(array, place))
    return np.asarray(sent.addressable_data(0)) if is_here else None


@functools.cache
def _sending(mesh: Any, spec: PartitionSpec) -> Any:
    axes = tuple(mesh.axis_names)

    def send(block: jax.Array, place: jax.Array) -> jax.Array:
        is_owner = functools.reduce(jnp.logical_and, [lax.axis_index(axis) == place[k] for k, axis in enumerate(axes)])
        return _psum_of_bits(block, is_owner, axes)

    return jax.jit(
        jax.shard_map(send, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    )


def _psum_of_bits(block: jax.Array, is_owner: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the owner's exact block on every IPU. It is sent as integers, since -0.0 + 0.0 is 0.0."""
    dtype = block.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(*(_psum_of_bits(part, is_owner, axes) for part in (block.real, block.imag)))
    if dtype == jnp.bool_:
        return _psum_of_bits(block.astype(jnp.uint8), is_owner, axes).astype(dtype)
    bits = lax.bitcast_convert_type(block, f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(lax.psum(jnp.where(is_owner, bits, 0), axes), dtype)
