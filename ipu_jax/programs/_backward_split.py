"""Split a backward program in two: B computes the gradient of the input, W the gradients of the weights.

    whole    dz = dy * (1 - h * h);   dx = dz @ w.T;   dw = x.T @ dz
    B        dz = dy * (1 - h * h);   dx = dz @ w.T                       weight residuals: dz
    W                                                  dw = x.T @ dz

B has the equations that dx needs, W the others. The values of B that W reads are the *weight residuals*, which B
stores. Source: Qi et al. 2023, arXiv:2401.10241, section 2, where each layer is split by hand. A scan over layers is
one equation that computes both gradients. It is first replaced by two scans; the first stacks the weight residuals of
its body, layer by layer, and the second reads them.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ipu_jax._jaxprs import CHECKPOINTS, JITS, depending, evaluated, laid_open, needed, scan_parts

# B computes a checkpoint's body again, and W finds the values among the weight residuals
_INLINED = (*CHECKPOINTS, *JITS)


def split_backward(traced: Any, num_dx: int, reusable: int, num_dy: int) -> tuple[Any, Any, list[jax.ShapeDtypeStruct]]:
    """Return B, W and the shapes of the weight residuals.

    Args:
        traced: the whole backward, a closed jaxpr of inputs (..., dy) and outputs (dx, dparams).
        num_dx, num_dy: how many of them are dx, and dy.
        again: how many of the first inputs both may read. What depends on these alone is computed in both, not kept.

    Returns:
        B, a closed jaxpr from the same inputs to (dx, weight residuals); W, one from the inputs without dy, and the
        weight residuals, to dparams; and the weight residuals' shapes.
    """
    traced = _with_split_scans(traced, num_dx)
    jaxpr = traced.jaxpr
    dy_vars = jaxpr.invars[len(jaxpr.invars) - num_dy :]
    varying = depending(jaxpr.eqns, jaxpr.invars[reusable:])
    eqns_of_b = needed(jaxpr.eqns, jaxpr.outvars[:num_dx])
    shared = {id(eqn) for eqn in eqns_of_b if varying.intersection(eqn.outvars)}
    eqns_of_w = needed([eqn for eqn in jaxpr.eqns if id(eqn) not in shared], jaxpr.outvars[num_dx:])
    available = {var for eqn in jaxpr.eqns if id(eqn) in shared for var in eqn.outvars} | set(dy_vars)
    weight_residuals = _used(eqns_of_w, jaxpr.outvars[num_dx:], available)
    b = _part(traced, jaxpr.invars, eqns_of_b, [*jaxpr.outvars[:num_dx], *weight_residuals])
    w = _part(
        traced, [*jaxpr.invars[: len(jaxpr.invars) - num_dy], *weight_residuals], eqns_of_w, jaxpr.outvars[num_dx:]
    )
    return b, w, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in weight_residuals]


def _used(eqns: list[Any], outvars: Sequence[Any], available: set[Any]) -> list[Any]:
    """Return the variables of `available` that the equations or the outputs read, each once, in order."""
    used = [v for eqn in eqns for v in eqn.invars] + list(outvars)
    return list(dict.fromkeys(v for v in used if not isinstance(v, core.Literal) and v in available))


def _part(closed: Any, invars: list[Any], eqns: list[Any], outvars: list[Any]) -> Any:
    debug = closed.jaxpr.debug_info.with_unknown_names()
    return core.ClosedJaxpr(
        closed.jaxpr.replace(invars=invars, eqns=eqns, outvars=outvars, debug_info=debug), closed.consts
    )


def _with_split_scans(closed: Any, num_dx: int) -> Any:
    """Return the same program, with two scans for each one that computes both values that dx needs and others."""
    closed = laid_open(closed, _INLINED)
    read = _read(needed(closed.jaxpr.eqns, closed.jaxpr.outvars[:num_dx]), closed.jaxpr.outvars[:num_dx])

    def rule(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        first = [v in read for v in eqn.outvars]
        return _two_scans(eqn.params, inputs, first) if eqn.primitive.name == "scan" and len({*first}) == 2 else None

    if not any(eqn.primitive.name == "scan" for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: evaluated(closed, args, rule))(*closed.in_avals)


def _read(eqns: list[Any], outvars: Sequence[Any]) -> set[Any]:
    found = [v for eqn in eqns for v in eqn.invars] + list(outvars)
    return {v for v in found if not isinstance(v, core.Literal)}


def _two_scans(params: dict[str, Any], inputs: list[Any], first: list[bool]) -> list[Any]:
    """Return a scan's outputs, computed by two scans: the first computes the marked outputs, the second the others."""
    body = laid_open(params["jaxpr"], _INLINED)
    jaxpr = body.jaxpr
    num_consts, num_carry = scan_parts(params)
    xs_from = num_consts + num_carry
    consts, init, xs = inputs[:num_consts], inputs[num_consts:xs_from], inputs[xs_from:]
    const_vars, carry_vars, x_vars = jaxpr.invars[:num_consts], jaxpr.invars[num_consts:xs_from], jaxpr.invars[xs_from:]

    def pick(values: Sequence[Any], which: bool) -> list[Any]:
        return [value for value, is_first in zip(values, first, strict=False) if is_first is which]

    while True:  # a carry that feeds the first scan's outputs belongs to the first scan
        of_first = needed(jaxpr.eqns, pick(jaxpr.outvars, True))
        read = _read(of_first, pick(jaxpr.outvars, True))
        more = [is_first or (k < len(init) and carry_vars[k] in read) for k, is_first in enumerate(first)]
        if more == first:
            break
        first = more
    ids = {id(eqn) for eqn in of_first}
    rest = pick(jaxpr.outvars, False)
    of_rest = needed([eqn for eqn in jaxpr.eqns if id(eqn) not in ids], rest)
    available = {var for eqn in of_first for var in eqn.outvars} | set(pick(carry_vars, True))
    weight_residuals = _used(of_rest, rest, available)
    one = _part(
        body, [*const_vars, *pick(carry_vars, True), *x_vars], of_first, [*pick(jaxpr.outvars, True), *weight_residuals]
    )
    two = _part(body, [*const_vars, *pick(carry_vars, False), *x_vars, *weight_residuals], of_rest, rest)

    def scan(part: Any, carry: list[Any], xs: list[Any]) -> list[Any]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = core.jaxpr_as_fun(part)(*consts, *carry, *x)
            return outputs[: len(carry)], outputs[len(carry) :]

        how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
        carry, ys = lax.scan(step, carry, xs, **how)
        return [*carry, *ys]

    of_one = scan(one, pick(init, True), xs)
    count = sum(first)
    outputs, others = iter(of_one[:count]), iter(scan(two, pick(init, False), [*xs, *of_one[count:]]))
    return [next(outputs if is_first else others) for is_first in first]
