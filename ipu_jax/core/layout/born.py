"""Make arrays on the IPUs that hold them: each IPU computes what its own leaves need of one traced function.

    traced once        a = normal(key);  b = a / norm(a);  c = zeros
    IPU 0 holds b      a = normal(key);  b = a / norm(a)
    IPU 1 holds c      nothing: one program for all IPUs makes zeros

So no host and no device ever holds the whole tree, and the numbers are equal to what one device computes.
XLA divides nothing: where a device holds a part of a leaf, such as rows, it computes the leaf and keeps the part. The
programs contain no exchange between IPUs, and an instance runs the programs of its own IPUs only. A program makes one
leaf and what follows from it, since XLA would draw all at once, and need as much memory again. Leaves that are drawn
alike share a program. What is small, such as the keys of all leaves, is computed once, before.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_jax.base.annotations import Device, Dtype, Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import ClosedJaxpr, bound, closed_over, needed, part_of, read_by, shape_of, value_of, variables
from ipu_jax.base.keys import dtype_named, key_impl, with_keys, without_keys
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf
from ipu_jax.core.layout.packing import Sharded, block_of
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.host_memory import HOST
from ipu_jax.core.mesh.instances import Index, bounded, on_host, own_device, put

_Place = tuple[tuple[int, ...], Dtype, NamedSharding]
_DEVICE: Final = "device"
_SMALL: Final = 4096  # bytes
_LARGEST_OF_SMALL: Final = 64  # times smaller than a leaf
_KEEP_ZEROS: Final = ("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "reshape", "slice")


class _Target(NamedTuple):
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

    def block(self, env: dict[Var, Value], index: Index) -> Value:
        """Return the block at `index`, of the values of variables in `env`; of keys, their data."""

        def value_in(leaf: Leaf) -> Value:
            value = leaf.of_whole(jnp.asarray(value_of(self.made[leaf], env)))
            return value if self.is_key else value.astype(self.dtype)

        return without_keys(block_of(self.held, value_in, self.shape, index, jnp))


def born(closed: Jaxpr, args: Sequence[Value], layouts: Sequence[PackedLayout], mesh: Mesh) -> list[Sharded]:
    """Return the outputs of a traced function, placed as `shard_tree` places them, with the bits of one device.

    Communicates from host to device only. An IPU needs temporary memory for its largest leaf, a few times.

    Args:
        closed: the program, with jitted calls laid open, without effects. It returns the leaves of the first layout's
            tree in order, then the leaves of the next tree.
        args: its arguments, in the memory of each instance; None where nothing reads one.
        layouts: where the leaves go.
        mesh: the mesh of the IPUs.
    """
    outputs, wanted, is_zero = iter(closed.jaxpr.outvars), list[_Target](), _zeros_in(closed)
    for layout in layouts:
        of_user = [next(outputs) for _ in layout.parts]
        for array, held in zip(layout.arrays, layout.held_by_array, strict=True):
            made, on_mesh = {leaf: of_user[leaf.part.leaf] for leaf in held}, array.sharding_on(mesh)
            shape = array.shape_on_mesh(layout.ipus)
            wanted.append(_Target(shape, dtype_named(array.dtype), on_mesh, held, made))
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


class _Job(NamedTuple):
    """The work of an IPU for a few arrays: a large value, and what follows from it.

    Attributes:
        devices: the IPU's devices of this process.
        arrays: the numbers of the arrays.
        starts: per device, where its blocks begin along dims in which the devices' blocks differ, (devices, dims).
        inputs: the variables that it reads.
        program: takes a row of `starts` and the inputs, each (1, ...), and returns a device's block of each array.
    """

    devices: list[Device]
    arrays: list[int]
    starts: np.ndarray
    inputs: list[Var]
    program: Jaxpr


def _computed(closed: Jaxpr, args: Sequence[Value], wanted: list[_Target], mesh: Mesh) -> list[jax.Array]:
    """Return arrays. Each IPU computes its own part of them."""
    if not wanted:
        return []
    closed, args = ClosedJaxpr(closed_over(closed), ()), [*closed.consts, *args]
    index_of = [w.sharding.addressable_devices_indices_map(w.shape) for w in wanted]
    alike: dict[str, list[list[_Job]]] = {}
    for devices in _by_ipu(mesh):
        indices = [[bounded(of[d] or (), w.shape) for d in devices] for of, w in zip(index_of, wanted, strict=True)]
        of_ipu = dict[str, list[_Job]]()
        for job in _jobs(closed, wanted, indices, devices):
            of_ipu.setdefault(f"{job.program}", []).append(job)
        for text, jobs in of_ipu.items():
            alike.setdefault(text, []).append(jobs)
    values = _small_values(closed, args, [job for each in alike.values() for jobs in each for job in jobs], mesh)
    blocks: list[dict[Device, jax.Array]] = [{} for _ in wanted]
    for each in alike.values():
        compiled = functools.cache(functools.partial(_compiled, each[0][0].program))
        for together in itertools.zip_longest(*each):  # leaves that are drawn alike share a program, on all IPUs
            jobs = [job for job in together if job is not None]
            for n, array in enumerate(_run(compiled, jobs, values)):
                of_device = {shard.device: shard.data for shard in array.addressable_shards}
                for job in jobs:
                    kind = wanted[job.arrays[n]].sharding.memory_kind
                    own = {device: _in_memory(kind, of_device[device]) for device in job.devices}
                    blocks[job.arrays[n]].update(own)
    arrays = []
    for w, index, of_array in zip(wanted, index_of, blocks, strict=True):
        own = [of_array[device] for device in index]
        array = jax.make_array_from_single_device_arrays(own[0].shape if w.is_key else w.shape, w.sharding, own)
        arrays.append(jax.random.wrap_key_data(array, impl=key_impl(str(w.dtype))) if w.is_key else array)
    return arrays


def _in_memory(kind: str | None, block: jax.Array) -> jax.Array:
    """Return a block in the memory of a kind, if it is the host's."""
    return jax.device_put(block, block.sharding.with_memory_kind(HOST)) if kind == HOST else block


