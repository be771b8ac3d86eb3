"""Find how the values of rings are split over further mesh axes, as far as the stages' constraints say so.

    h = tanh(x @ w["up"])                               unknown: XLA decides
    h = with_sharding_constraint(h, P(None, "tensor"))  split over "tensor" along dim 1
    y = with_sharding_constraint(x + h @ w["down"], P())  whole on each device of an IPU
    z = 2 * (y - mb["y"])                               whole, too: computed element by element from whole values

The stash splits such a whole value when it is stored. Only XLA's propagation, which runs later, knows how other values
are split: to store them in another way would cost an exchange.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CALLS, ELEMENTWISE, closed_of, in_scan_parts, variables
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import OWN_AXES, names_in, parts

Split = tuple[tuple[str, ...], ...]
"""Per dim, the further axes over which a value is split."""


class Stored(NamedTuple):
    """Say how rows of a buffer come, how they are split where they are stored, and what a device stores of a row."""

    given: Split
    split: Split
    held: tuple[int, ...]


_State = Split | None
"""A value's split, None if it is unknown, or `_ANY`."""

_ANY: Final[Split] = (("",),)
"""Stands for a weight, a part of the batch or a constant, which is taken to fit any value that it is combined with."""

_ALIKE = {*ELEMENTWISE, "name", "reshard"}
_MOVES = ("reshape", "transpose", "squeeze", "expand_dims")


def stated_splits(plan: Plan) -> dict[tuple[str, int], list[Split | None]]:
    """Return the splits of each ring's values; None where no constraint says one. For the keys see `Stash`."""

    def of_forward(i: int, x: Sequence[_State]) -> tuple[list[_State], list[_State]]:
        program, closed = plan.programs[i], plan.programs[i].jaxprs["F"]
        before = sum(len(plan.params.group(name).leaves) for name in plan.segments[i].groups)
        after = len(closed.in_avals) - before - len(x)
        found = _outputs(closed.jaxpr, [*[_ANY] * before, *x, *[_ANY] * after])
        return found[: len(jax.tree.leaves(program.y))], found[len(jax.tree.leaves(program.results)) :]

    ys: list[list[_State]] = []
    for i in range(len(plan.segments)):
        ys.append(of_forward(i, ys[-1] if i else [])[0])
    found: dict[tuple[str, int], list[_State]] = {}
    for c, members in enumerate(plan.classes):
        program = plan.programs[members[0]]
        # like segments have one program, and so their messages are split alike, even if some senders do not say how
        x, y = (
            [_one_of(of) for of in zip(*(ys[i] for i in of_all), strict=True)]
            for of_all in ([i - 1 for i in members if i], members)
        )
        is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(program.y)]
        dy = [split for split, has_dy in zip(y, is_float, strict=True) if has_dy]
        stash = of_forward(members[0], x)[1]
        found |= {("x", c): x, ("dy", c): dy, ("stash", c): stash}
        if count := len(program.weight_residuals):
            closed = program.jaxprs["B"]
            given = [*[_ANY] * (len(closed.in_avals) - len(stash) - len(dy)), *stash, *dy]
            found["weight", c] = _outputs(closed.jaxpr, given)[-count:]
    return {key: [None if state == _ANY else state for state in states] for key, states in found.items()}


