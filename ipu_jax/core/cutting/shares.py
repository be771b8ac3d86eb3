"""Compute a function on all IPUs at once, each with its share of some inputs: rows of a table, logits of a vocabulary.

    table (V, D)    IPU k has rows [k * local, (k + 1) * local), local = ceil(V / n); padding is at the end
    h @ table.T     a share of the result, along dim 1: h is whole
    + bias          the same share of the bias
    max(.., 1)      of each share, then of all IPUs: whole

An operation whose rows follow from rows of its inputs computes its share of them. `_ACROSS` has rules for others, such
as a reduction over all rows. An operation without a rule computes on gathered values: it is right, and expensive.

Cotangents follow one convention. Each IPU has the whole cotangent of its share, and a part of the cotangent of a value
that all IPUs have; the sum over the IPUs is the cotangent. `psum` is its own transpose, as under `check_vma=False`.

Padding repeats a real row wherever an operation could turn zeros into infinities, so that it has no derivative that a
real row lacks. Reductions do not read it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Dtype, Eqn, Function, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import (
    CALLS,
    CHECKPOINTS,
    ELEMENTWISE,
    OWN_BACKWARD,
    all_equations,
    bodies_of,
    bound,
    checkpointed,
    closed_of,
    evaluated,
    in_scan_parts,
    is_float,
    laid_open,
)
from ipu_jax.base.row_rules import FOLLOWED, Before, Taken, rows_before
from ipu_jax.core.cutting.fused_head import LINEAR_CROSS_ENTROPY, losses_of_share
from ipu_jax.core.cutting.inlined import INLINED
from ipu_jax.core.cutting.own_rows import RULES, pushed
from ipu_jax.core.mesh.devices import IPU_AXIS

_MOVES: Final = frozenset(("broadcast_in_dim", "reshape", "transpose"))
_LINEAR: Final = _MOVES | {"convert_element_type", "copy", "dot_general", "gather", "reduce_precision", "squeeze"}
"""Primitives that turn zeros of padding into zeros."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share:
    """One IPU's share of an array.

    Attributes:
        part: (.., local, ..), rows [k * local, (k + 1) * local) of the array on IPU k; rows from `size` on are padding.
        dim: the dim of the rows.
        size: the size of this dim in the array.
        repeats: whether padding repeats real rows. Otherwise it has zeros.
    """

    part: Value
    dim: int = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    repeats: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def rows(self) -> Taken:
        """Return the rows of IPU 0: they say along which dim, and how many."""
        return Taken(self.dim, 0, self.part.shape[self.dim])

    @property
    def has_padding(self) -> bool:
        return self.rows.stop * lax.axis_size(IPU_AXIS) > self.size

    @property
    def start(self) -> Value:
        """Return the number of this IPU's first row."""
        return lax.axis_index(IPU_AXIS) * self.rows.stop

    def masked(self, fill: Any) -> Value:
        """Return the part with `fill` in place of padding."""
        return jnp.where(self.is_real, self.part, jnp.asarray(fill, self.part.dtype)) if self.has_padding else self.part

    @property
    def is_real(self) -> Value:
        """Return which rows are not padding, in a shape that broadcasts to the part's."""
        shape = [self.rows.stop if d == self.dim else 1 for d in range(self.part.ndim)]
        return self.start + lax.broadcasted_iota(jnp.int32, shape, self.dim) < self.size


Made = dict[Var, tuple[Eqn, list[Any]]]
"""The equation that computes a variable, and its inputs, whole or shares."""
Across = Callable[[Eqn, list[Any], Made], list[Any] | None]
"""Return the outputs of an equation for inputs with a `Share` among them; None if another way must be taken."""


def in_shares(closed: Jaxpr, splits: Sequence[tuple[int, int] | None]) -> Function:
    """Return a function of one IPU's values that computes the outputs of a closed jaxpr.

    Call it where axis "ipu" is bound, in a `jax.shard_map` under `check_vma=False`.

    Args:
        closed: a function of whole arrays.
        splits: per input, `(dim, size)` if each IPU gets a part of it along `dim`, padded with zeros at the end of
            `size` rows to a multiple of the IPUs; None if each gets all of it.

    Returns:
        The function. It returns a list of outputs, whole and the same on every IPU. For each way to compute a result
        from shares it communicates: sums of the shares' results, one row of a look-up, or all shares.
    """

    def run(*values: Value) -> list[Value]:
        args = [x if split is None else Share(x, *split) for x, split in zip(values, splits, strict=True)]
        return [_whole(value) for value in _evaluated(closed, args)]

    return run


