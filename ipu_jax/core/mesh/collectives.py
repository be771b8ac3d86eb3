"""Communicate between IPUs or replicas, and say which equations of a traced program communicate.

XLA pairs the devices of a collective by its replica groups. A collective without them, such as a ppermute, waits for
every device of the mesh, whatever its axis: if only some devices run it, XLA pairs it with a permute of the others.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Dtype, Eqn, Function, Tree, Value
from ipu_jax.base.jaxprs import bodies_of
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from sharded_ops import to_all

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
