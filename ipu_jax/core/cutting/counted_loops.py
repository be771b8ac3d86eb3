"""Make a loop that takes row after row of a leaf a loop over its rows, which can be cut between any two of them.

fori_loop(0, 6, lambda i, x: f(w[i], x), x)                     scan(lambda x, row: f(row, x), x, w)
scan(lambda x, i: f(jnp.take(w, i, axis=1), x), x, arange(6))   scan(lambda x, row: f(row, x), x, moveaxis(w, 1, 0))
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import (
    all_equations,
    closed_of,
    evaluated,
    in_scan_parts,
    laid_open,
    needed,
    read_by,
    value_of,
    variables,
)
from ipu_jax.core.cutting.numbers import numbers_of
from ipu_jax.core.cutting.rows import equations, row_of_gather, rows_at


class _RowOfLoop(NamedTuple):
    """An equation of a loop's body that takes a row of a leaf: along which dim, and its number in each iteration."""

    eqn: Eqn
    dim: int
    numbers: np.ndarray


def over_rows(scan: Eqn, leaves: set[Var], known: Callable[[Var], Any]) -> list[Eqn] | None:
    """Return a scan over the rows that its iterations take of leaves; None if there are none, or none that are known.

    Args:
        scan: the equation.
        leaves: the variables of leaves, and of values that follow from them alone.
        known: returns the numbers of a small array of ints, or None.
    """
    params, body = scan.params, closed_of(scan.params["jaxpr"])
    fixed, carry, xs = in_scan_parts(params, list(scan.invars))
    of_loop = leaves & {*variables(fixed)}
    takes = any(eqn.primitive.name in ("gather", "dynamic_slice") for eqn in all_equations(body.jaxpr))
    if not of_loop or not takes or scan.effects or params["length"] < 2:
        return None
    body = laid_open(body)
    outer = {v: leaf for v, leaf in zip(body.jaxpr.invars, scan.invars, strict=True) if {*variables([leaf])} & of_loop}
    reads = [eqn for eqn in body.jaxpr.eqns if outer.keys() & {*variables(eqn.invars[:1])}]
    found_rows = [_row_of_loop(scan, body, eqn, known) for eqn in reads]
    rows = [row for row in found_rows if row is not None]
    if not rows:
        return None
    found, stacks = list[Eqn](), list[Var]()
    for eqn, dim, numbers in rows:
        leaf, in_order = outer[eqn.invars[0]], [*numbers] == [*range(eqn.invars[0].aval.shape[dim])]
        rows_of = lambda x, dim=dim, at=numbers, all_of=in_order: x if all_of else rows_at(x, at, dim)
        fn = lambda x, dim=dim, rows_of=rows_of: jnp.moveaxis(rows_of(x), dim, 0)
        others = (*leaf.aval.shape[:dim], *leaf.aval.shape[dim + 1 :])
        is_leaf = in_order and dim == 0
        stacks.append(leaf if is_leaf else core.Var(leaf.aval.update(shape=(len(numbers), *others))))
        found += [] if is_leaf else equations(fn, [leaf], stacks[-1:], like=scan)
    number_of = {id(row.eqn): k for k, row in enumerate(rows)}

    def run(fixed: list[Value], carry: list[Value], xs: list[Value], stacks: list[Value]) -> list[Value]:
        def layer(carry: list[Value], x: tuple[list[Value], list[Value]]) -> tuple[list[Value], list[Value]]:
            def rule(eqn: Eqn, _: list[Value]) -> list[Value] | None:
                k = number_of.get(id(eqn))
                return None if k is None else [x[1][k].reshape(eqn.outvars[0].aval.shape)]

            outs = evaluated(body, [*fixed, *carry, *x[0]], rule)
            return outs[: len(carry)], outs[len(carry) :]

        options = {name: params[name] for name in ("reverse", "unroll")}
        new, ys = lax.scan(layer, carry, (xs, stacks), params["length"], **options)
        return [*new, *ys]

    return [*found, *equations(run, (fixed, carry, xs, stacks), scan.outvars, like=scan)]


def _row_of_loop(scan: Eqn, body: Jaxpr, eqn: Eqn, known: Callable[[Var], Any]) -> _RowOfLoop | None:
    """Return the row of a leaf that an equation of a loop takes; None if it takes something else, or is unknown."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive.name == "gather":
        dim, place = row_of_gather(eqn), eqn.invars[1]
        if dim is None or place.aval.shape != (1,):
            return None
    elif eqn.primitive.name == "dynamic_slice":
        dims = [d for d, size in enumerate(eqn.params["slice_sizes"]) if size != shape[d]]
        if len(dims) != 1 or eqn.params["slice_sizes"][dims[0]] != 1:
            return None
        dim, place = dims[0], eqn.invars[1 + dims[0]]
    else:
        return None
    numbers = _in_iterations(scan, body, place, known)
    if numbers is None:
        return None
    if eqn.primitive.name == "dynamic_slice":
        numbers = np.clip(numbers, 0, shape[dim] - 1)
    return _RowOfLoop(eqn, dim, numbers) if ((numbers >= 0) & (numbers < shape[dim])).all() else None


def _in_iterations(scan: Eqn, body: Jaxpr, place: Var, known: Callable[[Var], Any]) -> Any:
    """Return a number of each iteration, in the order of the loop's rows; None if it depends on what is not known."""
    _, carry, xs = in_scan_parts(scan.params, list(body.jaxpr.invars))
    new = dict(zip(carry, body.jaxpr.outvars[: len(carry)], strict=True))
    counts: list[Var] = []  # what the loop counts
    while True:
        wanted = [place, *(new[v] for v in counts)]
        eqns = needed(body.jaxpr.eqns, wanted)
        made = {v for eqn in eqns for v in eqn.outvars}
        inputs = {v: None for v in read_by(eqns, wanted) if v not in made}
        more = [v for v in carry if v in inputs and v not in counts]
        if not more:
            break
        counts += more
    outer = dict(zip(body.jaxpr.invars, scan.invars, strict=True))
    values = {v: known(outer[v]) for v in inputs if v in outer}
    if len(values) < len(inputs) or any(value is None for value in values.values()):
        return None
    found: list[Any] = []
    over, length = {v: value for v, value in values.items() if v in xs}, scan.params["length"]
    for row in reversed(range(length)) if scan.params["reverse"] else range(length):
        values |= {v: rows[row] for v, rows in over.items()}
        for eqn in eqns:
            values |= {v: numbers_of(eqn, [value_of(x, values) for x in eqn.invars]) for v in eqn.outvars}
        number, *new_counts = (value_of(v, values) for v in wanted)
        if number is None or any(count is None for count in new_counts):
            return None
        found.append(number)
        values |= zip(counts, new_counts, strict=True)
    return np.array(found[::-1] if scan.params["reverse"] else found).ravel()
