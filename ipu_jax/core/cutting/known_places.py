"""Put static slices where rows of a leaf are taken at places that a trace knows, though not by a slice.

jnp.take(w, 3, axis=0), w[jnp.int32(3)]        becomes      w[3]
cache.at[3].set(new)                           becomes      an update at a place that is a literal
fori_loop(0, 6, lambda i, x: f(w[i], x), x)    becomes      a loop over the rows of w (`counted_loops.py`)
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CHECKPOINTS, closed_of, closed_over, laid_open, needed, part_of, read_by, variables
from ipu_jax.core.cutting.counted_loops import over_rows
from ipu_jax.core.cutting.numbers import Numbers
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import (
    RowTaker,
    dim_of_update,
    equations,
    row_of_gather,
    rows_at,
    slices_of_leaves,
    taken_by,
)

_MOST_PIECES: Final = 256
"""Of how many rows that do not follow one another a value may be joined."""
_UPDATES: Final = {"dynamic_update_slice": None, "scatter": None, "scatter-add": lax.add, "scatter-mul": lax.mul}
"""What replaces a part of a value, and what it computes from the part and the update; None: it is the update."""

AT_KNOWN_PLACES: Final = (
    *("gather", "dynamic_slice", "slice", "split", "unstack", "stack", "optimization_barrier", "scan"),
    *_UPDATES,
)
"""The primitives that can take or replace rows of a leaf otherwise than by a static slice of one dim."""


def at_known_places(operations: Sequence[Eqn], constants: Mapping[Var, Value], leaves: Collection[Var]) -> list[Eqn]:
    """Return operations in which rows of leaves are taken, and replaced, by static slices and updates if possible.

    Args:
        operations: the operations of a trace.
        constants: the values of its constants.
        leaves: variables of leaves, and of values that follow from them alone.
    """
    numbers, of_leaves = Numbers(operations, constants), {*leaves}
    found: list[Eqn] = []
    for op in operations:
        name = op.primitive.name
        is_read = name in AT_KNOWN_PLACES and (name == "stack" or not of_leaves.isdisjoint(variables(op.invars)))
        new = _at_known_place(op, numbers, of_leaves) if is_read else None
        found += [op] if new is None else new
        if name in _UPDATES and op.invars[0] in of_leaves:
            of_leaves.update(op.outvars)
    return found


def _at_known_place(op: Eqn, numbers: Numbers, leaves: set[Var]) -> list[Eqn] | None:
    """Return what stands in place of an operation that reads a leaf; None if it stays as it is."""
    name, fn, inputs = op.primitive.name, None, op.invars[:1]
    if name == "scan":
        return over_rows(op, leaves, numbers.of)
    if name in _UPDATES:
        return _updated(op, numbers)
    if name == "gather" and (dim := row_of_gather(op)) is not None:
        fn = _gathered(op, dim, numbers.of(op.invars[1]))
    elif name == "dynamic_slice":
        starts, sizes = list(map(numbers.of, op.invars[1:])), op.params["slice_sizes"]
        if all(start is not None for start in starts):
            ends = [n - size for n, size in zip(op.invars[0].aval.shape, sizes, strict=True)]
            first = [int(np.clip(start, 0, end)) for start, end in zip(starts, ends, strict=True)]
            fn = lambda x: lax.slice(x, first, [a + size for a, size in zip(first, sizes, strict=True)])
    elif name == "slice" and max(op.params["strides"] or (1,)) > 1:
        return _strided(op)
    elif name in ("split", "unstack"):
        axis, sizes = op.params["axis"], op.params.get("sizes", [1] * len(op.outvars))
        ends = list(itertools.accumulate(map(int, sizes), initial=0))
        parts = lambda x: [lax.slice_in_dim(x, *rows, axis=axis) for rows in itertools.pairwise(ends)]
        fn = parts if name == "split" else lambda x: [lax.squeeze(part, (axis,)) for part in parts(x)]
    elif name == "optimization_barrier" and len(op.invars) > 1:
        both = zip(op.invars, op.outvars, strict=True)
        return [eqn for v, result in both for eqn in equations(lax.optimization_barrier, [v], [result], like=op)]
    elif name == "stack":
        axis, inputs = op.params["axis"], op.invars
        fn = lambda *xs: lax.concatenate([lax.expand_dims(x, (axis,)) for x in xs], axis)
    return None if fn is None else equations(fn, inputs, op.outvars, like=op)


def _gathered(op: Eqn, dim: int, rows: Any) -> Function | None:
    if rows is None or rows.size > _MOST_PIECES or (rows < 0).any() or (rows >= op.invars[0].aval.shape[dim]).any():
        return None
    is_one = op.invars[1].aval.ndim == 1
    return lambda x: lax.squeeze(rows_at(x, rows, dim), (dim,)) if is_one else rows_at(x, rows, dim)


def _strided(op: Eqn) -> list[Eqn] | None:
    """Return slices of one row each in place of a slice with a stride along one dim."""
    params, shape = op.params, op.invars[0].aval.shape
    dims = [d for d, size in enumerate(op.outvars[0].aval.shape) if size != shape[d]]
    if len(dims) != 1 or op.outvars[0].aval.shape[dims[0]] > _MOST_PIECES:
        return None
    (dim,) = dims
    rows = np.arange(*(params[of][dim] for of in ("start_indices", "limit_indices", "strides")))
    return equations(lambda x: rows_at(x, rows, dim), op.invars, op.outvars, like=op)


def _updated(op: Eqn, numbers: Numbers) -> list[Eqn] | None:
    """Return the update of a leaf at a place that is a literal."""
    operand, compute = op.invars[0], _UPDATES[op.primitive.name]
    if op.primitive.name == "dynamic_update_slice":
        _, update, *at = op.invars
        places, axis = list(map(numbers.of, at)), None
        if any(place is None for place in places) or all(isinstance(v, core.Literal) for v in at):
            return None
    else:
        _, at, update = op.invars
        row, axis = numbers.of(at), dim_of_update(op)
        if row is None or axis is None or not 0 <= row[0] < operand.aval.shape[axis]:
            return None
        places = [row[0] if d == axis else 0 for d in range(operand.aval.ndim)]
    first = [int(place) for place in places]

    def fn(x: Value, new: Value) -> Value:
        new = new if axis is None else lax.expand_dims(new, (axis,))
        if compute is not None:
            new = compute(lax.slice(x, first, [a + n for a, n in zip(first, new.shape, strict=True)]), new)
        return lax.dynamic_update_slice_p.bind(x, new, *map(np.int32, first))

    return equations(fn, [operand, update], op.outvars, like=op)


TAKEN_OUTSIDE: Final = (*CHECKPOINTS, "cond")
"""Primitives with bodies whose rows of leaves are taken outside of them."""


def with_rows_outside(operations: Sequence[Eqn], constants: Mapping[Var, Value], leaves: Collection[Var]) -> list[Eqn]:
    """Return operations in which a `jax.checkpoint` or a `cond` gets rows of leaves, if its body reads only these.

    Args:
        operations: the operations of a trace.
        constants: the values of its constants.
        leaves: variables of leaves, and of values that follow from them alone.
    """
    numbers, own, found = Numbers(operations, constants), {*leaves}, list[Eqn]()
    for op in operations:
        is_call = op.primitive.name in TAKEN_OUTSIDE and not op.effects and own.intersection(variables(op.invars))
        found += _rows_outside(op, numbers, own) if is_call else [op]
    return found


def _rows_outside(call: Eqn, numbers: Numbers, leaves: set[Var]) -> list[Eqn]:
    """Return the slices of leaves that the bodies of a call take, and the call on these."""
    is_cond, params = call.primitive.name == "cond", call.params
    which, given = call.invars[: int(is_cond)], call.invars[int(is_cond) :]
    old = params["branches"] if is_cond else [params["jaxpr"]]
    bodies = [_slices_first(closed_of(body), given, numbers, leaves) for body in old]
    whole = {k for k, v in enumerate(given) if isinstance(v, core.Literal) or v not in leaves}
    taken: list[tuple[int, Eqn]] = []  # the number of the input, and its slice in a body
    for body in bodies:
        number = {v: k for k, v in enumerate(body.jaxpr.invars)}
        rows = {id(eqn): eqn for eqn in body.jaxpr.eqns if taken_by(eqn) is not None and eqn.invars[0] in number}
        taken += [(number[eqn.invars[0]], eqn) for eqn in rows.values()]
        others = read_by([eqn for eqn in body.jaxpr.eqns if id(eqn) not in rows], body.jaxpr.outvars)
        whole |= {number[v] for v in others if v in number}
    taken = [(k, eqn) for k, eqn in taken if k not in whole]
    if not taken:
        return [call]
    kept = sorted({*range(len(given))} - {k for k, _ in taken})
    rows = [core.Var(eqn.outvars[0].aval) for _, eqn in taken]
    slices = [eqn.replace(invars=[given[k]], outvars=[row]) for (k, eqn), row in zip(taken, rows, strict=True)]
    new = [_on_rows(body, kept, [eqn for _, eqn in taken]) for body in bodies]
    order, constants = [*kept, *(k for k, _ in taken)], list[Var]()
    params = {**params, "branches": tuple(new)} if is_cond else {**params, "jaxpr": closed_over(new[0])}
    if not is_cond:
        constants = [core.Literal(x, v.aval) for x, v in zip(new[0].consts, new[0].jaxpr.constvars, strict=True)]
    if isinstance(barred := params.get("prevent_cse"), tuple):
        params["prevent_cse"] = (*[False] * len(constants), *(barred[k] for k in order))
    return [*slices, call.replace(invars=[*which, *constants, *(given[k] for k in kept), *rows], params=params)]


def _on_rows(body: Jaxpr, kept: Sequence[int], slices: Sequence[Eqn]) -> Jaxpr:
    """Return a body that gets the results of all these slices as inputs, and does not slice itself."""
    own = [eqn for eqn in body.jaxpr.eqns if not any(eqn is row for row in slices)]
    ours = {eqn.outvars[0] for eqn in body.jaxpr.eqns if eqn.outvars}
    rows = [eqn.outvars[0] if eqn.outvars[0] in ours else core.Var(eqn.outvars[0].aval) for eqn in slices]
    return part_of(body, [*(body.jaxpr.invars[k] for k in kept), *rows], own, body.jaxpr.outvars)


def _slices_first(body: Jaxpr, given: Sequence[Var], numbers: Numbers, leaves: set[Var]) -> Jaxpr:
    """Return the body of a call with static slices of its leaves wherever it takes known rows of them."""
    body = laid_open(body)
    jaxpr = body.jaxpr
    outer = [*zip(jaxpr.invars, given, strict=True)]
    of_leaves = [v for v, atom in outer if not isinstance(atom, core.Literal) and atom in leaves]
    constants = {v: number for v, atom in outer if (number := numbers.of(atom)) is not None}
    constants |= zip(jaxpr.constvars, body.consts, strict=True)
    own = [*of_leaves, *constants]
    own += _made_from(jaxpr.eqns, own)
    found = with_rows_outside(at_known_places(jaxpr.eqns, constants, own), constants, own)
    taker = RowTaker(_made_from(found, [*of_leaves, *constants]), {}, RULES)
    found = slices_of_leaves(found, taker, of_leaves, {})
    return part_of(body, jaxpr.invars, needed(found, jaxpr.outvars, effects=True), jaxpr.outvars)


def _made_from(eqns: Sequence[Eqn], own: Collection[Var]) -> dict[Var, Eqn]:
    """Return the equations of the values that follow from these alone."""
    found, made = {*own}, dict[Var, Eqn]()
    for eqn in eqns:
        if not eqn.effects and found.issuperset(variables(eqn.invars)):
            found.update(eqn.outvars)
            made |= dict.fromkeys(eqn.outvars, eqn)
    return made
