"""Move whole values between the IPUs of a mesh axis, with the right transpose for each move.

                           forward                              backward (its transpose)
    to_all                 the owner's value to all IPUs        sum of all cotangents, to the owner only
    from_all               shards of a dim, gathered on all     sum of all cotangents, to each its own slice
    reduce_to_all          sum over the IPUs, on all            sum of all cotangents, to all
    reduce_to              sum over the IPUs, to the owner      the owner's cotangent, to all
    scatter_tokens         to each its own slice of a dim       the slices' cotangents, gathered on all
    reduce_scatter_tokens  sum over the IPUs, to each a slice   the slices' cotangents, gathered on all

So `to_all` and `reduce_to` are each other's transpose, and so are `from_all` and `reduce_scatter_tokens`.
`scatter_tokens` is the form of `reduce_scatter_tokens` for a value that is already summed. Tokens are usually in dim 0,
but any dim can be used.

What "the sum of all cotangents" means depends on the `check_vma` of the enclosing `shard_map`. JAX has a convention for
each:

`check_vma=True` (the default): types express which values vary over an axis. A value that is the same on all IPUs has a
type that says so, may leave with `out_specs=P()`, and has one cotangent, already summed. Gradients are the dense
program's, whether `jax.grad` is inside the `shard_map` or outside.

`check_vma=False`: types say nothing. The differentiated function is the sum of the IPUs' results, so every IPU holds a
*part* of each cotangent. `jax.grad` outside the `shard_map` takes care of that: it gives each IPU 1/n of a replicated
output's cotangent, and sums the gradients that the IPUs return for a replicated input. If you use `jax.vjp` inside, you
must do the same yourself: give each IPU cotangent/n, and `psum` the gradients of replicated inputs.

The ops of this package follow both conventions, because they are made of plain `lax` collectives of the right kind. The
functions at the end of this file distinguish the two.
"""

import functools
import inspect
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from sharded_ops._arguments import array, shown, whole_number
from sharded_ops._split import Split, axis_size, check_shard, is_typed, split_over, varying_axes

_HAS_BATCHING: Final = "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
ON_A_VMAPPED_AXIS: Final = {"generic_batching": True} if _HAS_BATCHING else {}
"""What `defvjp` takes, since jax 0.12, for a rule that communicates over an axis of `jax.vmap`, where results that are
the same on all IPUs are not batched. It is exact on an axis of size 1, as `ipu_jax.everywhere` has on one device."""


def to_all(x: jax.Array, owner: int | jax.Array, axis: str = "ipu") -> jax.Array:
    """Return the owner's value of `x` on all IPUs of the axis. The owner is one of these IPUs.

    The values of `x` on the other IPUs can be NaN: they are not read, and their gradient is zero.

    Forward: one all-reduce of `x` over `axis`. Backward: under check_vma=True nothing, as the cotangent is already
    summed; under check_vma=False one all-reduce.

    Args:
        x: any shape and dtype, the same shape on each IPU.
        owner: the owner's index on the axis: an int, or an integer scalar that is the same on all IPUs. A traced owner
            cannot be checked; if it is not the index of an IPU, the result is zero.
        axis: the mesh axis.

    Returns:
        An array like `x`, the same on all IPUs.

    Raises:
        ValueError: the enclosing shard_map has no axis `axis`, or `owner` is not an index on it or differs between
            IPUs.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([1.0, 2.0])  # IPU 0 holds 1, IPU 1 holds 2
        >>> op = partial(to_all, owner=1)
        >>> print(jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("ipu"), out_specs=P()))(x))
        [2.]
    """
    x = array("x", x)
    # The sum of one value and zeros is exact in any dtype. The sum of bools is an int, so it is cast back.
    return lax.psum(_only_on(owner, x, axis), axis).astype(x.dtype)


