"""Follow rows of a stack through a function with a derivative of its own, as `jax.nn.relu` or a straight-through round.

relu(w)[3]      becomes      relu(w[3]), where both the value and the derivative are computed for these rows alone

Such a function is traced for its whole inputs, and its derivative cannot be traced for others. So the operations of
both are found, and followed back by rows. A derivative that mixes rows, as one that divides by a norm of the whole
gradient, cannot be.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import (
    CALLS,
    bound_with,
    closed_of,
    in_order,
    is_float,
    laid_open,
    needed,
    part_of,
    read_by,
    shape_of,
)
from ipu_jax.base.row_rules import FOLLOWED, Before, Rule, Taken
from ipu_jax.core.cutting.rows import RowTaker

_MOST_KEPT: Final = 64
"""How many functions are kept traced."""
_Ends = dict[int, set[int | None]]
"""Per number of an input, the dims along which its rows are read; None: all of it is."""


def _own_derivative(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, if a row of the value and of the derivative follows from the same row of the inputs."""
    dims = _dims(eqn, taken.dim)
    params = None if dims is None else _params(eqn, dims, taken.dim, taken.stop - taken.start)
    return None if params is None else Before([None if d is None else taken.at(d) for d in dims or ()], params)


RULES: Final[Mapping[str, Rule]] = {
    **FOLLOWED,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "call_hi_primitive"), _own_derivative),
}
"""`FOLLOWED`, and the rule for functions with their own derivatives."""


class _Own(NamedTuple):
    """A function with a derivative of its own.

    Attributes:
        value: of the inputs.
        derivative: of the inputs, and of the tangents of those with floats, or of the result's cotangent; returns the
            value, and its tangent, or the gradients of the inputs with floats.
        inputs: the number of the input that each input of `derivative` is, or is the tangent of; -1: the cotangent.
        floats: the numbers of the inputs with floats.
        is_jvp: whether the derivative takes tangents.
    """

    value: Jaxpr
    derivative: Jaxpr
    inputs: list[int]
    floats: list[int]
    is_jvp: bool


def pushed(eqn: Eqn) -> Jaxpr:
    """Return the closed jaxpr of an equation's outputs and their tangents, for inputs and the tangents of floats."""
    given, floats = [shape_of(v.aval) for v in eqn.invars], [k for k, v in enumerate(eqn.invars) if is_float(v)]

    def push(xs: Sequence[Value], ts: Sequence[Value]) -> Any:
        return jax.jvp(lambda *own: bound_with(eqn, xs, floats, own), [xs[k] for k in floats], ts)

    return jax.make_jaxpr(push)(given, [given[k] for k in floats])


@functools.lru_cache(_MOST_KEPT)
def _traced(eqn: Eqn) -> _Own | None:
    """Return the function of an equation with its derivative; None if it has none."""
    given = [shape_of(v.aval) for v in eqn.invars]
    floats, is_jvp = [k for k, v in enumerate(eqn.invars) if is_float(v)], eqn.primitive.name == "custom_jvp_call"

    def pulled(xs: Sequence[Value], g: Value) -> Any:
        y, pull = jax.vjp(lambda *own: bound_with(eqn, xs, floats, own)[0], *(xs[k] for k in floats))
        return y, pull(g)

    try:
        derivative = pushed(eqn) if is_jvp else jax.make_jaxpr(pulled)(given, shape_of(eqn.outvars[0].aval))
    except Exception:
        return None  # the user's rule can raise anything, where it is never differentiated
    value = closed_of(eqn.params[CALLS[eqn.primitive.name]])
    # calls in them are opened, whatever their derivatives: a stage is differentiated once
    value, derivative = (laid_open(body, tuple(CALLS)) for body in (value, derivative))
    return _Own(value, derivative, [*range(len(given)), *(floats if is_jvp else [-1])], floats, is_jvp)