def _evaluated(closed: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a closed jaxpr, arrays or shares, for inputs that are arrays or shares."""
    made = Made()

    def rule(eqn: Eqn, inputs: list[Any]) -> list[Any]:
        made.update((v, (eqn, inputs)) for v in eqn.outvars)
        outputs = None
        if eqn.primitive is LINEAR_CROSS_ENTROPY or any(isinstance(x, Share) for x in inputs):
            across = _ACROSS.get(eqn.primitive.name)
            outputs = None if across is None else across(eqn, inputs, made)
            outputs = _along(eqn, inputs, made) if outputs is None else outputs
        return _on_whole(eqn, list(map(_whole, inputs))) if outputs is None else outputs

    return evaluated(laid_open(closed, INLINED), args, rule)


def _whole(value: Any) -> Value:
    if not isinstance(value, Share):
        return value
    gathered = lax.all_gather(value.part, IPU_AXIS, axis=value.dim, tiled=True)
    return lax.slice_in_dim(gathered, 0, value.size, axis=value.dim)


def _part(value: Any, rows: Taken, size: int, var: Any = None, made: Made | None = None) -> Value:
    """Return this IPU's part of a value. Its padding repeats a real row, unless the value is a share with zeros.

    What elementwise operations compute from an iota is computed from this IPU's part of the iota.
    """
    if isinstance(value, Share) and (value.rows, value.size) == (rows, size):
        return value.part
    start = lax.axis_index(IPU_AXIS) * rows.stop
    if made is not None and isinstance(var, core.Var) and var in made and not isinstance(value, Share):
        eqn, inputs = made[var]
        if eqn.primitive.name == "iota" and eqn.params["dimension"] == rows.dim:
            at = start + lax.broadcasted_iota(jnp.int32, rows.of(value.shape), rows.dim)
            return jnp.minimum(at, size - 1).astype(value.dtype)
        before = rows_before(eqn, rows, FOLLOWED) if eqn.primitive.name in ELEMENTWISE | _MOVES else None
        if before is not None and _are_same(eqn, before, rows, size):
            of_inputs = zip(inputs, before.rows, eqn.invars, strict=True)
            parts = [_whole(x) if of is None else _part(x, of, size, v, made) for x, of, v in of_inputs]
            return bound(eqn.replace(params=eqn.params | before.params), parts)[0]
    value, more = _whole(value), rows.stop * lax.axis_size(IPU_AXIS) - size
    if more:
        value = jnp.pad(value, [(0, more * (d == rows.dim)) for d in range(value.ndim)], mode="edge")
    return lax.dynamic_slice_in_dim(value, start, rows.stop, rows.dim)


def _are_same(eqn: Eqn, before: Before, rows: Taken, size: int) -> bool:
    """Return whether rows of a result follow from the same rows, of as many, of each input, or from all of it."""
    of_inputs = [(v.aval.shape, of) for v, of in zip(eqn.invars, before.rows, strict=True) if of is not None]
    are_same = all(of[1:] == rows[1:] and shape[of.dim] == size for shape, of in of_inputs)
    return are_same and before.within in (None, rows)


def _repeated(share: Share) -> Share:
    """Return a share whose padding repeats a real row."""
    if share.repeats or not share.has_padding:
        return dataclasses.replace(share, repeats=True)
    row = lax.slice_in_dim(share.part, 0, 1, axis=share.dim)
    if share.rows.stop * (lax.axis_size(IPU_AXIS) - 1) >= share.size:  # the last IPU has padding alone
        row = _sum(jnp.where(lax.axis_index(IPU_AXIS) == 0, row, jnp.zeros_like(row)))
    return dataclasses.replace(share, part=jnp.where(share.is_real, share.part, row), repeats=True)


def _sum(x: Value) -> Value:
    """Return the sum over the IPUs; of bools, whether one is true."""
    return lax.psum(x.astype(jnp.int32), IPU_AXIS) > 0 if x.dtype == jnp.bool_ else lax.psum(x, IPU_AXIS)


def _like(value: Any, other: Any) -> Any:
    """Return a value in the layout of another: whole, or this IPU's share."""
    if not isinstance(other, Share):
        return _whole(value)
    value = _repeated(value) if isinstance(value, Share) and other.repeats else value
    return dataclasses.replace(other, part=_part(value, other.rows, other.size))


# operations on whole values


def _on_whole(eqn: Eqn, inputs: list[Value]) -> list[Value]:
    """Return the outputs of an equation on values that all IPUs have.

    The backward of a user's own gets the whole cotangent, as it need not be linear.
    """
    inside = itertools.chain.from_iterable(map(all_equations, bodies_of(eqn)))
    if not any(e.primitive.name in OWN_BACKWARD for e in (eqn, *inside)):
        return bound(eqn, inputs)
    pairs = zip(eqn.invars, inputs, strict=True)
    inputs = [_divided_backward(x) if is_float(v) and isinstance(v, core.Var) else x for v, x in pairs]
    outputs = zip(eqn.outvars, bound(eqn, inputs), strict=True)
    return [_summed_backward(x) if is_float(v) else x for v, x in outputs]


@jax.custom_vjp
def _summed_backward(x: Value) -> Value:
    """Return x; its cotangent is summed over the IPUs."""
    return x


_summed_backward.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, IPU_AXIS),))


