"""Make a loop that takes row after row of a leaf a loop over its rows, which can be cut between any two of them.

fori_loop(0, 6, lambda i, x: f(w[i], x), x)                     scan(lambda x, row: f(row, x), x, w)
scan(lambda x, i: f(jnp.take(w, i, axis=1), x), x, arange(6))   scan(lambda x, row: f(row, x), x, moveaxis(w, 1, 0))
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import (
    all_equations,
    closed_of,
    evaluated,
    in_scan_parts,
    laid_open,
    needed,
    read_by,
    scan_parts,
    value_of,
    variables,
)
from ipu_jax.core.cutting.numbers import numbers_of
from ipu_jax.core.cutting.rows import dim_of_update, equations, row_of_gather, rows_at

_SETS: Final = {"dynamic_update_slice": 1, "scatter": 2}
"""What replaces a row, and which input is the new row."""


class _RowOfLoop(NamedTuple):
    """An equation of a loop's body that takes or replaces a row: along which dim, and its number per iteration."""

    eqn: Eqn
    dim: int
    numbers: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a row."""
        whole = self.eqn.invars[0].aval.shape
        return (*whole[: self.dim], *whole[self.dim + 1 :])

    @property
    def is_in_order(self) -> bool:
        """Return whether the iterations go over all rows, one after the other."""
        return [*self.numbers] == [*range(self.eqn.invars[0].aval.shape[self.dim])]


def over_rows(scan: Eqn, leaves: set[Var], known: Callable[[Var], Any]) -> list[Eqn] | None:
    """Return a scan over the rows that its iterations take of leaves; None if there are none, or none that are known.

    A leaf in its carry, of which each iteration takes a row and replaces it, becomes one of its inputs and results.

    Args:
        scan: the equation.
        leaves: the variables of leaves, and of values that follow from them alone.
        known: returns the numbers of a small array of ints, or None.
    """
    params, body = scan.params, closed_of(scan.params["jaxpr"])
    fixed, carry, xs = in_scan_parts(params, list(scan.invars))
    of_loop = leaves & {*variables([*fixed, *carry])}
    takes = any(eqn.primitive.name in ("gather", "dynamic_slice") for eqn in all_equations(body.jaxpr))
    if not of_loop or not takes or scan.effects or params["length"] < 2:
        return None
    body = laid_open(body)
    loop = _Loop(scan, body, known)
    caches = {j: cache for j, v in enumerate(carry) if {*variables([v])} & of_loop and (cache := loop.cache(j))}
    kept = {*body.jaxpr.invars[: len(fixed)], *(body.jaxpr.invars[len(fixed) + j] for j in caches)}
    outer = {v: leaf for v, leaf in zip(body.jaxpr.invars, scan.invars, strict=True) if {*variables([leaf])} & of_loop}
    reads = [eqn for eqn in body.jaxpr.eqns if outer.keys() & kept & {*variables(eqn.invars[:1])}]
    rows = [row for row in map(loop.row_taken, reads) if row is not None]
    if not rows:
        return None
    before, stacks = list[Eqn](), list[Var]()
    for row in rows:
        stacks.append(_stack(row, outer[row.eqn.invars[0]], before, scan))
    others = [v for j, v in enumerate(carry) if j not in caches]
    run = loop.runner(rows, caches)
    return [*before, *equations(run, (fixed, others, xs, stacks), scan.outvars, like=scan)]


def _stack(row: _RowOfLoop, leaf: Var, before: list[Eqn], scan: Eqn) -> Var:
    """Return the rows that a loop takes of a leaf, stacked in its order; append to `before` what computes them."""
    if row.is_in_order and row.dim == 0:
        return leaf
    stack = core.Var(leaf.aval.update(shape=(len(row.numbers), *row.shape)))
    taken = lambda x: x if row.is_in_order else rows_at(x, row.numbers, row.dim)
    before += equations(lambda x: jnp.moveaxis(taken(x), row.dim, 0), [leaf], [stack], like=scan)
    return stack


class _Loop(NamedTuple):
    """A scan, its body laid open, and what returns the numbers of a small array of ints, or None."""

    scan: Eqn
    body: Jaxpr
    known: Callable[[Var], Any]

    def row_taken(self, eqn: Eqn) -> _RowOfLoop | None:
        """Return the row of a leaf that an equation takes; None if it takes something else, or is unknown."""
        shape = eqn.invars[0].aval.shape
        if eqn.primitive.name == "gather":
            dim, place = row_of_gather(eqn), eqn.invars[1]
            return None if dim is None or place.aval.shape != (1,) else self._row(eqn, dim, place)
        if eqn.primitive.name != "dynamic_slice":
            return None
        dims = [d for d, size in enumerate(eqn.params["slice_sizes"]) if size != shape[d]]
        if len(dims) != 1 or eqn.params["slice_sizes"][dims[0]] != 1:
            return None
        return self._row(eqn, dims[0], eqn.invars[1 + dims[0]])

    def _row(self, eqn: Eqn, dim: int, place: Var) -> _RowOfLoop | None:
        numbers, count = _in_iterations(self.scan, self.body, place, self.known), eqn.invars[0].aval.shape[dim]
        if numbers is not None and eqn.primitive.name.startswith("dynamic"):
            numbers = np.clip(numbers, 0, count - 1)
        if numbers is None or not ((numbers >= 0) & (numbers < count)).all():
            return None
        return _RowOfLoop(eqn, dim, numbers)

    def cache(self, j: int) -> _RowOfLoop | None:
        """Return the update of a leaf in the carry that replaces each row by the iteration that takes it, or None."""
        jaxpr = self.body.jaxpr
        consts, _ = scan_parts(self.scan.params)
        own, new = jaxpr.invars[consts + j], jaxpr.outvars[j]
        reads = [eqn for eqn in jaxpr.eqns if own in variables(eqn.invars)]
        updates = [eqn for eqn in reads if new in eqn.outvars and eqn.primitive.name in _SETS]
        if len(updates) != 1 or new in [*read_by(jaxpr.eqns), *jaxpr.outvars[:j], *jaxpr.outvars[j + 1 :]]:
            return None
        (eqn,), dim = updates, dim_of_update(updates[0])
        if dim is None or eqn.invars[0] is not own or own in variables(eqn.invars[1:]):
            return None
        place = eqn.invars[2 + dim] if eqn.primitive.name == "dynamic_update_slice" else eqn.invars[1]
        update, taken = self._row(eqn, dim, place), [self.row_taken(e) for e in reads if e is not eqn]
        if update is None or not taken or not update.is_in_order or any(row is None for row in taken):
            return None
        return update if all(row.dim == dim and row.is_in_order for row in taken if row) else None

    def runner(self, rows: list[_RowOfLoop], caches: dict[int, _RowOfLoop]) -> Function:
        """Return the function of the new scan's inputs that runs it, and returns the results of the old one."""
        scan, numbers = self.scan, {id(row.eqn): k for k, row in enumerate(rows)}
        updates = {id(row.eqn): j for j, row in caches.items()}
        count = scan_parts(scan.params)[1]

        def run(fixed: list[Value], carry: list[Value], xs: list[Value], stacks: list[Value]) -> list[Value]:
            def layer(carry: list[Value], x: tuple[list[Value], list[Value]]) -> tuple[list[Value], list[Value]]:
                given, new = iter(carry), dict[int, Value]()

                def rule(eqn: Eqn, inputs: list[Value]) -> list[Value] | None:
                    if id(eqn) in numbers:
                        return [x[1][numbers[id(eqn)]].reshape(eqn.outvars[0].aval.shape)]
                    if id(eqn) in updates:
                        j = updates[id(eqn)]
                        new[j] = inputs[_SETS[eqn.primitive.name]].reshape(caches[j].shape)
                        return [None]
                    return None

                values = [None if j in caches else next(given) for j in range(count)]
                outs = evaluated(self.body, [*fixed, *values, *x[0]], rule)
                carried = [out for j, out in enumerate(outs[:count]) if j not in caches]
                return carried, [*outs[count:], *(new[j] for j in caches)]

            options = {name: scan.params[name] for name in ("reverse", "unroll")}
            carried, ys = lax.scan(layer, carry, (xs, stacks), scan.params["length"], **options)
            stacked = len(ys) - len(caches)
            whole = {j: jnp.moveaxis(y, 0, caches[j].dim) for j, y in zip(caches, ys[stacked:], strict=True)}
            given = iter(carried)
            return [*(whole[j] if j in caches else next(given) for j in range(count)), *ys[:stacked]]

        return run


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
