"""Find derivatives of a user's own, `jax.custom_vjp`, that a pipeline would change: then a function is refused.

    f.defvjp(forward, lambda residuals, g: (g * residuals.scale, new_scale))      new_scale travels as a gradient
    f.defvjp(forward, lambda _, g: (g / (1 + norm(g)),))                          of tied weights: not linear in g

A "gradient" that ignores its cotangent is a state, as the scales of float8 layers are, or a term that is added to the
gradient whatever the loss is. A pipeline scales cotangents by 1/M, by the replicas and by a loss scale, and adds
gradients up: then it is another number, and an optimizer takes the state for a gradient.

What depends on weights alone is computed by each stage that reads it, so each stage's backward gets its own part of the
cotangent. The sum of the results is the gradient only if the backward is linear in the cotangent.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import (
    CALLS,
    OWN_BACKWARD,
    bodies_of,
    bound_with,
    closed_of,
    depending,
    is_float,
    laid_open,
    scan_parts,
)
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.numbers import KEEPS_ZEROS, is_zero
from ipu_jax.core.cutting.trace import FunctionTrace
from ipu_jax.core.cutting.users_code import at_line, name_of

_BODIES: Final = {*CALLS, "scan", "cond"}
_LINEAR: Final = {*KEEPS_ZEROS, "transpose", "reduce_sum", "slice", "rev", "cumsum", "reduce_precision"}
_ADDS: Final = ("add", "sub", "add_any", "concatenate", "pad")
_OF_ONE: Final = ("mul", "dot_general", "conv_general_dilated")
_OF_THE_FIRST: Final = ("div", "gather", "dynamic_slice")
"""Primitives that are linear in all inputs; if the others are zero; in one of them; in the first one."""


def check_cotangents(trace: FunctionTrace) -> None:
    """Raise `ValueError` if a derivative of the user's own ignores its cotangent on the way to a trained weight."""
    if not _has_own(trace.closed.jaxpr):
        return
    wanted = [v for v in trace.params if v not in trace.frozen and is_float(v)]
    seen: set[Any] = set()
    for eqn, flags in _differentiated(trace.closed.jaxpr, wanted):
        about = closed_of(eqn.params[CALLS[eqn.primitive.name]]).jaxpr.debug_info
        signature = (about.func_src_info, *(str(v.aval) for v in eqn.invars), *flags)
        if signature in seen:
            continue
        seen.add(signature)
        ignoring = _ignoring(eqn, flags)
        if ignoring is not None:
            raise ValueError(
                f"the custom_vjp of {_defined(about.func_src_info)} gives its input {ignoring + 1} a gradient that "
                "does not depend on the cotangent, so that micro-batches, replicas and a loss scale would change it: "
                "freeze the leaf, return what it carries as state (state=), or multiply the gradient by the cotangent"
            )


def check_tied(division: Division) -> None:
    """Raise `ValueError` if several stages compute a derivative of the user's own that is not linear."""
    trace, stages = division.trace, dict[int, tuple[Eqn, list[int]]]()
    if not _has_own(trace.closed.jaxpr):
        return
    for s, piece in enumerate(division.pieces):
        for eqn in piece.equations:
            is_own = eqn.primitive.name in OWN_BACKWARD or any(map(_has_own, bodies_of(eqn)))
            if is_own and not trace.differentiated.isdisjoint(eqn.outvars):
                stages.setdefault(id(eqn), (eqn, []))[1].append(s)
    for eqn, of_eqn in stages.values():
        flags = [not isinstance(v, core.Literal) and v in trace.differentiated for v in eqn.invars]
        if len(of_eqn) > 1 and not _is_linear(eqn, flags):
            raise ValueError(
                f"stages {' and '.join(map(str, of_eqn))} compute {name_of(eqn)}{at_line(eqn)}, whose backward is not "
                "linear in the cotangent: each would apply it to its own part of the gradient. Do it to the gradients, "
                "in the optimizer, or to what one stage reads"
            )


def _has_own(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in _BODIES and (eqn.primitive.name in OWN_BACKWARD or any(map(_has_own, bodies_of(eqn))))
        for eqn in jaxpr.eqns
    )