def _by_ipu(mesh: Mesh) -> list[list[Device]]:
    """Return the devices of each IPU that belong to this process: of all replicas and further axes."""
    ipus = [mesh.devices]
    if IPU_AXIS in mesh.axis_names:
        ipus = np.moveaxis(mesh.devices, mesh.axis_names.index(IPU_AXIS), 0)
    own = [[d for d in ipu.flat if d.process_index == jax.process_index()] for ipu in ipus]
    return [devices for devices in own if devices]


def _small_values(closed: Jaxpr, args: Sequence[Value], jobs: list[_Job], mesh: Mesh) -> dict[Var, np.ndarray]:
    """Return the values that jobs read, in the host's memory: arguments, and what is small; of keys, their data."""
    read = {v for job in jobs for v in job.inputs}
    eqns = needed(closed.jaxpr.eqns, [*read])
    given = {v: value for v, value in zip(closed.jaxpr.invars, args, strict=True) if v in read.union(read_by(eqns))}
    results = [v for eqn in eqns for v in eqn.outvars if v in read]
    values = {v: on_host(without_keys(value)) for v, value in given.items() if v in read}
    if results:
        program = jax.jit(core.jaxpr_as_fun(part_of(closed, [*given], eqns, results)))
        found = program(*put([*given.values()], SingleDeviceSharding(own_device(mesh))))
        values.update({v: np.asarray(without_keys(value)) for v, value in zip(results, found, strict=True)})
    return values


def _run(compiled: Callable[..., Any], jobs: list[_Job], values: dict[Var, np.ndarray]) -> list[jax.Array]:
    """Run equal programs of several IPUs; return, per array, the blocks of all their devices, one after the other."""
    devices = [device for job in jobs for device in job.devices]
    run, each = compiled(tuple(devices))

    def on_devices(of_jobs: list[np.ndarray]) -> jax.Array:
        of_device = [value for value, job in zip(of_jobs, jobs, strict=True) for _ in job.devices]
        shape = (len(devices), *of_jobs[0].shape)
        own = lambda index: of_device[bounded(index, shape)[0].start][None]
        return jax.make_array_from_callback(shape, each, own)

    starts = np.concatenate([job.starts for job in jobs])
    inputs = [on_devices([values[v] for v in of_jobs]) for of_jobs in zip(*[job.inputs for job in jobs], strict=True)]
    return run(jax.device_put(starts, each), *inputs)


def _compiled(closed: Jaxpr, devices: tuple[Device, ...]) -> tuple[Any, NamedSharding]:
    """Return a program that runs on each of some devices, and how its arguments are split over them."""
    each = NamedSharding(Mesh(np.array(devices), (_DEVICE,)), PartitionSpec(_DEVICE))
    out_specs = [each.spec if aval.shape else WHOLE for aval in closed.out_avals]  # a scalar is the same on all
    in_specs = (each.spec,) * len(closed.in_avals)
    how: Any = {"mesh": each.mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(core.jaxpr_as_fun(closed), **how)), each