def from_all(x_shard: jax.Array, dim: int, size: int, axis: str = "ipu") -> jax.Array:
    """Gather the shards of a split dim, so that every IPU holds the whole array without padding.

    Forward: one all-gather of `x_shard` over `axis`. Backward: under check_vma=True nothing, as each IPU takes its own
    slice of the summed cotangent; under check_vma=False one reduce-scatter.

    Args:
        x_shard: (.., padded, ..) globally; each IPU holds (.., ceil(size/n), ..). Any dtype. Padding is dropped without
            being read, and its gradient is zero.
        dim: the dim that is split; a negative dim counts from the end.
        size: the rows of that dim without padding.
        axis: the mesh axis.

    Returns:
        (.., size, ..), the same on all IPUs.

    Raises:
        ValueError: the enclosing shard_map has no axis `axis`, `x_shard` has no such dim, or it does not fit `size`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([1.0, 2.0, 3.0, 9.0])  # 3 rows and one of padding
        >>> op = partial(from_all, dim=0, size=3)
        >>> print(jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("ipu"), out_specs=P()))(x))
        [1. 2. 3.]
    """
    split, dim = split_over(size, axis), whole_number("dim", dim)
    x_shard = array("x_shard", x_shard)
    check_shard("x_shard", x_shard, dim, split, axis)
    return split.unpad(gather_to_all(x_shard, axis, dim % x_shard.ndim, tiled=True), dim)


def reduce_to_all(x: jax.Array, axis: str = "ipu") -> jax.Array:
    """Sum a partial value over the IPUs of the axis, so that every IPU holds the sum.

    Forward: one all-reduce of `x` over `axis`, in the dtype of `x`. Backward: under check_vma=True nothing; under
    check_vma=False one all-reduce.

    Args:
        x: any shape and number dtype: this IPU's part of the sum.
        axis: the mesh axis.

    Returns:
        An array like `x`, the same on all IPUs.

    Raises:
        ValueError: the enclosing shard_map has no axis `axis`; or `x` is typed as replicated over several IPUs, so
            that it is not a part of a sum, and the result would be n times too large.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([1.0, 2.0])
        >>> print(jax.jit(jax.shard_map(reduce_to_all, mesh=mesh, in_specs=P("ipu"), out_specs=P()))(x))
        [3.]
    """
    x = array("x", x)
    check_part_of_sum(x, axis)
    return lax.psum(x, axis)


def reduce_to(x: jax.Array, owner: int | jax.Array, axis: str = "ipu") -> jax.Array:
    """Sum a partial value over the IPUs of the axis, and leave the sum on one of them, the owner.

    The other IPUs hold zeros. The cotangent of these zeros is not read, so it can be NaN.

    Forward: one all-reduce of `x` over `axis`, in the dtype of `x`: XLA has no reduction to one device. Backward: one
    all-reduce of the owner's cotangent.

    Args:
        x: any shape and number dtype: this IPU's part of the sum.
        owner: the owner's index on the axis: an int, or an integer scalar that is the same on all IPUs. A traced owner
            cannot be checked; if it is not the index of an IPU, all IPUs hold zeros.
        axis: the mesh axis.

    Returns:
        An array like `x`: the sum on the owner, zeros on the other IPUs.

    Raises:
        ValueError: as for `to_all` with `owner`, and as for `reduce_to_all` with `x`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([1.0, 2.0])
        >>> op = partial(reduce_to, owner=1)
        >>> print(jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("ipu"), out_specs=P("ipu")))(x))
        [0. 3.]
    """
    return _only_on(owner, reduce_to_all(x, axis), axis)


