"""Follow rows, the layers of a stacked leaf, back through the operations between the leaf and the layer that reads it.

w.astype(half)[3]      becomes      w[3].astype(half)      so that a stage needs its own rows of w alone
w.swapaxes(0, 1)[3]    becomes      w[:, 3]                layers can be stacked along any dim
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import copy_p

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Tree, Value, Var
from ipu_jax.base.jaxprs import shape_of, variables
from ipu_jax.base.row_rules import FOLLOWED, Before, Rule, Taken, rows_before
from ipu_jax.core.cutting.scan_layers import ScanStack

JOINS: Final = ("concatenate", "dynamic_update_slice")
"""Primitives whose result is joined from rows of their inputs, if it is along these rows."""


def joined_before(eqn: Eqn | ScanStack, taken: Taken) -> list[tuple[Var, Taken]] | None:
    """Return the values, and their rows, that follow one another in rows of a result; None for other equations."""
    name = "" if isinstance(eqn, ScanStack) else eqn.primitive.name
    if isinstance(eqn, ScanStack):
        if taken.dim != 0:
            return None
        pieces = [(v, 1, 0) for v in (eqn.invars[::-1] if eqn.scan.params["reverse"] else eqn.invars)]
    elif name == "concatenate" and eqn.params["dimension"] == taken.dim:
        pieces = [(v, v.aval.shape[taken.dim], 0) for v in eqn.invars]
    elif name == "dynamic_update_slice" and (start := _updated_at(eqn, taken.dim)) is not None:
        operand, update = eqn.invars[:2]
        count, own = operand.aval.shape[taken.dim], update.aval.shape[taken.dim]
        pieces = [(operand, start, 0), (update, own, 0), (operand, count - start - own, start + own)]
    else:
        return None
    found, end = list[tuple[Var, Taken]](), 0
    for var, count, first in pieces:
        start, stop = max(taken.start, end), min(taken.stop, end + count)
        if start < stop:
            found.append((var, Taken(taken.dim, first + start - end, first + stop - end)))
        end += count
    return found


def _updated_at(eqn: Eqn, dim: int) -> int | None:
    """Return the first row that a `dynamic_update_slice` at a known place replaces, if it replaces whole rows."""
    operand, update, *at = eqn.invars
    is_whole = all(
        a == b for d, (a, b) in enumerate(zip(operand.aval.shape, update.aval.shape, strict=True)) if d != dim
    )
    return int(at[dim].val) if is_whole and isinstance(at[dim], core.Literal) else None


def taken_by(eqn: Eqn) -> Taken | None:
    """Return the rows that a static slice takes along one dim; None for other equations."""
    if getattr(eqn, "primitive", None) is not lax.slice_p or set(eqn.params["strides"] or ()) - {1}:
        return None
    params, shape = eqn.params, eqn.invars[0].aval.shape
    dims = [d for d, size in enumerate(eqn.outvars[0].aval.shape) if size != shape[d]]
    return (
        Taken(dims[0], params["start_indices"][dims[0]], params["limit_indices"][dims[0]]) if len(dims) == 1 else None
    )


def row_of_gather(eqn: Eqn) -> int | None:
    """Return the dim along which a `gather` takes whole rows, one after the other; None for others."""
    operand, places = (v.aval for v in eqn.invars)
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if len(dims.collapsed_slice_dims) != 1 or dims.collapsed_slice_dims != dims.start_index_map:
        return None
    (dim,) = dims.collapsed_slice_dims
    if places.shape[-1] != 1 or places.ndim > 2 or sizes != (*operand.shape[:dim], 1, *operand.shape[dim + 1 :]):
        return None
    own = [d for d in range(operand.ndim) if d != dim] if places.ndim == 2 else range(operand.ndim - 1)
    return dim if tuple(dims.offset_dims) == (*own,) else None


def dim_of_update(eqn: Eqn) -> int | None:
    """Return the dim along which a `scatter`, or a `dynamic_update_slice`, changes one row; None for others."""
    operand = eqn.invars[0].aval.shape
    if eqn.primitive.name == "dynamic_update_slice":
        update = eqn.invars[1].aval.shape
        dims = [d for d, size in enumerate(update) if size != operand[d]]
        return dims[0] if len(dims) == 1 and update[dims[0]] == 1 else None
    dims, update = eqn.params["dimension_numbers"], eqn.invars[2].aval
    axes, is_whole = dims.inserted_window_dims, len(dims.update_window_dims) == update.ndim
    if len(axes) != 1 or axes != dims.scatter_dims_to_operand_dims or eqn.invars[1].aval.shape != (1,) or not is_whole:
        return None
    return axes[0] if update.shape == (*operand[: axes[0]], *operand[axes[0] + 1 :]) else None


def rows_at(x: Value, rows: np.ndarray, dim: int) -> Value:
    """Return rows of an array, of one or more dims of numbers, by static slices."""
    numbers = [int(row) for row in rows.ravel()]
    runs: list[list[int]] = []  # first row, and number of rows
    for row in numbers:
        if runs and row == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([row, 1])
    if numbers == [*range(x.shape[dim])][::-1]:
        return lax.rev(x, (dim,))
    parts = [lax.slice_in_dim(x, first, first + count, axis=dim) for first, count in runs or [[0, 0]]]
    return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def slicing(var: Var, taken: Taken, rows: Var) -> Eqn:
    """Return the equation of rows of a value."""
    return equation(lambda x: lax.slice_in_dim(x, taken.start, taken.stop, axis=taken.dim), [var], rows)


def equation(fn: Function, inputs: Sequence[Var], output: Var) -> Eqn:
    """Return the equation of a function that is one operation, between these variables."""
    (eqn,) = equations(fn, inputs, [output])
    return eqn


def equations(fn: Function, inputs: Sequence[Tree], outputs: Sequence[Var], like: Eqn | None = None) -> list[Eqn]:
    """Return the equations of a function between these variables.

    Args:
        fn: takes trees of arrays, and returns one.
        inputs: the same trees, of variables or literals.
        outputs: the variables of its results.
        like: the equation in whose place they stand: they get its line in the user's file.
    """
    given = jax.tree.map(lambda v: shape_of(v.aval), inputs)
    traced = jax.make_jaxpr(fn)(*given)
    made, results = {v for eqn in traced.jaxpr.eqns for v in eqn.outvars}, traced.jaxpr.outvars
    if len(made.intersection(variables(results))) < len(results):  # a result is an input, or another one
        traced = jax.make_jaxpr(lambda *args: [copy_p.bind(x) for x in jax.tree.leaves(fn(*args))])(*given)
    eqns = between(traced, jax.tree.leaves(inputs), outputs)
    return eqns if like is None else [eqn.replace(source_info=like.source_info) for eqn in eqns]


def between(closed: Jaxpr, inputs: Sequence[Var], outputs: Sequence[Var]) -> list[Eqn]:
    """Return the equations of a closed jaxpr, with these variables as its inputs and outputs."""
    jaxpr, constants = closed.jaxpr, zip(closed.jaxpr.constvars, closed.consts, strict=True)
    named = dict(zip(jaxpr.invars, inputs, strict=True)) | {v: core.Literal(x, v.aval) for v, x in constants}
    named |= zip(jaxpr.outvars, outputs, strict=True)
    atoms = lambda vs: [v if isinstance(v, core.Literal) else named.get(v, v) for v in vs]
    return [eqn.replace(invars=atoms(eqn.invars), outvars=atoms(eqn.outvars)) for eqn in jaxpr.eqns]


class RowTaker:
    """Compute rows of values from rows of what these are computed from.

    Attributes:
        made: the equations of values that can be computed again; rows of others are slices.
        joined: of values that are joined from parts, also of activations.
        equations: what the rows that were taken need, in order.
        rules: how rows of a result follow from rows of inputs, per primitive.
        known: variables of rows.
    """

    def __init__(self, made: dict[Var, Eqn], joined: dict[Var, Eqn], rules: Mapping[str, Rule] = FOLLOWED):
        self.made, self.joined, self.rules, self.equations = made, joined, rules, list[Eqn]()
        self.known: dict[tuple[Var, Taken], Var] = {}

    def take(self, var: Var, taken: Taken, into: Var | None = None) -> Var:
        """Return the variable of rows of a value, or make `into` that variable."""
        if into is None:
            if taken.of(var.aval.shape) == var.aval.shape:
                return var
            if (var, taken) in self.known:
                return self.known[var, taken]
        rows = core.Var(var.aval.update(shape=taken.of(var.aval.shape))) if into is None else into
        pieces = joined_before(self.joined[var], taken) if var in self.joined else None
        before = rows_before(self.made[var], taken, self.rules) if var in self.made else None
        if pieces is not None and len(pieces) == 1:
            rows = self.take(*pieces[0], into)
        elif pieces:
            parts = [self.take(*piece) for piece in pieces]
            self._append(equation(lambda *xs: lax.concatenate(xs, taken.dim), parts, rows))
        elif before is not None:
            self._append_rows(self.made[var], before, rows)
        else:
            self._append(slicing(var, taken, rows))
        self.known.setdefault((var, taken), rows)
        return rows

    def _append(self, eqn: Eqn) -> None:
        self.equations.append(eqn)
        self.made[eqn.outvars[0]] = eqn

    def _append_rows(self, eqn: Eqn, before: Before, rows: Var) -> None:
        inputs = [v if of is None else self.take(v, of) for v, of in zip(eqn.invars, before.rows, strict=True)]
        within, params, result = before.within, {**eqn.params, **before.params}, rows
        if within is not None and (shape := params["new_sizes"]) != rows.aval.shape:
            result = core.Var(rows.aval.update(shape=shape))
        self._append(eqn.replace(invars=inputs, outvars=[result], params=params))
        if within is not None and result is not rows:
            self._append(slicing(result, within, rows))

    def reached(self, var: Var, taken: Taken) -> list[tuple[Var, Taken | None]]:
        """Return the values whose rows `take` would slice, with these rows, and those that it would read whole."""
        waiting: list[tuple[Var, Taken | None]] = [(var, taken)]
        found: list[tuple[Var, Taken | None]] = []
        while waiting:
            var, rows = waiting.pop()
            if rows is None or rows.of(var.aval.shape) == var.aval.shape:
                found.append((var, None))
            elif var in self.joined and (pieces := joined_before(self.joined[var], rows)) is not None:
                waiting += pieces
            elif (before := rows_before(self.made[var], rows, self.rules) if var in self.made else None) is not None:
                inputs = zip(self.made[var].invars, before.rows, strict=True)
                waiting += [(v, of) for v, of in inputs if not isinstance(v, core.Literal)]
            else:
                found.append((var, rows))
        return found


def slices_of_leaves(
    operations: Sequence[Eqn], taker: RowTaker, leaves: Collection[Var], axes: dict[Var, int]
) -> list[Eqn]:
    """Return operations in which slices of what follows from leaves follow from slices of the leaves.

    Args:
        operations: the operations of a trace.
        taker: follows rows back to leaves.
        leaves: the variables of leaves.
        axes: per leaf, the dim along which its rows are taken; leaves that are sliced first are added.
    """
    found: list[Eqn] = []
    for op in operations:
        if op.primitive is not lax.slice_p:
            found.append(op)
            continue
        for one in _dim_by_dim(op):
            if one is not op and not taker.made.keys().isdisjoint([*op.outvars]):
                taker.made[one.outvars[0]] = one
            taken = taken_by(one)
            ends = [] if taken is None else taker.reached(one.invars[0], taken)
            dims = [(v, rows.dim) for v, rows in ends if rows is not None and v in leaves]
            is_joined = taken is not None and one.invars[0] in taker.joined
            if taken is None or not (dims or is_joined) or any(axes.setdefault(v, dim) != dim for v, dim in dims):
                found.append(one)
                continue
            before = len(taker.equations)
            taker.take(one.invars[0], taken, one.outvars[0])
            found += [eqn.replace(source_info=op.source_info) for eqn in taker.equations[before:]]
    return found


def _dim_by_dim(op: Eqn) -> list[Eqn]:
    """Return slices of one dim each in place of a slice of several dims."""
    if getattr(op, "primitive", None) is not lax.slice_p or set(op.params["strides"] or ()) - {1}:
        return [op]
    operand: Var = op.invars[0]
    (result,) = op.outvars
    dims = [d for d, size in enumerate(result.aval.shape) if size != operand.aval.shape[d]]
    found = list[Eqn]()
    for d in dims if len(dims) > 1 else ():
        taken = Taken(d, op.params["start_indices"][d], op.params["limit_indices"][d])
        rows = result if d == dims[-1] else core.Var(operand.aval.update(shape=taken.of(operand.aval.shape)))
        found.append(slicing(operand, taken, rows).replace(source_info=op.source_info))
        operand = rows
    return found or [op]
