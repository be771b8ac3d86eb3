"""Make arrays on the IPUs that hold them: each IPU computes what its own leaves need of one traced function.

    traced once        a = normal(key);  b = a / norm(a);  c = zeros
    IPU 0 holds b      a = normal(key);  b = a / norm(a)                one program per IPU, for all its devices
    IPU 1 holds c      nothing: one program for all IPUs makes zeros

So no host and no device ever holds the whole tree, and the numbers are those that one device computes for all of it.
XLA divides nothing: where a device holds a part of a leaf, such as rows, it computes the leaf and keeps the part. The
programs contain no exchange between IPUs, and an instance runs the programs of its own IPUs only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Device, Dtype, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import ClosedJaxpr, closed_over, needed, part_of, read_by
from ipu_jax.base.keys import dtype_named, key_impl, without_keys
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf
from ipu_jax.core.layout.packing import Sharded, block_of
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.host_memory import HOST
from ipu_jax.core.mesh.instances import Index, bounded, put

_Place = tuple[tuple[int, ...], Dtype, NamedSharding]
_DEVICE: Final = "device"
_KEEP_ZEROS: Final = ("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "reshape", "slice")


class _Wanted(NamedTuple):
    """An array to make.

    Attributes:
        shape, dtype, sharding: of the array.
        held: the leaves in it.
        made: per leaf, the variable that is the user's leaf.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    sharding: NamedSharding
    held: list[Leaf]
    made: dict[Leaf, Var]

    @property
    def is_key(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    def block(self, found: dict[Var, Value], index: Index) -> Value:
        """Return the block at `index`, of the values of variables that were computed; of keys, their data."""

        def value_of(leaf: Leaf) -> Value:
            v = self.made[leaf]
            value = leaf.of_whole(jnp.asarray(v.val) if isinstance(v, core.Literal) else found[v])
            return value if self.is_key else value.astype(self.dtype)

        return without_keys(block_of(self.held, value_of, self.shape, index, jnp))


def born(closed: Jaxpr, args: Sequence[Value], layouts: Sequence[PackedLayout], mesh: Mesh) -> list[Sharded]:
    """Return the outputs of a traced function, placed as `shard_tree` places them, with the bits of one device.

    Communicates from host to device only. An IPU needs temporary memory for its largest leaves, whole.

    Args:
        closed: the program, with jitted calls laid open, without effects. It returns all leaves of the first layout's
            tree in order, then those of the next one.
        args: its arguments, in the memory of each instance; None where nothing reads one.
        layouts: where the leaves go.
        mesh: the mesh of the IPUs.
    """
    outputs, wanted, is_zero = iter(closed.jaxpr.outvars), list[_Wanted](), _zeros_in(closed)
    for layout in layouts:
        of_user = [next(outputs) for _ in layout.parts]
        for array, held in zip(layout.arrays, layout.held_by_array, strict=True):
            made, on_mesh = {leaf: of_user[leaf.part.leaf] for leaf in held}, array.sharding_on(mesh)
            shape = array.shape_on_mesh(layout.ipus)
            wanted.append(_Wanted(shape, dtype_named(array.dtype), on_mesh, held, made))
    are_zero = [not w.is_key and all(map(is_zero, w.made.values())) for w in wanted]
    both = [*zip(wanted, are_zero, strict=True)]
    zeros = iter(_all_zeros(tuple((w.shape, w.dtype, w.sharding) for w, only_zeros in both if only_zeros)))
    computed = iter(_computed(closed, args, [w for w, only_zeros in both if not only_zeros], mesh))
    arrays = iter([next(zeros if only_zeros else computed) for only_zeros in are_zero])
    return [Sharded([next(arrays) for _ in layout.arrays], layout) for layout in layouts]


def _zeros_in(closed: Jaxpr) -> Callable[[Var], bool]:
    """Return a function that says of a variable whether the program shows that all its elements are 0."""
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}

    @functools.cache
    def is_zero(v: Var) -> bool:
        eqn = made_by.get(v)
        return eqn is not None and eqn.primitive.name in _KEEP_ZEROS and all(map(of_any, eqn.invars))

    def of_any(v: Var) -> bool:
        return not np.asarray(v.val).tobytes().strip(b"\0") if isinstance(v, core.Literal) else is_zero(v)

    return of_any


def _all_zeros(arrays: tuple[_Place, ...]) -> list[jax.Array]:
    """Return arrays of zeros. A device makes none of those that rest in the host's memory."""
    of_devices = iter(_zeros(tuple(of for of in arrays if of[-1].memory_kind != HOST))())

    def made(shape: tuple[int, ...], dtype: Dtype, sharding: NamedSharding) -> jax.Array:
        if sharding.memory_kind != HOST:
            return next(of_devices)
        block = lambda index: np.zeros([part.stop - part.start for part in bounded(index, shape)], dtype)
        return jax.make_array_from_callback(shape, sharding, block)

    return [made(*of) for of in arrays]