def scatter_tokens(x: jax.Array, axis: str = "ipu", dim: int = 0) -> jax.Array:
    """Split a value that all IPUs hold, so that each IPU keeps its own slice of `dim`. `from_all` is the inverse.

    Forward: sends nothing. Backward: under check_vma=True one all-gather of the slices' cotangents. It sends half as
    much as the all-reduce that jax would derive. It comes from a custom rule, for reverse mode only. Under
    check_vma=False nothing: each IPU's part of the cotangent is its own slice, and the all-reduce of `x` is done where
    the `shard_map` is differentiated.

    Args:
        x: (N, ..), the same on all IPUs. Any dtype.
        axis: the mesh axis.
        dim: the dim to split, of any size N; a negative dim counts from the end.

    Returns:
        (N, ..) globally, padded with zeros to n * ceil(N/n) rows like `Split(N, n).pad`; each IPU holds
        (ceil(N/n), ..). The cotangent of the padding is not read.

    Raises:
        ValueError: the enclosing shard_map has no axis `axis`, `x` has no such dim, or `x` differs between the IPUs.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([1.0, 2.0, 3.0])
        >>> scatter = jax.jit(jax.shard_map(scatter_tokens, mesh=mesh, in_specs=P(), out_specs=P("ipu")))
        >>> print(scatter(x))  # 2 rows on each IPU, the last one padding
        [1. 2. 3. 0.]
    """
    x, dim = array("x", x), whole_number("dim", dim)
    split = _split_of_dim(x, dim, axis)
    check_same_on_all("x", x, axis)
    # Integers have no cotangent for the rule to gather.
    own = _typed_slice if is_typed(axis) and jnp.issubdtype(x.dtype, jnp.inexact) else _own_slice
    return own(x, split, axis, dim % x.ndim)


def reduce_scatter_tokens(x: jax.Array, axis: str = "ipu", dim: int = 0) -> jax.Array:
    """Sum a partial value over the IPUs of the axis, and leave on each IPU its own slice of the sum along `dim`.

    The result equals `scatter_tokens(reduce_to_all(x))`, but half as much is sent.

    Forward: one reduce-scatter of `x` over `axis`, in the dtype of `x`. Backward: one all-gather of the slices'
    cotangents.

    Args:
        x: (N, ..) of any number dtype: this IPU's part of the sum.
        axis: the mesh axis.
        dim: the dim to split, of any size N; a negative dim counts from the end.

    Returns:
        (N, ..) globally, padded with zeros to n * ceil(N/n) rows like `Split(N, n).pad`; each IPU holds
        (ceil(N/n), ..). The cotangent of the padding is not read.

    Raises:
        ValueError: the enclosing shard_map has no axis `axis`, `x` has no such dim, or `x` is typed as replicated over
            several IPUs, as for `reduce_to_all`.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])  # the parts of IPU 0 and of IPU 1
        >>> op = lambda x: reduce_scatter_tokens(x[0])
        >>> print(jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("ipu"), out_specs=P("ipu")))(x))
        [11. 22. 33.  0.]
    """
    x, dim = array("x", x), whole_number("dim", dim)
    split = _split_of_dim(x, dim, axis)
    check_part_of_sum(x, axis)
    x = as_varying_over(x, axis)
    if not x.shape[dim]:
        return x  # XLA cannot scatter a dim of size 0
    return lax.psum_scatter(split.pad(x, dim), axis, scatter_dimension=dim % x.ndim, tiled=True)


def gather_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Return all IPUs' slices of dim 0, including padding, typed as varying over `axis`.

    Forward: one all-gather. Backward: one reduce-scatter, since the result is typed as varying.
    """
    # XLA cannot gather a dim of size 0.
    return lax.all_gather(x, axis, axis=0, tiled=True) if x.shape[0] else x


def gather_to_all(x: jax.Array, axis: str, dim: int = 0, *, tiled: bool = False) -> jax.Array:
    """Return `lax.all_gather` of `x`; under check_vma=True it is typed as the same on all IPUs.

    Forward: one all-gather. Backward: under check_vma=True nothing; under check_vma=False one reduce-scatter.
    """
    if tiled and not x.shape[dim]:
        return lax.psum(x, axis)  # XLA cannot gather a dim of size 0; the sum of empty arrays has the same type
    return lax.all_gather(x, axis, axis=dim, tiled=tiled, to="invarying" if is_typed(axis) else "varying")


def as_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `x` typed as varying over these axes as well. Backward: a psum over each added axis."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def as_varying_over(x: jax.Array, axis: str) -> jax.Array:
    """Return `x` typed as varying over `axis`; under check_vma=False `x` itself."""
    return as_varying(x, frozenset({axis})) if is_typed(axis) else x


def axes_of_rule(axis: str, *operands: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which all these operands of a custom derivative rule must be typed as varying.

    These are `axis`, unless check_vma is False, and all axes over which any operand varies. The gradient that the rule
    returns for an operand varies over all these axes, and must vary over the same axes as the operand itself.
    """
    axes = frozenset({axis}) if is_typed(axis) else frozenset[str]()
    return axes.union(*(varying_axes(operand) for operand in operands))


