"""Run a part of a function on all IPUs at once, each on its own shard: a concurrent stage of a function that is cut.

    head = everywhere(loss_of_shard, in_specs=(P("ipu"), P(), P()))     the table is split by rows, the rest is whole
    loss = head(params["table"], hidden, targets)

    in `Pipeline.from_function`   one operation of the trace, which becomes a concurrent stage
    on one device                 the function itself, on whole arrays; axis "ipu" has size 1
    in a stage of your own        each IPU takes its shard of values that all IPUs hold

The body of the operation is traced as a concurrent stage is: with axis "ipu" in scope, under `check_vma=False`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.base.jaxprs import OWN_BACKWARD, all_equations, bodies_of, checkpointed, closed_of, closed_over, plain
from ipu_jax.core.cutting.users_code import at_line, name_of, users_call
from ipu_jax.core.layout.tree_parts import spread
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.programs.variance import differing

_WHOLE: Final = PartitionSpec()
_OF_FUNCTION: Final = "IPUs of the function that is traced"
_OF_SHARDS: Final = "everywhere"
"""Names of axes that are in scope while jax traces a function, or the body of an `everywhere`. No operation uses them:
jax keeps the trace of a jitted function for the axes in scope, and so for this number of IPUs."""


def traced_for(ipus: int, fn: Function, *args: Value) -> tuple[Jaxpr, Tree]:
    """Return a function's jaxpr and the shapes of its results; a call of an `everywhere` is one operation of it."""
    return jax.make_jaxpr(fn, axis_env=[(_OF_FUNCTION, ipus)], return_shape=True)(*args)


def everywhere(fn: Function, *, in_specs: Tree, out_specs: Tree = _WHOLE) -> Function:
    """Return a function that all IPUs compute at once, each on its shard of the arguments that `in_specs` split.

    In a function that `Pipeline.from_function` cuts, each call becomes a concurrent stage. A leaf of the weights that
    is only read by such calls, and split by all of them in the same way, lies split over the IPUs: a tied embedding
    table is one leaf that the look-up and the loss are given. `print(pipeline)` says which leaves lie split. A call may
    be anywhere in the function, any number of times, but not in a scan, a branch or a derivative.

    On one device, also under `jax.jit`, `jax.grad` and `jax.vmap`, the same function is `fn` on whole arrays.

    Args:
        fn: the function of one IPU's shards. It communicates with `sharded_ops`, or with `jax.lax` collectives over
            axis "ipu". What it returns, any pytree of arrays, must be the same on all IPUs.
        in_specs: a `PartitionSpec`, or a tree of them that is a prefix of the tuple of arguments. `P(None, "ipu")`
            splits dim 1: each of n IPUs gets ceil(size / n) rows of it, and the last ones are padded with zeros.
            `P()` and None give every IPU the whole argument.
        out_specs: `P()`; a tree of it fits any results.

    Raises:
        ValueError: a spec names something else than "ipu", or out_specs name anything; and when a pipeline is cut:
            results may differ between IPUs, or the call is in a scan, a branch or a derivative.

    >>> from jax.sharding import PartitionSpec as P
    >>> from sharded_ops import embedding
    >>> look_up = everywhere(lambda table, ids: embedding(table, ids, size=3), in_specs=(P("ipu"), P()))
    >>> look_up(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([2, 0])).tolist()
    [[3.0], [1.0]]
    """
    if not callable(fn):
        raise ValueError(f"fn={in_line(fn):.60} is not callable: give a function of one IPU's shards")
    for spec in jax.tree.leaves(in_specs, is_leaf=_is_spec):
        split = [entry for entry in (spec or ()) if entry is not None] if _is_spec(spec) else [spec]
        if split not in ([], [IPU_AXIS]):
            raise ValueError(f"in_specs holds {spec!r}: give a PartitionSpec with {IPU_AXIS!r} at most once, or None")
    for spec in jax.tree.leaves(out_specs, is_leaf=_is_spec):
        if not _is_spec(spec) or any(spec or ()):
            raise ValueError(
                f"out_specs holds {spec!r}: results are whole on every IPU, PartitionSpec(); gather them in the "
                f"function, jax.lax.all_gather(x, {IPU_AXIS!r}, axis=..., tiled=True)"
            )

    def run(*args: Tree, **named: Tree) -> Tree:
        if named:
            raise ValueError(f"everywhere{users_call()} is given {', '.join(named)} by name: give it in its place")
        specs = _spread(in_specs, args)
        leaves, treedef = jax.tree.flatten(args)
        leaves = [leaf if isinstance(leaf, jax.Array) else _array(leaf) for leaf in leaves]
        dims = [_split_dim(spec, leaf) for spec, leaf in zip(specs, leaves, strict=True)]
        on_shards = lambda *own: fn(*treedef.unflatten(own))
        ipus = _ipus_of_trace()
        if ipus is not None:
            return _operation(on_shards, ipus, leaves, dims)
        if _size_of(IPU_AXIS) is not None:
            return on_shards(*map(_own_shard, leaves, dims))
        return _on_one_device(on_shards, leaves)

    return run