def _jobs(closed: Jaxpr, wanted: list[_Target], indices: list[list[Index]], devices: list[Device]) -> list[_Job]:
    """Return the work of an IPU.

    Args:
        closed: the program, without constants.
        wanted: the arrays.
        indices: per array and device, where the device's block is.
        devices: the devices.
    """
    both = [*zip(wanted, indices, strict=True)]
    made = {k: w.made[leaf] for k, (w, of) in enumerate(both) for leaf in w.held if leaf.is_at(of[0])}
    outvars = variables([*made.values()])
    pieces = _pieces(needed(closed.jaxpr.eqns, outvars), outvars)
    computed_in = [{v for eqn in piece for v in eqn.outvars} for piece in [*pieces, []]]
    of_piece = [[k for k, v in made.items() if v in computed] for computed in computed_in[:-1]]
    others = sorted({*range(len(wanted))}.difference(*of_piece))
    jobs = []
    for piece, computed, arrays in zip([*pieces, []], computed_in, [*of_piece, others], strict=True):
        if not arrays:
            continue
        read = dict.fromkeys(read_by(piece, [made[k] for k in arrays if k in made]))
        inputs = [v for v in read if v not in computed]
        jobs.append(_Job(devices, arrays, *_traced(piece, inputs, [both[k] for k in arrays])))
    return jobs


def _traced(
    eqns: list[Eqn], inputs: list[Var], arrays: list[tuple[_Target, list[Index]]]
) -> tuple[np.ndarray, list[Var], Jaxpr]:
    """Return the last fields of a `_Job` that computes these equations, and takes blocks of arrays from the results."""
    moving = [[len({index[d].start for index in of}) > 1 for d in range(len(of[0]))] for _, of in arrays]
    at = [(k, d) for k, dims in enumerate(moving) for d, moves in enumerate(dims) if moves]
    starts = np.array([[arrays[k][1][n][d].start for k, d in at] for n in range(len(arrays[0][1]))], np.int32)

    def program(starts: Value, *values: Value) -> list[Value]:
        start_of = dict(zip(at, starts[0], strict=True))
        env = {v: with_keys(value[0], v.aval) for v, value in zip(inputs, values, strict=True)}
        for eqn in eqns:
            env.update(zip(eqn.outvars, bound(eqn, [value_of(v, env) for v in eqn.invars]), strict=True))
        blocks = []
        for k, (w, (first, *_)) in enumerate(arrays):
            index = [slice(0, n) if moves else of for of, n, moves in zip(first, w.shape, moving[k], strict=True)]
            block = w.block(env, tuple(index))
            for d in (d for d, moves in enumerate(moving[k]) if moves):
                block = lax.dynamic_slice_in_dim(block, start_of[k, d], first[d].stop - first[d].start, d)
            blocks.append(block)
        return blocks

    shapes = [jax.eval_shape(lambda key: without_keys(key)[None], shape_of(v.aval)) for v in inputs]
    return starts, inputs, jax.make_jaxpr(program)(starts[:1], *shapes)


def _pieces(eqns: list[Eqn], outvars: list[Var]) -> list[list[Eqn]]:
    """Return the equations of large values, in pieces that share no large value. Keys, say, are small."""
    limit = max([_SMALL, *(_bytes(v) // _LARGEST_OF_SMALL for v in outvars)])
    pieces, piece_of = dict[int, list[tuple[int, Eqn]]](), dict[Var, int]()
    for n, eqn in enumerate(eqns):
        joined = sorted({piece_of[v] for v in variables(eqn.invars) if v in piece_of})
        if not joined and all(_bytes(v) <= limit for v in eqn.outvars):
            continue
        piece = joined[0] if joined else n
        own = pieces.setdefault(piece, [])
        for other in joined[1:]:
            own += pieces.pop(other)
        own.append((n, eqn))
        if len(joined) > 1:
            piece_of.update({v: piece for v, k in piece_of.items() if k in joined})
        piece_of.update(dict.fromkeys(eqn.outvars, piece))
    return [[eqn for _, eqn in sorted(piece, key=lambda of: of[0])] for piece in pieces.values()]


def _bytes(v: Var) -> int:
    return 0 if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) else v.aval.size * v.aval.dtype.itemsize
