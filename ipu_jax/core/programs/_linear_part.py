"""Differentiate a program without loops: push tangents through it, and transpose what depends on them.

`jax.vjp` asks each operation anew which of its values the derivative reads, which takes four times as long to trace.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad

from ipu_jax.base import jaxprs
from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Value, Var

Pull = Callable[[list[Value], Sequence[Value]], list[Value]]
"""From residuals and the results' cotangents to the differentiated arguments' cotangents, None for zeros."""


def linearized(
    fn: Function, shapes: Sequence[jax.ShapeDtypeStruct], differentiated: Sequence[bool]
) -> tuple[Jaxpr, list[Var], Pull]:
    """Return a closed jaxpr from arguments to results and residuals, the residuals' variables, and how to pull back.

    Args:
        fn: a function of arrays, which returns a list of floats.
        shapes: of its arguments.
        differentiated: which arguments have a gradient.
    """

    def chosen(args: Sequence[Value]) -> list[Value]:
        return [arg for arg, d in zip(args, differentiated, strict=True) if d]

    def of_chosen(args: Sequence[Value], chosen: Sequence[Value]) -> list[Value]:
        following = iter(chosen)
        return fn(*(next(following) if d else arg for arg, d in zip(args, differentiated, strict=True)))

    def pushed(args: list[Value], tangents: list[Value]) -> tuple[list[Value], list[Value]]:
        return jax.jvp(lambda *moved: of_chosen(args, moved), chosen(args), tangents)

    traced = _without_rules(jax.make_jaxpr(pushed)(shapes, chosen(shapes)))
    jaxpr, count = traced.jaxpr, len(traced.jaxpr.outvars) // 2
    inputs, tangents = jaxpr.invars[: len(shapes)], jaxpr.invars[len(shapes) :]
    results, moved = jaxpr.outvars[:count], jaxpr.outvars[count:]
    linear = jaxprs.depending(jaxpr.eqns, tangents)
    at = [k for k, v in enumerate(moved) if not isinstance(v, core.Literal) and v in linear]
    of_tangents = jaxprs.needed([e for e in jaxpr.eqns if linear.intersection(e.outvars)], [moved[k] for k in at])
    if any(map(jaxprs.bodies_of, of_tangents)) or linear.intersection(jaxprs.variables(results)):
        return _by_vjp(of_chosen, chosen, shapes)  # the rule of a user's function has a loop
    read = dict.fromkeys(v for v in jaxprs.read_by(of_tangents) if v not in linear)
    residuals = [v for v in read if v not in jaxpr.constvars]
    moving = jaxprs.part_of(traced, [*residuals, *tangents], of_tangents, [moved[k] for k in at])
    eqns = [eqn for eqn in jaxpr.eqns if not linear.intersection(eqn.outvars)]
    return jaxprs.part_of(traced, inputs, eqns, [*results, *residuals]), residuals, functools.partial(_pull, moving, at)


def _by_vjp(of_chosen: Function, chosen: Function, shapes: Sequence[Any]) -> tuple[Jaxpr, list[Var], Pull]:
    captured: list[Any] = []

    def forward(*args: Value) -> list[Value]:
        outputs, vjp = jax.vjp(lambda *moved: of_chosen(args, moved), *chosen(args))
        residuals, tree = jax.tree.flatten(vjp)
        captured[:] = [len(outputs), tree]
        return [*outputs, *residuals]

    traced = _without_rules(jax.make_jaxpr(forward)(*shapes))
    count, tree = captured

    def pull(residuals: list[Value], cotangents: Sequence[Value]) -> list[Value]:
        return [*jax.tree.unflatten(tree, residuals)([*map(_whole, cotangents)])]

    return traced, traced.jaxpr.outvars[count:], pull


def _without_rules(closed: Jaxpr) -> Jaxpr:
    """Return a program without rules: one may call functions that have one, too, and none is differentiated again."""
    return jaxprs.laid_open(closed, (*jaxprs.JITS, "custom_jvp_call"))


def _pull(linear: Jaxpr, at: Sequence[int], residuals: list[Value], cotangents: Sequence[Value]) -> list[Value]:
    """Return the cotangents of a linear program's tangents, its last inputs, given all results' cotangents.

    Its outputs are the tangents of the results `at`. Operations on zeros are left out.
    """
    jaxpr = linear.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*linear.consts, *residuals], strict=False))
    found: dict[Var, Value] = {}

    def add(var: Var, cotangent: Value) -> None:
        if cotangent is None or isinstance(cotangent, (ad.Zero, SymbolicZero)) or _is_in(var, known):
            return
        found[var] = ad.add_jaxvals(found[var], cotangent) if var in found else cotangent

    for var, k in zip(jaxpr.outvars, at, strict=True):
        add(var, cotangents[k])
    for eqn in reversed(jaxpr.eqns):
        of_outputs = [found.pop(v, None) for v in eqn.outvars]
        if any(ct is not None for ct in of_outputs):
            for var, cotangent in zip(eqn.invars, _transposed(eqn, known, of_outputs), strict=True):
                add(var, cotangent)
    return [found.get(v) for v in jaxpr.invars[len(residuals) :]]


def _transposed(eqn: Eqn, known: dict[Var, Value], cotangents: list[Value]) -> list[Value]:
    """Return the cotangents of an equation's inputs, which is linear in those that are not known."""
    if eqn.primitive not in ad.primitive_transposes:
        at = [k for k, v in enumerate(eqn.invars) if not _is_in(v, known)]
        values = [known.get(v) if k in at else jaxprs.value_of(v, known) for k, v in enumerate(eqn.invars)]
        shapes = [jaxprs.shape_of(eqn.invars[k].aval) for k in at]
        push = lambda *moved: jaxprs.bound_with(eqn, values, at, moved)
        found = dict(zip(at, jax.linear_transpose(push, *shapes)([*map(_whole, cotangents)]), strict=True))
        return [found.get(k) for k in range(len(eqn.invars))]
    values = [jaxprs.value_of(v, known) if _is_in(v, known) else ad.UndefinedPrimal(v.aval) for v in eqn.invars]
    zeros = [ad.Zero(v.aval) if ct is None else ct for v, ct in zip(eqn.outvars, cotangents, strict=True)]
    with eqn.ctx.manager, jaxprs.named_as(eqn):
        rule = ad.get_primitive_transpose(eqn.primitive)
        return rule(zeros if eqn.primitive.multiple_results else zeros[0], *values, **eqn.params)


def _is_in(var: Var, known: dict[Var, Value]) -> bool:
    return isinstance(var, core.Literal) or var in known


def _whole(cotangent: Value) -> Value:
    aval: Any = getattr(cotangent, "aval", None)
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(cotangent, SymbolicZero) else cotangent
