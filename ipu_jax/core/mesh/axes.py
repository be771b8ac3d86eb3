"""Map programs over the IPUs of a mesh, and communicate between them; its further axes are left to XLA.

    make_mesh(2, 2, tensor=2)            axis "replica"    copies of the model
                                         axis "ipu"        stages: what this project programs itself
                                         axis "tensor"     the devices of one IPU, among which XLA splits its arrays

Here an IPU is a group of devices. Its program is written for whole arrays. Specs of weights, and constraints in stage
functions (`jax.lax.with_sharding_constraint`), say how arrays are split, and XLA adds the communication.

XLA pairs the devices of a collective by its replica groups. A collective without them, such as a ppermute, waits for
every device of the mesh, whatever its axis: if only some devices run it, XLA pairs it with a permute of the others.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Dtype, Eqn, Function, Tree, Value
from ipu_jax.base.jaxprs import bodies_of, check_context_mesh
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from sharded_ops import to_all

OWN_AXES: Final = (REPLICA_AXIS, IPU_AXIS)


def further_axes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Return the sizes of the axes that are left to XLA.

    >>> further_axes(AbstractMesh((2, 2, 4), ("replica", "ipu", "tensor")))
    {'tensor': 4}
    """
    return {axis: size for axis, size in mesh.shape.items() if axis not in OWN_AXES}


def parts(axes: Mapping[str, int], spec: PartitionSpec | None = None) -> int:
    """Return into how many parts an array is split over the further axes of its spec, or over all of them.

    >>> parts({"context": 2, "tensor": 4}, PartitionSpec("ipu", "tensor"))
    4
    """
    named = axes if spec is None else [axis for entry in spec for axis in names_in(entry) if axis in axes]
    return math.prod(axes[axis] for axis in named)


def names_in(entry: Any) -> tuple[Any, ...]:
    """Return the axes over which a dim is split, from its entry in a PartitionSpec."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def names_further(spec: PartitionSpec) -> bool:
    """Return whether a spec names an axis that is left to XLA."""
    return any(axis not in OWN_AXES for entry in spec for axis in names_in(entry))


def own_part(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec without further axes.

    >>> own_part(PartitionSpec("ipu", None, "tensor")) == PartitionSpec("ipu", None, None)
    True
    """
    return PartitionSpec(*(entry if entry in OWN_AXES else None for entry in spec)) if names_further(spec) else spec


def further_part(spec: PartitionSpec) -> PartitionSpec:
    """Return a spec without the axes "replica" and "ipu"."""
    return PartitionSpec(*(None if entry in OWN_AXES else entry for entry in spec))


def kept_split(array: Value, spec: PartitionSpec) -> Value:
    """Return one IPU's array, split over the further axes of a spec."""
    return lax.with_sharding_constraint(array, further_part(spec)) if names_further(spec) else array


def over_ipus(program: Function, mesh: Mesh, *, in_specs: Tree, out_specs: Tree) -> Function:
    """Map a program over the IPUs of all replicas, as `jax.shard_map` does, with further axes left to XLA.

    Args:
        program: gets one IPU's blocks, and can name the axes "replica" and "ipu".
        mesh: of replicas, IPUs and perhaps further axes.
        in_specs, out_specs: trees of `PartitionSpec`, prefixes of arguments and result. Results are split over the
            further axes that their specs name, and over no others.
    """
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    own = lambda specs: jax.tree.map(own_part, specs, is_leaf=is_spec)
    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=own(in_specs),
        out_specs=own(out_specs),
        axis_names=set(OWN_AXES),
        check_vma=False,
    )

    def placed(spec: PartitionSpec, leaf: Value) -> Value:
        return lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def run(*args: Tree) -> Tree:
        check_context_mesh(mesh)
        results = mapped(*args)
        if parts(further_axes(mesh)) == 1:
            return results
        return jax.tree.map(placed, jax.tree.broadcast(out_specs, results, is_leaf=is_spec), results, is_leaf=is_spec)

    return run


_GROUPED = """
    psum psum_invariant pmax pmin all_gather all_gather_invariant all_gather_reduced all_to_all reduce_scatter
""".split()  # noqa: SIM905
_SILENT = ("axis_index", "pcast", "pvary", "preduced")  # these communicate nothing


def axes_of(eqn: Eqn) -> tuple[str, ...]:
    """Return the mesh axes that an equation names, with or without communicating over them.

    Jaxprs inside the equation are not searched.
    """
    params = [value for name, value in eqn.params.items() if name == "axes" or "axis_name" in name]
    named = [axis for value in params for axis in (value if isinstance(value, list | tuple | frozenset) else [value])]
    if not bodies_of(eqn):  # inner jaxprs bring their own effects
        named += [effect.name for effect in eqn.effects if type(effect).__name__ == "NamedAxisEffect"]
    return tuple(axis for axis in (REPLICA_AXIS, IPU_AXIS) if axis in named)


def waits(eqn: Eqn, axis: str) -> bool:
    """Return whether an equation waits for other devices of an axis. Without replica groups it waits on every axis."""
    axes, name = axes_of(eqn), eqn.primitive.name
    return bool(axes) and name not in _SILENT and (axis in axes or name not in _GROUPED)


def broadcast(source: int, tree: Tree, axis: str = IPU_AXIS) -> Tree:
    """Return the tree that `source` holds on every device of the axis; the other devices' trees are not read.

    Communicates one psum per leaf.
    """
    return jax.tree.map(lambda leaf: to_all(leaf, source, axis), tree)


def rounded(total: jax.Array, dtype: Dtype) -> jax.Array:
    """Return a sum over devices in a dtype, added up in its own one.

    XLA for TPU moves a conversion to bfloat16 from after a sum to before it, also past an `optimization_barrier`, but
    not past a `reduce_precision`, even if that changes no number.
    """
    if total.dtype == dtype or not jnp.issubdtype(total.dtype, jnp.floating):
        return total.astype(dtype)
    own = jnp.finfo(total.dtype)
    return lax.reduce_precision(total, own.nexp, own.nmant).astype(dtype)


def reduced(reduce: Function, tree: Tree, *axes: str) -> Value:
    """Return `reduce(tree, axes)` of a function such as `lax.psum`, over those axes that have several devices.

    XLA keeps an all-reduce over an axis of one device, and copies for it.
    """
    several = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return reduce(tree, several) if several else tree


def state_over_replicas(tree: Tree) -> Tree:
    """Return the state that all replicas continue with: the mean of floating leaves, and replica 0's other leaves.

    The mean is computed in at least float32, on every platform alike. Communicates one all-reduce per leaf over the
    axis "replica" if there are several replicas.
    """

    def mean(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return rounded(lax.pmean(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), axes), leaf.dtype)

    def one(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        reduce = mean if is_float else lambda tree, axes: broadcast(0, tree, *axes)
        return reduced(reduce, leaf, REPLICA_AXIS)

    return jax.tree.map(one, tree)