@jax.custom_vjp
def _divided_backward(x: Value) -> Value:
    """Return x; its cotangent, which all IPUs have, is divided by their number."""
    return x


_divided_backward.defvjp(lambda x: (x, None), lambda _, g: (g / lax.axis_size(IPU_AXIS),))


# operations whose rows follow from rows of their inputs


def _along(eqn: Eqn, inputs: list[Any], made: Made) -> list[Any] | None:
    """Compute this IPU's share of the result, if the rows of the result follow from the rows of a share."""
    for k, share in enumerate(inputs):
        for dim in range(eqn.outvars[0].aval.ndim) if isinstance(share, Share) and eqn.outvars else ():
            rows, size = share.rows.at(dim), eqn.outvars[0].aval.shape[dim]
            before = rows_before(eqn, rows, _ROWS) if size == share.size else None
            if before is not None and before.rows[k] == share.rows and _are_same(eqn, before, rows, size):
                return [_share_of(eqn, inputs, before, Share(None, dim, size), made)]
    return None


def _share_of(eqn: Eqn, inputs: list[Any], before: Before, result: Share, made: Made) -> Share:
    """Return this IPU's share of an equation's result."""
    if eqn.primitive.name not in _LINEAR:
        inputs = [_repeated(x) if isinstance(x, Share) else x for x in inputs]
    of_inputs = zip(inputs, before.rows, eqn.invars, strict=True)
    parts = [_whole(x) if of is None else _part(x, of, result.size, v, made) for x, of, v in of_inputs]
    (part,) = bound(eqn.replace(params=eqn.params | before.params), parts)
    return dataclasses.replace(result, part=part, repeats=all(x.repeats for x in inputs if isinstance(x, Share)))


# operations across the rows of a share


def _reduced(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any] | None:
    """Reduce each share, and then the results of all IPUs."""
    (share,), name, axes = inputs, eqn.primitive.name, eqn.params["axes"]
    if share.dim not in axes:
        return None
    low, high = _range_of(share.part.dtype)
    fills = {"reduce_sum": 0, "reduce_prod": 1, "reduce_max": low, "reduce_min": high}
    ones = -1 if jnp.issubdtype(share.part.dtype, jnp.signedinteger) else high
    fill = {**fills, "reduce_and": ones, "reduce_or": 0}[name]
    if name in ("reduce_max", "reduce_min") and is_float(eqn.invars[0]):
        return [_extreme(eqn, share, fill)]
    (own,) = bound(eqn, [share.masked(fill)])
    return [lax.psum(own, IPU_AXIS) if name == "reduce_sum" else _of_all(eqn, own)]


def _of_all(eqn: Eqn, own: Value) -> Value:
    """Return a reduction of what reductions of the shares returned."""
    return bound(eqn.replace(params=eqn.params | {"axes": (0,)}), [lax.all_gather(own, IPU_AXIS)])[0]


