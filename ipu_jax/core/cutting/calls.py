"""Take rows of leaves outside of calls that stay whole, so that a stage needs the rows alone.

checkpoint(lambda x: x @ w[3])(x)               becomes      checkpoint(lambda x, row: x @ row)(x, w[3])
cond(p, lambda x: x @ w[3], lambda x: x, x)     becomes      cond(p, lambda x, row: x @ row, lambda x, row: x, x, w[3])
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CHECKPOINTS, closed_of, closed_over, laid_open, needed, part_of, read_by, variables
from ipu_jax.core.cutting.known_places import at_known_places
from ipu_jax.core.cutting.numbers import Numbers
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import RowTaker, slices_of_leaves, taken_by

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
