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

from ipu_jax.base.annotations import Eqn, Function, Value, Var
from ipu_jax.base.jaxprs import variables
from ipu_jax.core.cutting.counted_loops import over_rows
from ipu_jax.core.cutting.numbers import Numbers
from ipu_jax.core.cutting.rows import dim_of_update, equations, row_of_gather, rows_at

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