def _defined(source: str) -> str:
    """Return "name (file.py:12)" of jax's "name at /folder/file.py:12"."""
    name, _, place = source.partition(" at ")
    return f"{name} ({os.path.basename(place)})"


def _differentiated(jaxpr: Jaxpr, inputs: Sequence[Var]) -> Iterator[tuple[Eqn, list[bool]]]:
    """Yield each `custom_vjp` that is differentiated, with flags of the inputs that need a gradient."""
    wanted = set(inputs)
    for eqn in jaxpr.eqns:
        flags = [not isinstance(v, core.Literal) and v in wanted for v in eqn.invars]
        if not any(flags) or eqn.primitive.name == "stop_gradient":
            continue
        wanted.update(v for v in eqn.outvars if is_float(v))
        name, params = eqn.primitive.name, eqn.params
        if name in OWN_BACKWARD:
            yield eqn, flags
        elif name == "scan":
            consts, carry = scan_parts(params)
            flags[consts : consts + carry] = [f or any(flags) for f in flags[consts : consts + carry]]
            yield from _in_body(params["jaxpr"], flags)
        elif name == "cond":
            for branch in params["branches"]:
                yield from _in_body(branch, flags[1:])
        elif name in CALLS:
            yield from _in_body(params[CALLS[name]], flags)


def _in_body(body: Jaxpr, flags: Sequence[bool]) -> Iterator[tuple[Eqn, list[bool]]]:
    jaxpr = closed_of(body).jaxpr
    yield from _differentiated(jaxpr, [v for v, f in zip(jaxpr.invars, flags, strict=True) if f and is_float(v)])


def _backward(eqn: Eqn, flags: Sequence[bool]) -> tuple[Jaxpr, list[Var]]:
    """Return the gradients of an equation's inputs with flags, traced, and the cotangents among the inputs."""
    at = [k for k, flag in enumerate(flags) if flag]
    results = [k for k, v in enumerate(eqn.outvars) if is_float(v)]
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    cotangents = [jax.ShapeDtypeStruct(eqn.outvars[k].aval.shape, eqn.outvars[k].aval.dtype) for k in results]

    def gradients(values: list[Value], cotangents: list[Value]) -> Any:
        def fn(*own: Value) -> list[Value]:
            outputs = bound_with(eqn, values, at, own)
            return [outputs[k] for k in results]

        return jax.vjp(fn, *(values[k] for k in at))[1](cotangents)

    jaxpr = laid_open(jax.make_jaxpr(gradients)(given, cotangents), tuple(CALLS)).jaxpr
    return jaxpr, jaxpr.invars[len(given) :]


def _ignoring(eqn: Eqn, flags: Sequence[bool]) -> int | None:
    """Return the number of the first input whose gradient is not zero, and does not depend on the cotangents."""
    jaxpr, cotangents = _backward(eqn, flags)
    dependent, made_by = depending(jaxpr.eqns, cotangents), {v: e for e in jaxpr.eqns for v in e.outvars}
    for k, v in zip([k for k, flag in enumerate(flags) if flag], jaxpr.outvars, strict=True):
        if (isinstance(v, core.Literal) or v not in dependent) and not is_zero(v, made_by):
            return k
    return None


def _is_linear(eqn: Eqn, flags: Sequence[bool]) -> bool:
    """Return whether the gradients of an equation's inputs are linear in its cotangents."""
    jaxpr, cotangents = _backward(eqn, flags)
    dependent, made_by = {*cotangents}, {v: e for e in jaxpr.eqns for v in e.outvars}
    for each in jaxpr.eqns:
        name, own = each.primitive.name, [not isinstance(v, core.Literal) and v in dependent for v in each.invars]
        others = [v for v, is_own in zip(each.invars, own, strict=True) if not is_own]
        rules = {
            **dict.fromkeys(_LINEAR, True),
            **dict.fromkeys(_ADDS, all(is_zero(v, made_by) for v in others)),
            **dict.fromkeys(_OF_ONE, sum(own) == 1),
            **dict.fromkeys(_OF_THE_FIRST, not any(own[1:])),
            "select_n": not any(own[:1]) and all(is_zero(v, made_by) for v in others[1:]),
        }
        if any(own) and not rules.get(name, False):
            return False
        dependent.update(each.outvars if any(own) else ())
    return True