def stored_further(
    splits: Collection[Split | None], shape: Sequence[int], axes: Mapping[str, int], *, copies: bool
) -> Stored | None:
    """Return how to store the rows of a buffer, or None if they are stored as they come.

    They are split over all axes: over the missing ones along the first dim that these divide.

    Args:
        splits: of the rows; they must be known and the same.
        shape: of the buffer; its first dim counts the rows.
        axes: the sizes of the further axes.
        copies: whether gathering takes bytes that reading a whole row does not: on chips a product reads the row where
            it lies. A short buffer then saves less than the gathered row and the part of it take.

    >>> stored_further([((), ())], (4, 6, 8), {"tensor": 2}, copies=True).split
    (('tensor',), ())
    >>> stored_further([((), ())], (3, 6, 8), {"tensor": 2}, copies=True)
    >>> stored_further([((), ("context",))], (2, 5, 8), {"context": 2, "tensor": 2}, copies=False)
    Stored(given=((), ('context',)), split=((), ('context', 'tensor')), held=(5, 2))
    """
    given, *others = splits
    if others or given is None:
        return None
    missing = tuple(axis for axis, size in axes.items() if size > 1 and not any(axis in names for names in given))
    over = lambda names: parts(axes, PartitionSpec(names))
    (rows, *row), more = shape, over(missing)
    if more == 1 or (copies and rows * (more - 1) <= more + 1):
        return None
    for dim, size in enumerate(row):
        if size % over((*given[dim], *missing)) == 0:
            split = (*given[:dim], (*given[dim], *missing), *given[dim + 1 :])
            held = tuple(size // over(names) for size, names in zip(row, split, strict=True))
            return Stored(given, split, held)
    return None


def constrained(array: Value, split: Split) -> Value:
    """Return an array that is split so."""
    return lax.with_sharding_constraint(array, PartitionSpec(*split))


def _one_of(states: Sequence[_State]) -> _State:
    """Return the split that all say who say one."""
    said = {state for state in states if state not in (_ANY, None)}
    return said.pop() if len(said) == 1 else None


def _outputs(jaxpr: Jaxpr, states: Sequence[_State]) -> list[_State]:
    """Return the states of an open jaxpr's outputs, given its inputs' states."""
    known: dict[Var, _State] = dict(zip(jaxpr.invars, states, strict=True))

    def of(atoms: Sequence[Var]) -> list[_State]:
        return [known.get(atom, _ANY) if variables([atom]) else _ANY for atom in atoms]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, of(eqn.invars)), strict=True))
    return of(jaxpr.outvars)


def _results(eqn: Eqn, states: list[_State]) -> list[_State]:
    name, params = eqn.primitive.name, eqn.params
    if name == "sharding_constraint" and not params["unconstrained_dims"]:
        spec = params["sharding"].spec
        said = [tuple(axis for axis in names_in(entry) if axis not in OWN_AXES) for entry in spec]
        return [(*said, *[()] * (eqn.outvars[0].aval.ndim - len(said)))]
    if name in CALLS and len((body := closed_of(params[CALLS[name]])).in_avals) == len(states):
        return _outputs(body.jaxpr, states)
    if name == "scan":
        return _of_scan(params, states)
    if name == "optimization_barrier":
        return states
    if name in ("broadcast_in_dim", "iota") or (name in _MOVES and states == [_ANY]):
        return [_ANY]
    if name in _MOVES and states[0] is not None and not any(states[0]):
        return [((),) * eqn.outvars[0].aval.ndim]
    if name in _ALIKE:
        shape = eqn.outvars[0].aval.shape
        return [_joined([state for v, state in zip(eqn.invars, states, strict=True) if v.aval.shape == shape])]
    return [None] * len(eqn.outvars)


def _joined(states: Sequence[_State]) -> _State:
    """Return the state of a value that is computed element by element from values in these states."""
    others = {state for state in states if state != _ANY}
    return _ANY if not others else others.pop() if len(others) == 1 else None


def _of_scan(params: dict[str, Any], states: list[_State]) -> list[_State]:
    stacked = lambda state: state if state in (_ANY, None) else ((), *state)
    row = lambda state: state if state in (_ANY, None) else None if state[0] else state[1:]
    consts, carry, xs = in_scan_parts(params, states)
    while True:
        results = _outputs(params["jaxpr"].jaxpr, [*consts, *carry, *map(row, xs)])
        after = [_joined(both) for both in zip(carry, results, strict=False)]
        if after == carry:
            return [*carry, *map(stacked, results[len(carry) :])]
        carry = after
