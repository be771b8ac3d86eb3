"""Lay the calls of a program open: one list of operations, each with the line of the user's file that computes it."""

from typing import Any, Final

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CALLS, JITS, closed_of
from ipu_jax.core.cutting.users_code import line_of

INLINED: Final = (*JITS, "closed_call")


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