def _extreme(eqn: Eqn, share: Share, fill: Any) -> Value:
    """Return the maximum or minimum, whose cotangent all rows with this value share equally, on whichever IPU."""
    axes = eqn.params["axes"]

    @jax.custom_jvp
    def run(part: Value) -> Value:
        return _of_all(eqn, bound(eqn, [dataclasses.replace(share, part=part).masked(fill)])[0])

    @run.defjvp
    def _(parts: tuple[Value], tangents: tuple[Value]) -> tuple[Value, Value]:
        best, total = run(*parts), lambda x: lax.psum(jnp.sum(x, axes), IPU_AXIS)
        is_best = parts[0] == jnp.expand_dims(best, axes)
        is_best = is_best & share.is_real if share.has_padding else is_best
        chosen = jnp.where(is_best, tangents[0], jnp.zeros_like(tangents[0]))
        return best, total(chosen) / total(is_best.astype(best.dtype))

    return run(share.part)


def _range_of(dtype: Dtype) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    return (False, True) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)


def _best_place(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any] | None:
    """Find the place of the best value on each IPU, and the first IPU with the best of these."""
    (share,) = inputs
    if share.dim not in eqn.params["axes"]:
        return None
    masked = share.masked(_range_of(share.part.dtype)[eqn.primitive.name == "argmin"])
    (at,) = bound(eqn, [masked])
    best = jnp.take_along_axis(masked, jnp.expand_dims(at, share.dim), share.dim).squeeze(share.dim)
    bests, places = (lax.all_gather(x, IPU_AXIS) for x in (best, at + share.start.astype(at.dtype)))
    (which,) = bound(eqn.replace(params=eqn.params | {"axes": (0,)}), [bests])
    return [jnp.take_along_axis(places, which[None], 0)[0]]


def _looked_up(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any] | None:
    """Look each row up on the IPU that has it; or take whole rows, and so this IPU's share of each."""
    share, ids, params = inputs[0], _whole(inputs[1]), eqn.params
    numbers, sizes, operand, result = params["dimension_numbers"], [*params["slice_sizes"]], *_avals(eqn)
    if not isinstance(share, Share) or share.dim in numbers.operand_batching_dims:
        return None
    if share.dim not in numbers.start_index_map:
        if sizes[share.dim] != share.size:
            return None
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        dim = numbers.offset_dims[[d for d in range(operand.ndim) if d not in gone].index(share.dim)]
        sizes[share.dim] = share.rows.stop
        (part,) = bound(eqn.replace(params=params | {"slice_sizes": tuple(sizes)}), [share.part, ids])
        return [Share(part, dim, share.size, share.repeats)]
    if sizes[share.dim] != 1:
        return None
    ids = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)
    last = jnp.array([operand.shape[d] - sizes[d] for d in numbers.start_index_map], ids.dtype)
    is_inside = jnp.all((ids >= 0) & (ids <= last), -1)
    ids = jnp.clip(ids, 0, last).astype(jnp.int32)
    at = numbers.start_index_map.index(share.dim)
    place = ids[..., at] - share.start
    is_here = (place >= 0) & (place < share.rows.stop)
    ids = ids.at[..., at].set(jnp.clip(place, 0, share.rows.stop - 1))
    in_bounds = params | {"mode": lax.GatherScatterMode.PROMISE_IN_BOUNDS, "fill_value": None}
    (found,) = bound(eqn.replace(params=in_bounds), [share.part, ids])
    per_slice = [d for d in range(result.ndim) if d not in numbers.offset_dims]
    wide = lambda flags: lax.broadcast_in_dim(flags, result.shape, per_slice)
    found = _sum(jnp.where(wide(is_here), found, jnp.zeros_like(found)))
    outside = lax.stop_gradient(found)  # a promise to be inside that is not kept: no row gets the gradient
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        outside = jnp.asarray(params["fill_value"], found.dtype)
    return [found if params["mode"] == lax.GatherScatterMode.CLIP else jnp.where(wide(is_inside), found, outside)]


def _avals(eqn: Eqn) -> tuple[Any, Any]:
    return eqn.invars[0].aval, eqn.outvars[0].aval


def _contracted(eqn: Eqn, inputs: list[Any], made: Made) -> list[Any] | None:
    """Multiply the rows that each IPU has of both operands, and add the products up."""
    for k, share in enumerate(inputs):
        contracted = eqn.params["dimension_numbers"][0]
        if isinstance(share, Share) and share.dim in contracted[k]:
            dims = [of_operand[contracted[k].index(share.dim)] for of_operand in contracted]
            shares = [Share(None, dim, share.size) for dim in dims]
            parts = [
                _part(x, share.rows.at(d), share.size, v, made)
                for x, d, v in zip(inputs, dims, eqn.invars, strict=True)
            ]
            masked = [dataclasses.replace(s, part=part).masked(0) for s, part in zip(shares, parts, strict=True)]
            return [lax.psum(bound(eqn, masked)[0], IPU_AXIS)]
    return None


