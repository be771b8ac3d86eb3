"""Follow rows, the layers of a stacked leaf, through the operations between the leaf and the layer that reads them.

w.astype(half)[3]      becomes      w[3].astype(half)      so that a stage needs its own rows of w alone
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import shape_of

_BY_ROW: Final = (
    *("convert_element_type", "reduce_precision", "copy", "stop_gradient", "neg", "abs", "sign", "square"),
    *("mul", "add", "sub", "div", "max", "min", "pow", "integer_pow"),
    *("exp", "log", "sqrt", "rsqrt", "tanh", "logistic"),
)
"""Operations whose result has rows that depend only on the same rows of their inputs."""


def is_by_row(eqn: Eqn) -> bool:
    """Return whether each row of an equation's result depends only on the same row of its inputs."""
    shapes = ((), eqn.outvars[0].aval.shape)
    return eqn.primitive.name in _BY_ROW and all(v.aval.shape in shapes for v in eqn.invars)


def rows_sliced(eqn: Eqn) -> tuple[int, int] | None:
    """Return the first row that a static slice of whole rows takes, and the one after the last; None for others."""
    if getattr(eqn, "primitive", None) is not lax.slice_p:
        return None
    params, shape = eqn.params, eqn.invars[0].aval.shape
    starts, stops = params["start_indices"], params["limit_indices"]
    is_whole = starts[1:] == (0,) * len(starts[1:]) and stops[1:] == shape[1:]
    return (starts[0], stops[0]) if is_whole and set(params["strides"] or ()) <= {1} else None


def slicing(var: Var, start: int, stop: int, rows: Var) -> Eqn:
    """Return the equation of rows of a value."""
    return equation(lambda x: lax.slice_in_dim(x, start, stop), [var], rows)


def equation(fn: Any, inputs: Sequence[Var], output: Var) -> Eqn:
    """Return the equation of a function that is one operation, between these variables."""
    (eqn,) = jax.make_jaxpr(fn)(*(shape_of(v.aval) for v in inputs)).jaxpr.eqns
    return eqn.replace(invars=list(inputs), outvars=[output])


def rows_taken(eqn: Eqn) -> list[tuple[int, int]]:
    """Return, per result of an equation that takes whole rows, the first row and the one after the last; or []."""
    name = eqn.primitive.name if hasattr(eqn, "primitive") else ""
    if name in ("split", "unstack") and eqn.params["axis"] == 0:
        sizes = eqn.params.get("sizes", [1] * len(eqn.outvars))
        return [*itertools.pairwise(itertools.accumulate(map(int, sizes), initial=0))]
    rows = rows_sliced(eqn)
    return [] if rows is None else [rows]


def sliced_first(operations: Sequence[Eqn], kinds: Mapping[Var, str]) -> list[Eqn]:
    """Return operations in which rows of a value that follows from weights or state alone follow from their rows.

    They are slices, also those that a loop over a stacked leaf takes by `unstack`.
    """
    made = {v: op for op in operations for v in op.outvars if kinds[v] in ("w", "s")}
    found: list[Eqn] = []
    known: dict[tuple[Var, int, int], Var] = {}

    def rows_of(var: Var, start: int, stop: int) -> Var:
        if isinstance(var, core.Literal) or not var.aval.shape:
            return var
        if (var, start, stop) not in known:
            known[var, start, stop] = take(var, start, stop, core.Var(_of_rows(var, start, stop)))
        return known[var, start, stop]

    def take(var: Var, start: int, stop: int, rows: Var) -> Var:
        op = made.get(var)
        if op is None or not hasattr(op, "primitive") or not is_by_row(op):
            made[rows] = slicing(var, start, stop, rows)
        else:
            made[rows] = op.replace(invars=[rows_of(v, start, stop) for v in op.invars], outvars=[rows])
        found.append(made[rows])
        return rows

    for op in operations:
        taken = rows_taken(op) if op.invars and not isinstance(op.invars[0], core.Literal) else []
        if not taken or kinds[op.invars[0]] not in ("w", "s"):
            found.append(op)
            continue
        before = len(found)
        for result, (start, stop) in zip(op.outvars, taken, strict=True):
            is_squeezed = op.primitive.name == "unstack"
            rows = core.Var(_of_rows(op.invars[0], start, stop)) if is_squeezed else result
            take(op.invars[0], start, stop, rows)
            found += [equation(lambda x: lax.squeeze(x, (0,)), [rows], result)] if is_squeezed else []
        found[before:] = [eqn.replace(source_info=op.source_info) for eqn in found[before:]]
    return found


def _of_rows(var: Var, start: int, stop: int) -> Any:
    return var.aval.update(shape=(stop - start, *var.aval.shape[1:]))
