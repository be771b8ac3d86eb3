"""Export whole weights: read leaf by leaf, write each leaf at once, and give the file its name at the end.

leaf 0   read on one instance -> written, dropped
leaf 1   read                 -> written, dropped
...
the temporary file reaches the disk, and gets the name of the old one

             IPU 0       IPU 1       IPU 2              read by instance 0, which has IPUs 0 and 1
    slot     mlp/w       head/w      out/w, 0 ...       mlp/w: a copy of row 0. out/w: row 2 is sent, and no other row
    table    rows 0-3    rows 4-7    rows 8-9, 0 ...    rows 0-7: copies. Rows 8-9 are sent

Only one leaf is whole at a time, and only on the host of the instance that reads it. A part on another instance is sent
by one psum over all IPUs. Then each IPU holds two more arrays of the part's size. The other instances drop it at once.
"""

import dataclasses
import errno as errors
import functools
import os
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Device, Params, Value
from ipu_jax.base.keys import is_key
from ipu_jax.base.opening import replacing
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded, check_alive
from ipu_jax.core.mesh.instances import Index, device_blocks, gathered, overlap_of, relative
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.weight_files import _npz, _safetensors
from ipu_jax.training.weight_files._tensors import TensorInfo, named_leaves, names_in, not_ignored

_FORMATS: dict[str, ModuleType] = {".safetensors": _safetensors, ".npz": _npz}


def export_weights(
    path: str | os.PathLike[str], weights: Params, *, average: bool = False, ignore: Iterable[str] = ()
) -> None:
    """Write whole, unsharded weights to a safetensors or npz file, leaf by leaf.

    A leaf's name is made of the keys that lead to it, "group/path/to/leaf"; "/" in a key becomes "~1", and "~" "~0". It
    has its whole shape, without padding, and its own dtype, bfloat16 included. A group that several stages name is
    written once. Frozen weights are also written.

    Only one leaf is whole at a time, on the host of one instance; from a slot, only the row of the leaf is read. Across
    several instances, all must call it, and the first instance writes. They communicate one psum per part that the
    first instance does not have, and finally one all-gather of a number: all return only when the file is there.

    The file is written under another name in the same folder. It replaces an older file when it has reached the disk.
    If anything fails, the older file stays.

    Args:
        path: its suffix, ".safetensors" or ".npz", selects the format.
        weights: what `Pipeline.shard`, `Pipeline.shard_state` or `Replicas.shard` returns, a `TrainState`, whose
            weights are exported, or any pytree of arrays. If each instance has its own arrays, the first one's count.
        average: whether to export the average of a `TrainState` in place of the trained weights, in float32 at least.
        ignore: patterns of `fnmatch`, such as "base/*", for leaves that are not written, and not read either.

    Raises:
        ValueError: the suffix is neither of these, a leaf cannot be named or the format cannot hold it, an earlier call
            used up the buffers, there is no average, or all leaves are ignored or none. Nothing has been written then.
        OSError: the file cannot be written. It is raised on all instances.

    >>> import jax.numpy as jnp, tempfile
    >>> from ipu_jax import Pipeline, Stage
    >>> stage = Stage(lambda p, x, mb: jnp.mean((mb @ p["w"] + p["b"]) ** 2), params="layer", ipu=0)
    >>> params = Pipeline([stage]).shard({"layer": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_weights(f"{folder}/weights.npz", params)
    ...     with np.load(f"{folder}/weights.npz") as file:
    ...         print({name: file[name].shape for name in file.files})
    {'layer/b': (2,), 'layer/w': (3, 2)}
    """
    suffix = os.path.splitext(path)[1]
    if suffix not in _FORMATS:
        raise ValueError(f"path={os.fspath(path)!r} has the suffix {suffix!r}: give one of {', '.join(_FORMATS)}")
    file_format = _FORMATS[suffix]
    leaves, mesh, reader = whole_leaves(weights, average=average)
    names = [leaf.name for leaf in leaves]
    kept = {*not_ignored(names, ignore)}
    if ignore and len(kept) in (0, len(names)):
        raise ValueError(f"ignore={ignore!r} keeps {len(kept)} of {len(names)} leaves: match some of {names[:3]}, ...")
    leaves = [leaf for leaf in leaves if leaf.name in kept]
    infos = [(leaf.name, leaf.info) for leaf in leaves]
    for name, info in infos:
        file_format.check_writable(name, info)
    order = file_format.file_order(infos)
    arrays = (leaves[i].read(reader) for i in order)  # one after the other, and none is kept
    failure: Exception | None = None
    if jax.process_index() == reader:
        failure = _written(file_format, path, [infos[i] for i in order], arrays)
    if mesh is not None:
        for _ in arrays:  # others help send what the first instance reads; after a failure it discards the rest
            pass
        number = 0 if failure is None else getattr(failure, "errno", None) or errors.EIO
        code = int(gathered(mesh, [number]).max())
        if code and failure is None:
            failure = OSError(code, f"{os.strerror(code)}: instance {reader} could not write it", os.fspath(path))
    if failure is not None:
        raise failure


def _written(
    file_format: ModuleType, path: Any, infos: list[tuple[str, TensorInfo]], arrays: Iterator[np.ndarray | None]
) -> Exception | None:
    """Write the file, and return the error, if any: other instances must learn of it before it is raised."""
    try:
        with replacing(path) as file:
            file_format.write(file, infos, arrays)
    except Exception as error:
        return error
    return None