def _cross_entropy(eqn: Eqn, inputs: list[Any], made: Made) -> list[Any]:
    """Compute the losses from this IPU's rows of the table, without the logits."""
    dim = int(eqn.params["by_columns"])
    size = eqn.invars[1].aval.shape[dim]
    rows = Taken(dim, 0, -(-size // lax.axis_size(IPU_AXIS)))
    at = [None, rows, None, rows.at(0) if eqn.params["has_bias"] else None, None]
    of_inputs = zip(inputs, at, eqn.invars, strict=False)
    values = [_whole(x) if of is None else _part(x, of, size, v, made) for x, of, v in of_inputs]
    return [losses_of_share(values, size, eqn.params)]


def _first_rows(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any] | None:
    """Keep the share of a slice that has the first rows: what it leaves out is padding."""
    (share,), (operand, result) = inputs, _avals(eqn)
    start, step = eqn.params["start_indices"][share.dim], (eqn.params["strides"] or [1] * operand.ndim)[share.dim]
    if start != 0 or step != 1 or result.shape[share.dim] == share.size:
        return None
    stops = [share.rows.stop if d == share.dim else s for d, s in enumerate(eqn.params["limit_indices"])]
    (part,) = bound(eqn.replace(params=eqn.params | {"limit_indices": tuple(stops)}), [_repeated(share).part])
    return [Share(part, share.dim, result.shape[share.dim])]


# operations with a body


def _opened(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any]:
    """Compute the body of a `jax.checkpoint` from shares, under one again."""
    body, params = closed_of(eqn.params["jaxpr"]), eqn.params
    run = lambda *args: _evaluated(body, args)
    return checkpointed(run, policy=params["policy"], prevent_cse=params["prevent_cse"])(*inputs)


def _with_own_tangent(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any] | None:
    """Compute a function with a `custom_jvp` from shares, and its tangent, by its own rule, from shares too."""
    if not all(map(is_float, eqn.outvars)):
        return None
    floats = [k for k, v in enumerate(eqn.invars) if is_float(v)]
    push = pushed(eqn)

    @jax.custom_jvp
    def run(*values: Any) -> list[Any]:
        return _evaluated(closed_of(eqn.params[CALLS[eqn.primitive.name]]), values)

    @run.defjvp
    def _(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs, found = run(*values), _evaluated(push, [*values, *(tangents[k] for k in floats)])
        return outputs, list(map(_like, found[len(outputs) :], outputs))

    return run(*inputs)


def _scanned(eqn: Eqn, inputs: list[Any], _: Made) -> list[Any]:
    """Run a scan whose constants, carry and rows can be shares; a carry keeps the layout in which it begins."""
    params = eqn.params
    constants, carry, rows = in_scan_parts(params, [_repeated(x) if isinstance(x, Share) else x for x in inputs])
    rows = [_whole(x) if isinstance(x, Share) and x.dim == 0 else _moved(x, -1) for x in rows]

    def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _evaluated(params["jaxpr"], [*constants, *carry, *rows])
        return list(map(_like, outputs, carry)), outputs[len(carry) :]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, results = lax.scan(body, carry, rows, **how)
    return [*carry, *(_moved(x, 1) for x in results)]


def _moved(value: Any, by: int) -> Any:
    return dataclasses.replace(value, dim=value.dim + by) if isinstance(value, Share) else value


_REDUCTIONS: Final = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
_ACROSS: Final[dict[str, Across]] = {
    **dict.fromkeys(_REDUCTIONS, _reduced),
    **dict.fromkeys(("argmax", "argmin"), _best_place),
    **dict.fromkeys(CHECKPOINTS, _opened),
    "gather": _looked_up,
    "dot_general": _contracted,
    "linear_cross_entropy": _cross_entropy,
    "slice": _first_rows,
    "custom_jvp_call": _with_own_tangent,
    "scan": _scanned,
}
_ROWS: Final = {name: rule for name, rule in RULES.items() if name not in _ACROSS or name in FOLLOWED}