@functools.lru_cache(_MOST_KEPT)
def _dims(eqn: Eqn, dim: int) -> tuple[int | None, ...] | None:
    """Return along which dim of each input the rows of a result are, None for all of it; None if rows are mixed."""
    own, count, ends = _traced(eqn), eqn.outvars[0].aval.shape[dim], _Ends()
    if own is None or not is_float(eqn.outvars[0]):
        return None
    results = own.derivative.jaxpr.outvars
    of_value = [(v, dim) for v in results[: 2 if own.is_jvp else 1]]
    are_own = _add_ends(own.value, own.inputs, [(own.value.jaxpr.outvars[0], dim)], count, ends)
    are_own = are_own and _add_ends(own.derivative, own.inputs, of_value, count, ends)
    if are_own and not own.is_jvp:
        along = [next(iter(ends.get(k, {None}))) for k in own.floats]
        gradients = [(v, d) for v, d in zip(results[1:], along, strict=True) if d is not None]
        sums = [eqn.invars[k] for k, d in zip(own.floats, along, strict=True) if d is None]  # their gradients add rows
        ends[-1] = {dim}
        are_own = all(isinstance(v, core.Literal) for v in sums)
        are_own = are_own and _add_ends(own.derivative, own.inputs, gradients, count, ends)
    return tuple(next(iter(ends.get(k, {None}))) for k in range(len(eqn.invars))) if are_own else None


def _add_ends(
    closed: Jaxpr, inputs: Sequence[int], results: Sequence[tuple[Var, int]], count: int, ends: _Ends
) -> bool:
    """Add what rows of results, along a dim of each, follow from.

    Returns:
        Whether row k of the results follows from row k of each input, or from all of it, for each k of `count`.
    """
    number, whole = dict(zip(closed.jaxpr.invars, inputs, strict=False)), set[Var]()
    taker = RowTaker({v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}, {})
    for row, (v, dim) in itertools.product(range(count), results):
        for end, rows in taker.reached(v, Taken(dim, row, row + 1)):
            if rows is None:
                whole.add(end)
            elif end not in number or rows[1:] != (row, row + 1) or end.aval.shape[rows.dim] != count:
                return False
            else:
                ends.setdefault(number[end], set()).add(rows.dim)
    for v in number.keys() & {*read_by(needed(closed.jaxpr.eqns, [*whole]), [*whole])}:
        ends.setdefault(number[v], set()).add(None)
    return all(len(dims) == 1 for dims in ends.values())


@functools.lru_cache(_MOST_KEPT)
def _params(eqn: Eqn, dims: tuple[int | None, ...], dim: int, count: int) -> dict[str, Any] | None:
    """Return the parameters of the equation of the same function for `count` rows; None if it has constants."""
    own, rows = _traced(eqn), Taken(dim, 0, count)
    assert own is not None, "its dims are known"
    along = [dims[k] if k >= 0 else dim for k in own.inputs]
    results = own.derivative.jaxpr.outvars
    value = _on_rows(own.value, [(own.value.jaxpr.outvars[0], dim)], dims, rows)
    fn: Any
    if own.is_jvp:
        push = _on_rows(own.derivative, [(v, dim) for v in results], along, rows)
        fn = jax.custom_jvp(lambda *xs: value(*xs)[0])
        fn.defjvp(lambda xs, ts: tuple(push(*xs, *(ts[k] for k in own.floats))))
    else:
        gradients = {k: (v, d) for k, v in zip(own.floats, results[1:], strict=True) if (d := dims[k]) is not None}
        pull = _on_rows(own.derivative, [*gradients.values()], along, rows)
        forward = _on_rows(own.derivative, [(results[0], dim)], along[:-1], rows)

        def backward(xs: Sequence[Value], g: Value) -> Any:
            found = dict(zip(gradients, pull(*xs, g), strict=True))
            return tuple(map(found.get, range(len(xs))))

        fn = jax.custom_vjp(lambda *xs: value(*xs)[0])
        fn.defvjp(lambda *xs: (forward(*xs)[0], xs), backward)
    of_rows = zip(eqn.invars, dims, strict=True)
    given = [shape_of(v.aval if d is None else v.aval.update(shape=rows.at(d).of(v.aval.shape))) for v, d in of_rows]
    new = jax.make_jaxpr(fn)(*given).jaxpr.eqns[-1]
    return new.params if new.primitive is eqn.primitive and len(new.invars) == len(eqn.invars) else None


def _on_rows(closed: Jaxpr, results: Sequence[tuple[Var, int]], along: Sequence[int | None], rows: Taken) -> Function:
    """Return a function that computes rows of results from rows of the first inputs of a jaxpr."""
    taker = RowTaker({v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}, {})
    outs = [taker.take(v, rows.at(dim)) for v, dim in results]
    of_inputs = zip(closed.jaxpr.invars[: len(along)], along, strict=True)
    inputs = [v if dim is None else taker.take(v, rows.at(dim)) for v, dim in of_inputs]
    equations = [eqn for eqn in [*closed.jaxpr.eqns, *taker.equations] if eqn.outvars[0] not in inputs]
    return core.jaxpr_as_fun(part_of(closed, inputs, needed(in_order(equations, equations), outs), outs))