def check_same_on_all(name: str, x: ArrayLike, axis: str) -> None:
    """Raise for a value that is typed as varying over `axis`, if the op needs the same value on all IPUs.

    Under check_vma=False types say nothing, and this check does nothing.

    Raises:
        ValueError: names the value, and says how to bring it to all IPUs.
    """
    if isinstance(x, jax.Array) and axis in varying_axes(x):
        raise ValueError(
            f"{name} varies over axis {axis!r}, but must be the same on all its IPUs: bring it in with in_specs that "
            f"don't name {axis!r}, or use to_all or from_all on it first"
        )


def check_part_of_sum(x: jax.Array, axis: str) -> None:
    """Raise for a value that is typed as replicated over several IPUs, if the op would sum it over them.

    Under check_vma=False types say nothing, and this check does nothing.

    Raises:
        ValueError: names the value, and says how to sum it nevertheless.
    """
    parts = axis_size(axis)
    if parts > 1 and is_typed(axis) and axis not in varying_axes(x):
        raise ValueError(
            f"x of shape {x.shape} is the same on all {parts} IPUs of axis {axis!r}, so it is not part of a sum over "
            f"them: use it as it is, or lax.pcast(x, {axis!r}, to='varying') if each IPU does add the same"
        )


def _only_on(owner: int | jax.Array, x: jax.Array, axis: str) -> jax.Array:
    """Return `x` on the owner, and zeros on the other IPUs."""
    parts = axis_size(axis)
    if not isinstance(owner, jax.Array | np.ndarray):
        owner = whole_number("owner", owner)
    if np.shape(owner) != () or not jnp.issubdtype(jnp.result_type(owner), jnp.integer):
        raise ValueError(f"owner={shown(owner)} is not one index of an IPU: give an int, or an integer scalar")
    if not isinstance(owner, Tracer) and not 0 <= int(owner) < parts:
        raise ValueError(f"owner={int(owner)} names no IPU of axis {axis!r}, which has {parts}: give 0 to {parts - 1}")
    check_same_on_all("owner", owner, axis)
    return jnp.where(lax.axis_index(axis) == owner, x, jnp.zeros_like(x))


def _split_of_dim(x: jax.Array, dim: int, axis: str) -> Split:
    axis_size(axis)  # raises for an unknown axis, before a missing dim is reported
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x has shape {x.shape}, without a dim {dim} to scatter: give an array that has one")
    return split_over(x.shape[dim], axis, option=f"x.shape[{dim}]", at_least=0)


def _own_slice(x: jax.Array, split: Split, axis: str, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(split.pad(x, dim), split.offset(lax.axis_index(axis)), split.local, dim)


# A custom rule, because lax's rule would all-reduce: it would sum cotangents that are zero outside an IPU's slice.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _typed_slice(x: jax.Array, split: Split, axis: str, dim: int) -> jax.Array:
    return _own_slice(x, split, axis, dim)


def _typed_slice_backward(split: Split, axis: str, dim: int, _: None, dslice: jax.Array) -> tuple[jax.Array]:
    return (split.unpad(gather_to_all(dslice, axis, dim, tiled=True), dim),)


_typed_slice.defvjp(lambda x, split, axis, dim: (_own_slice(x, split, axis, dim), None), _typed_slice_backward)
