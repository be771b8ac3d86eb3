"""Map programs over the IPUs of a mesh, and leave its further axes to XLA.

    make_mesh(2, 2, tensor=2)            axis "replica"    copies of the model
                                         axis "ipu"        stages: what this project programs itself
                                         axis "tensor"     the devices of one IPU, among which XLA splits its arrays

Here an IPU is a group of devices. Its program is written for whole arrays. Specs of weights, and constraints in stage
functions (`jax.lax.with_sharding_constraint`), say how arrays are split, and XLA adds the communication.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Function, Tree, Value
from ipu_jax.base.jaxprs import check_context_mesh
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS

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