def _on_one_device(fn: Function, leaves: Sequence[Value]) -> Tree:
    """Run a function on whole arrays, where axis "ipu" has size 1.

    Its derivative is taken with the axis in scope. Under `jax.jit` or in a scan, jax would trace the derivatives of
    a `jax.custom_jvp` or a `jax.custom_vjp` in it later, and without the axis.
    """
    closed, shapes = jax.make_jaxpr(fn, axis_env=[(IPU_AXIS, 1)], return_shape=True)(*leaves)
    args, whole = [*closed.consts, *leaves], core.jaxpr_as_fun(closed_of(closed_over(closed)))
    is_traced = [isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact) for x in args]
    traced = [x for x, is_one in zip(args, is_traced, strict=True) if is_one]
    fixed = [None if is_one else x for x, is_one in zip(args, is_traced, strict=True)]

    def run(fixed: Sequence[Value], *traced: Value) -> tuple[list[Value], list[Value]]:
        """Return the results: floats, with None in place of others, and the others."""
        own = iter(traced)
        found = whole(*(next(own) if x is None else x for x in fixed))
        is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in found]
        pick = lambda kind: [x if of == kind else None for x, of in zip(found, is_float, strict=True)]
        return pick(True), pick(False)

    def on_axis(fn: Function, *args: Value) -> Tree:
        found = jax.vmap(lambda _: fn(*args), axis_name=IPU_AXIS)(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0], found)

    def push(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Tree, Tree]:
        of_fixed = functools.partial(jax.jvp, functools.partial(run, primals[0]), has_aux=True)
        floats, moved, others = on_axis(of_fixed, primals[1:], tangents[1:])
        return (floats, others), (moved, [None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in others])

    def forward(fixed: Sequence[Value], *traced: Value) -> tuple[Tree, Tree]:
        of_fixed = functools.partial(jax.vjp, functools.partial(run, fixed), has_aux=True)
        floats, pull, others = on_axis(of_fixed, *traced)
        return (floats, others), pull

    differentiable: Any = functools.partial(on_axis, run)
    if any(eqn.primitive.name in OWN_BACKWARD for eqn in all_equations(closed)):
        differentiable = jax.custom_vjp(differentiable)
        differentiable.defvjp(forward, lambda pull, cotangents: (None, *on_axis(pull, cotangents[0])))
    else:
        differentiable = jax.custom_jvp(differentiable)
        differentiable.defjvp(push)
    found = [x if other is None else other for x, other in zip(*differentiable(fixed, *traced), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _is_spec(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, PartitionSpec)


def _spread(in_specs: Tree, args: Sequence[Tree]) -> list[PartitionSpec]:
    """Return the spec of each leaf of the arguments."""
    try:
        named = jax.tree.map(lambda spec: spec or _WHOLE, in_specs, is_leaf=_is_spec)
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # None in an argument is an empty tree
        return spread("in_specs", named, jax.tree.structure(tuple(args)), is_leaf=is_spec)
    except ValueError:
        raise ValueError(
            f"in_specs={in_specs!r} do not fit {len(args)} arguments, {jax.tree.structure(tuple(args))}: give one "
            "spec, or a tuple with a spec, or a tree of them, for each argument"
        ) from None


def _array(leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise ValueError(
            f"everywhere{users_call()} is given {in_line(leaf):.60}, not an array: let the function close over it"
        ) from None


def _split_dim(spec: PartitionSpec, leaf: Value) -> int | None:
    """Return the dim that a spec splits."""
    dims = [dim for dim, entry in enumerate(spec) if entry is not None]
    if len(spec) > leaf.ndim:
        raise ValueError(f"in_specs hold {spec!r} for an array of shape {leaf.shape}: give it at most {leaf.ndim} dims")
    return dims[0] if dims else None


def _size_of(axis: str) -> int | None:
    """Return the size of an axis, or None where it is not in scope."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def _ipus_of_trace() -> int | None:
    """Return for how many IPUs a function is being traced; None outside of it, and in the body of an `everywhere`."""
    return _size_of(_OF_FUNCTION) if _size_of(_OF_SHARDS) is None else None


def shard_size(size: int, ipus: int) -> int:
    """Return the number of rows in each IPU's shard of a dim, with padding."""
    return -(-size // ipus)


def _padded(x: Value, dim: int | None, ipus: int) -> Value:
    more = 0 if dim is None else -x.shape[dim] % ipus
    if more and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"everywhere{users_call()} splits {x.shape[dim]} random keys over {ipus} IPUs, and keys have no padding: "
            f"give a multiple of {ipus}"
        )
    widths = [(0, more * (d == dim), 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), widths) if more else x


def _own_shard(x: Value, dim: int | None) -> Value:
    """Return this IPU's shard of a value that every IPU holds whole."""
    ipus = lax.axis_size(IPU_AXIS)
    if dim is None or ipus == 1:
        return x
    local = shard_size(x.shape[dim], ipus)
    return lax.dynamic_slice_in_dim(_padded(x, dim, ipus), lax.axis_index(IPU_AXIS) * local, local, axis=dim)


# the operation


def _operation(on_shards: Function, ipus: int, leaves: Sequence[Value], dims: Sequence[int | None]) -> Tree:
    """Trace a function on one IPU's shards, and make it one operation of the trace around it."""
    shape_of = lambda x, dim: [shard_size(size, ipus) if d == dim else size for d, size in enumerate(x.shape)]
    local = [
        jax.ShapeDtypeStruct(shape_of(x, dim), x.dtype, weak_type=jax.typeof(x).weak_type)
        for x, dim in zip(leaves, dims, strict=True)
    ]
    scope = [(_OF_SHARDS, 1), (IPU_AXIS, ipus)]
    scope = scope if _size_of(IPU_AXIS) is None else scope[:1]  # no mesh, unless it is the pipeline's: it is run there
    closed, shapes = jax.make_jaxpr(on_shards, axis_env=scope, return_shape=True)(*local)
    around = closed.consts  # arrays, and values of the function around it, that it closes over
    jaxpr = closed_of(closed_over(plain(closed)))
    dims = [*(None for _ in around), *dims]
    _check_alike(jaxpr, dims, users_call())
    padded = [_padded(x, dim, ipus) for x, dim in zip([*around, *leaves], dims, strict=True)]
    results = _everywhere_p.bind(*padded, jaxpr=jaxpr, split_dims=tuple(dims))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _check_alike(jaxpr: Jaxpr, dims: Sequence[int | None], line: str) -> None:
    """Raise `ValueError` if what an operation on all IPUs returns may differ between them, or may wait for ever."""

    def refuse(eqn: Eqn, inside: str) -> NoReturn:
        raise ValueError(
            f"everywhere{line}: {eqn.primitive.name}{at_line(eqn)} is in a {inside} that only some IPUs may run, and "
            "all must reach it: move it out, or decide by a value that is the same on all IPUs"
        )

    if any(differing(jaxpr.jaxpr, [dim is not None for dim in dims], IPU_AXIS, refuse)):
        raise ValueError(
            f"everywhere{line}: what it returns may differ between IPUs: add the parts up, jax.lax.psum(x, "
            f"{IPU_AXIS!r}), or gather them, jax.lax.all_gather(x, {IPU_AXIS!r}, axis=..., tiled=True)"
        )


class _Everywhere(core.Primitive):
    """The operation. Outside of a trace for IPUs, it is replaced by its body when it is bound.

    Its operands are whole, and padded where they are split; its jaxpr computes the results from one IPU's shards.
    """

    multiple_results = True

    def bind(self, *args: Value, **params: Any) -> list[Value]:
        return _computed(*args, **params) if _ipus_of_trace() is None else super().bind(*args, **params)


def _computed(
    *args: Value, jaxpr: Jaxpr, split_dims: Sequence[int | None], checkpoint: dict[str, Any] | None = None
) -> list[Value]:
    run = core.jaxpr_as_fun(jaxpr)
    return (run if checkpoint is None else checkpointed(run, **checkpoint))(*map(_own_shard, args, split_dims))


def under_checkpoint(op: Eqn, how: dict[str, Any]) -> Eqn:
    """Return an operation whose body is under a `jax.checkpoint` with this policy, unless it is under one already."""
    return op.replace(params={"checkpoint": how, **op.params})


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"everywhere{users_call()} is called inside of {what}: what runs on all IPUs is a stage of its own; take "
            f"{what} of dense functions, or inside of the function that everywhere runs"
        )

    return refuse


_everywhere_p: Final = _Everywhere("everywhere")
_everywhere_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[_everywhere_p] = _refused("jax.grad or another derivative")
batching.primitive_batchers[_everywhere_p] = _refused("jax.vmap")
mlir.register_lowering(_everywhere_p, mlir.lower_fun(_computed, multiple_results=True))


def is_everywhere(op: Eqn) -> bool:
    """Return whether an operation runs on all IPUs."""
    return getattr(op, "primitive", None) is _everywhere_p


def holds_everywhere(op: Eqn) -> bool:
    """Return whether an operation on all IPUs is inside of an operation."""
    return not is_everywhere(op) and any(is_everywhere(eqn) for body in bodies_of(op) for eqn in all_equations(body))


def check_outside(operations: Sequence[Eqn]) -> None:
    """Raise `ValueError` for an operation on all IPUs inside of a loop, a branch or another operation with a body."""
    with_bodies = {id(eqn): eqn for eqn in (getattr(op, "scan", op) for op in operations)}  # layers of a scan share one
    for op in filter(holds_everywhere, with_bodies.values()):
        inside = [eqn for body in bodies_of(op) for eqn in all_equations(body)]
        line = at_line(next(eqn for eqn in inside if is_everywhere(eqn)))
        raise ValueError(
            f"everywhere{line} is called inside of a {name_of(op)}{at_line(op)}: what runs on all IPUs is a stage of "
            "its own; call it outside, in a Python loop over the layers"
        )