@dataclasses.dataclass(frozen=True)
class WholeLeaf:
    """A leaf that can be read whole: its name, from `named_leaves`, and its parts and arrays, first rows first."""

    name: str
    parts: list[tuple[Leaf, Value]]

    @property
    def info(self) -> TensorInfo:
        """Return the shape and dtype of the whole leaf, without padding."""
        leaf, array = self.parts[0]
        return TensorInfo(leaf.whole_shape, np.dtype(array.dtype).newbyteorder("="))

    def read(self, reader: int) -> np.ndarray | None:
        """Return the leaf on the instance with this process index, None on others. All instances must call it."""
        regions = [(leaf, _read_region(array, leaf.region(array.shape), reader)) for leaf, array in self.parts]
        read, of_first = [leaf.in_region(r) for leaf, r in regions if r is not None], self.parts[0][0].part
        return np.concatenate(read, of_first.axis) if of_first.rows and read else next(iter(read), None)


def whole_leaves(weights: Params, *, average: bool = False) -> tuple[list[WholeLeaf], Mesh | None, int]:
    """Return the leaves of placed weights or of a plain tree; of a `TrainState`, its weights or their average.

    Communicates nothing yet.

    Returns:
        The leaves in the tree's own order, with groups in the order of their stages; the devices of all instances
        between which parts are sent, or None if every instance can read everything; and the process index of the
        instance that reads.

    Raises:
        ValueError: a leaf is not an array or was used up by a call, two leaves have the same name, `average` is set but
            there is no average, or arrays are on the devices of different instances.
    """
    if average and (not isinstance(weights, TrainState) or weights.ema is None):
        raise ValueError(
            f"average=True needs the average of a run: give the state of a step with TrainOptions(ema_decay=...), "
            f"not {'a state without one' if isinstance(weights, TrainState) else type(weights).__name__}"
        )
    params = weights.params if isinstance(weights, TrainState) else weights
    used = (params, weights.ema) if average else params
    _check_concrete(used)
    mesh, reader = _mesh_and_reader(used)
    named = _parts_of(params, weights.ema if average else None)
    names = [name for name, _, _ in named]
    if isinstance(params, Sharded) and not params.layout.is_by_group:  # in the user's order
        names = [name for name, _ in named_leaves(jax.tree.unflatten(params.layout.treedef, params.layout.paths))]
    of_name: dict[str, list[tuple[Leaf, Value]]] = {name: [] for name in names}
    for name, *part in sorted(named, key=lambda of: of[1].part.rows or (0,)):
        of_name[name].append((part[0], part[1]))
    return [WholeLeaf(name, of_leaf) for name, of_leaf in of_name.items()], mesh, reader


def _check_concrete(weights: Params) -> None:
    """Raise `ValueError` for leaves that have no values, or no longer have them."""
    for leaf in jax.tree.leaves(weights):
        if isinstance(leaf, jax.ShapeDtypeStruct | Tracer):
            raise ValueError(f"weights has {leaf}, which has no values: give arrays, and export outside of jax.jit")
    check_alive("weights", weights)


def _mesh_and_reader(weights: Params) -> tuple[Mesh | None, int]:
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


def _parts_of(params: Params, averages: Sharded | None) -> list[tuple[str, Leaf, Value]]:
    """Return the parts of weights: of placed ones group by group, of a plain tree in its own order.

    A part is a name, a leaf, and the array that contains it. With averages, a trained leaf is its average.
    """
    if isinstance(params, Sharded):
        parts = [(name, leaf, params.arrays[leaf.array]) for name, leaf in names_in(params.layout)]
    else:
        parts = [(name, *_plain(name, leaf)) for name, leaf in named_leaves(params)]
    if averages is not None:  # its layout has the same leaves
        of_averages = zip(parts, averages.layout.leaves, strict=True)
        parts = [of if own.array < 0 else (of[0], own, averages.arrays[own.array]) for of, own in of_averages]
    return parts


def _plain(name: str, value: Value) -> tuple[Leaf, Value]:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"leaf {name!r} is {value!r}, which is not an array: make it one, with a dtype of its own")
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise ValueError(f"leaf {name!r} is {value.dtype}, which no file holds: export jax.random.key_data(...) of it")
    return Leaf(name, tuple(value.shape), str(value.dtype)), value


def _read_region(array: Value, region: Index, reader: int) -> np.ndarray | None:
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
    for index, devices in device_blocks(array.shape, array.sharding.devices_indices_map(array.shape)):
        overlap = overlap_of(index, region)
        if overlap is None:
            continue
        of_reader = [device for device in devices if device.process_index == reader]
        if of_reader:
            part = _own_shard(array, of_reader[0]) if is_here else None
        else:
            part = _sent_shard(array, devices[0], is_here)
        if part is None:
            continue
        part = part[relative(overlap, index)]
        if overlap == region:
            return part
        whole = np.empty(shape, array.dtype) if whole is None else whole
        whole[relative(overlap, region)] = part
    if not is_here:
        return None
    return np.empty(shape, array.dtype) if whole is None else whole  # no part overlaps a region without elements


def _own_shard(array: jax.Array, device: Device) -> np.ndarray:
    data = next(shard.data for shard in array.addressable_shards if shard.device == device)
    # jax keeps the host's copy of an array as long as the array lives; a temporary array frees it soon
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))


def _sent_shard(array: jax.Array, device: Device, is_here: bool) -> np.ndarray | None:
    """Return the shard of one device if `is_here`, else None. All instances of the array's mesh must call it."""
    assert isinstance(array.sharding, NamedSharding)
    mesh = array.sharding.mesh
    place = np.argwhere(mesh.devices == device)[0].astype(np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    sent = jax.block_until_ready(_sending(mesh, array.sharding.spec)(array, place))
    return np.asarray(sent.addressable_data(0)) if is_here else None


@functools.cache
def _sending(mesh: Mesh, spec: PartitionSpec) -> Any:
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
