"""Lay the calls of a program open: one list of operations, each with the line of the user's file that computes it."""

from collections.abc import Callable
from typing import Any, Final

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CALLS, CHECKPOINTS, JITS, closed_of, how_of
from ipu_jax.core.cutting.everywhere import holds_everywhere, is_everywhere, under_checkpoint
from ipu_jax.core.cutting.users_code import line_of
from ipu_jax.core.programs.cost import equation_flops

INLINED: Final = (*JITS, "closed_call")
_MUCH: Final = 0.2
"""The part of all FLOPs from which a `jax.checkpoint` is opened."""


def inlined(
    jaxpr: Jaxpr, env: dict[Var, Var], call: Any, operations: list[Eqn], constants: dict[Var, Value]
) -> list[Var]:
    """Append a jaxpr's equations to `operations`, with variables of their own, and return its results.

    They have the line of the call, whose `source_info` is given, where it is not the user's function that is called.
    """
    is_users = call is None or any(map(line_of, jaxpr.eqns[:1]))

    def atom(v: Var) -> Var:
        return v if isinstance(v, core.Literal) else env.get(v, v)

    for eqn in jaxpr.eqns:
        inputs, info = [atom(v) for v in eqn.invars], eqn.source_info
        if call is not None:
            traceback = info.traceback if is_users else call.traceback
            info = info.replace(name_stack=call.name_stack + info.name_stack, traceback=traceback)
        if eqn.primitive.name in INLINED:
            body = closed_of(eqn.params[CALLS[eqn.primitive.name]])
            inner = dict(zip(body.jaxpr.invars, inputs, strict=True))
            for var, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                inner[var] = core.Var(var.aval)
                constants[inner[var]] = value
            outputs = inlined(body.jaxpr, inner, info, operations, constants)
        elif call is None:  # its variables are its own already
            outputs = eqn.outvars
            operations.append(eqn.replace(invars=inputs) if inputs != eqn.invars else eqn)
        else:
            outputs = [core.Var(v.aval) for v in eqn.outvars]
            operations.append(eqn.replace(invars=inputs, outvars=outputs, source_info=info))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [atom(v) for v in jaxpr.outvars]


def with_checkpoints_open(
    operations: list[Eqn], constants: dict[Var, Value], opened: dict[Var, Eqn]
) -> tuple[list[Eqn], Callable[[Var], Var]]:
    """Inline each `jax.checkpoint` that is around much of the work, or around an operation on all IPUs.

    Args:
        operations: the operations of a function, in order.
        constants: gets the values of the constants of inlined calls.
        opened: gets, per variable that an inlined operation computes, the checkpoint that was around it. An operation
            on all IPUs keeps the checkpoint itself.

    Returns:
        The operations, and a function that returns the new variable of a result.
    """
    renamed: dict[Var, Var] = {}

    def named(v: Var) -> Var:
        return v if isinstance(v, core.Literal) else renamed.get(v, v)

    if not any(op.primitive.name in CHECKPOINTS for op in operations):
        return operations, named
    found, flops = list[Eqn](), [equation_flops(op) for op in operations]
    for op, own in zip(operations, flops, strict=True):
        inputs = list(map(named, op.invars))
        if op.primitive.name not in CHECKPOINTS or not (own >= _MUCH * sum(flops) or holds_everywhere(op)):
            found.append(op.replace(invars=inputs))
            continue
        body, inner = closed_of(op.params["jaxpr"]), list[Eqn]()
        env = dict(zip(body.jaxpr.invars, inputs, strict=True))
        renamed |= zip(op.outvars, inlined(body.jaxpr, env, op.source_info, inner, constants), strict=True)
        opened |= {v: op for eqn in inner if not is_everywhere(eqn) for v in eqn.outvars}
        found += [under_checkpoint(eqn, how_of(op)) if is_everywhere(eqn) else eqn for eqn in inner]
    if not any(op.primitive.name in CHECKPOINTS and holds_everywhere(op) for op in found):
        return found, named
    found, named_inside = with_checkpoints_open(found, constants, opened)
    return found, lambda v: named_inside(named(v))