@functools.lru_cache(maxsize=64)
def _zeros(arrays: tuple[_Place, ...]) -> Callable[[], list[jax.Array]]:
    """Return the program that makes arrays of zeros: one for all devices, since it is the same on each."""
    zeros = lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in arrays]
    return jax.jit(zeros, out_shardings=[sharding for *_, sharding in arrays])


def _computed(closed: Jaxpr, args: Sequence[Value], wanted: list[_Wanted], mesh: Mesh) -> list[jax.Array]:
    """Return arrays of which each IPU computes its own part."""
    index_of = [w.sharding.addressable_devices_indices_map(w.shape) for w in wanted]
    blocks: list[dict[Device, jax.Array]] = [{} for _ in wanted]
    inputs = [*closed.consts, *args]
    closed = ClosedJaxpr(closed_over(closed), ())
    for devices in _by_ipu(mesh) if wanted else []:
        indices = [[bounded(of[d] or (), w.shape) for d in devices] for of, w in zip(index_of, wanted, strict=True)]
        for of_array, value in zip(blocks, _on_ipu(closed, inputs, wanted, indices, devices), strict=True):
            of_array.update({shard.device: shard.data for shard in value.addressable_shards})
    arrays = []
    for w, index, of_array in zip(wanted, index_of, blocks, strict=True):
        own = [of_array[device] for device in index]
        if w.sharding.memory_kind == HOST:
            own = [jax.device_put(data, data.sharding.with_memory_kind(HOST)) for data in own]
        array = jax.make_array_from_single_device_arrays(own[0].shape if w.is_key else w.shape, w.sharding, own)
        arrays.append(jax.random.wrap_key_data(array, impl=key_impl(str(w.dtype))) if w.is_key else array)
    return arrays


def _by_ipu(mesh: Mesh) -> list[list[Device]]:
    """Return the devices of each IPU that belong to this process: of all replicas and further axes."""
    ipus = [mesh.devices]
    if IPU_AXIS in mesh.axis_names:
        ipus = np.moveaxis(mesh.devices, mesh.axis_names.index(IPU_AXIS), 0)
    own = [[d for d in ipu.flat if d.process_index == jax.process_index()] for ipu in ipus]
    return [devices for devices in own if devices]


def _on_ipu(
    closed: Jaxpr, args: Sequence[Value], wanted: list[_Wanted], indices: list[list[Index]], devices: list[Device]
) -> list[jax.Array]:
    """Return, per array, the blocks of an IPU's devices, one after the other.

    Args:
        closed: the program, without constants.
        args: its arguments.
        wanted: the arrays.
        indices: per array and device, where the device's block is.
        devices: the devices.
    """
    both = [*zip(wanted, indices, strict=True)]
    held = [w.made[leaf] for w, of_devices in both for leaf in w.held if leaf.is_at(of_devices[0])]
    outvars = list(dict.fromkeys(v for v in held if not isinstance(v, core.Literal)))
    eqns = needed(closed.jaxpr.eqns, outvars)
    read = set(read_by(eqns, outvars))
    own = [(v, value) for v, value in zip(closed.jaxpr.invars, args, strict=True) if v in read]
    run = core.jaxpr_as_fun(part_of(closed, [v for v, _ in own], eqns, outvars))
    # where blocks of the devices differ, in replicas' chunks or along further axes, each begins at its own number
    moving = [[len({index[d].start for index in of}) > 1 for d in range(len(of[0]))] for of in indices]
    at = [(k, d) for k, dims in enumerate(moving) for d, moves in enumerate(dims) if moves]
    starts = np.array([[indices[k][n][d].start for k, d in at] for n in range(len(devices))], np.int32)

    def program(starts: Value, *values: Value) -> list[Value]:
        found = dict(zip(outvars, run(*values), strict=True))
        start_of = dict(zip(at, starts.reshape(-1), strict=True))
        results = []
        for k, (w, (first, *_)) in enumerate(both):
            index = [slice(0, n) if moves else of for of, n, moves in zip(first, w.shape, moving[k], strict=True)]
            block = w.block(found, tuple(index))
            for d in (d for d, moves in enumerate(moving[k]) if moves):
                block = lax.dynamic_slice_in_dim(block, start_of[k, d], first[d].stop - first[d].start, d)
            results.append(block)
        return results

    mesh = Mesh(np.array(devices), (_DEVICE,))
    each = PartitionSpec(_DEVICE)
    how: Any = {"in_specs": (each, *[WHOLE for _ in own]), "check_vma": False}
    how["out_specs"] = [each if w.shape and not w.is_key else WHOLE for w in wanted]
    mapped = jax.jit(jax.shard_map(program, mesh=mesh, **how))
    values = [put(value, NamedSharding(mesh, WHOLE)) for _, value in own]
    return mapped(jax.device_put(starts, NamedSharding(mesh, each)), *values)
