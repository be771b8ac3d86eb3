"""Split a backward program in two: B computes the gradient of the input, W the gradients of the weights.

    whole    dz = dy * (1 - h * h);   dx = dz @ w.T;   dw = x.T @ dz
    B        dz = dy * (1 - h * h);   dx = dz @ w.T                       weight residuals: dz
    W                                                  dw = x.T @ dz

B contains the equations that dx needs, and W the others. A first stage has no dx. There, W contains the last operation
of each weight's gradient (a product, a reduction, a scatter), and B the operations that lead to it from dy, so that B
and W cost as much as on other IPUs. The values of B that W reads are the *weight residuals*, which B stores. Source: Qi
et al. 2023, arXiv:2401.10241, section 2, where each layer is split by hand. A scan over layers is one equation that
computes both gradients. It is first replaced by two scans. The first stacks the weight residuals of its body, layer by
layer, and the second reads them.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from ipu_jax.base import jaxprs
from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.core.programs._keeping import MOVES, bytes_of, cheapest_to_keep
from ipu_jax.core.programs.prices import Prices

# B computes the body of a checkpoint again, and W reads its values from the weight residuals
_INLINED = (*jaxprs.CHECKPOINTS, *jaxprs.JITS)


def split_backward(
    traced: Jaxpr, num_dx: int, reusable: int, num_dy: int, prices: Prices
) -> tuple[Jaxpr, Jaxpr, list[jax.ShapeDtypeStruct]]:
    """Return B, W and the shapes of the weight residuals.

    Args:
        traced: the whole backward, a closed jaxpr of inputs (..., dy) and outputs (dx, dparams).
        num_dx, num_dy: how many outputs are dx, and how many inputs are dy.
        reusable: how many leading inputs both can read. Values that depend on these alone are computed in both.
        prices: on the chip that runs them.

    Returns:
        B, a closed jaxpr from the same inputs to (dx, weight residuals); W, a closed jaxpr from the inputs without dy
        and the weight residuals to dparams; and the shapes of the weight residuals.
    """
    traced = _with_split_scans(traced, num_dx, num_dy, prices)
    jaxpr = traced.jaxpr
    before_dy = len(jaxpr.invars) - num_dy
    varying = jaxprs.depending(jaxpr.eqns, jaxpr.invars[reusable:])
    eqns_of_b = jaxprs.needed(jaxpr.eqns, _results_of_b(jaxpr, num_dx, num_dy))
    shared = {id(eqn) for eqn in eqns_of_b if varying.intersection(eqn.outvars)}
    weight_residuals, eqns_of_w = _cheapest(
        jaxpr.eqns, shared, jaxpr.outvars[num_dx:], jaxpr.invars[before_dy:], prices
    )
    outputs = [*jaxpr.outvars[:num_dx], *weight_residuals]
    b = jaxprs.part_of(traced, jaxpr.invars, jaxprs.needed(eqns_of_b, outputs), outputs)
    w = jaxprs.part_of(traced, [*jaxpr.invars[:before_dy], *weight_residuals], eqns_of_w, jaxpr.outvars[num_dx:])
    return b, w, [jaxprs.shape_of(v.aval) for v in weight_residuals]


def _cheapest(
    eqns: Sequence[Eqn], of_b: set[int], outvars: Sequence[Var], inputs_of_b: Sequence[Var], prices: Prices
) -> tuple[list[Var], list[Eqn]]:
    """Return the weight residuals, and W's equations, some of which B runs, too.

    Args:
        eqns: the equations of the whole backward.
        of_b: the ids of the equations that B runs.
        outvars: the outputs of W.
        inputs_of_b: inputs that B has and W lacks.
        prices: as for `split_backward`.
    """
    eqns_of_b = [eqn for eqn in eqns if id(eqn) in of_b]
    own = jaxprs.needed([eqn for eqn in eqns if id(eqn) not in of_b], list(outvars))
    available = {var for eqn in eqns_of_b for var in eqn.outvars} | set(inputs_of_b)
    wanted = [v for v in dict.fromkeys(jaxprs.read_by(own, outvars)) if v in available]
    _, kept = cheapest_to_keep(eqns_of_b, {var: bytes_of(var) for var in inputs_of_b}, wanted, prices)
    in_order = [v for v in [*inputs_of_b, *(v for eqn in eqns_of_b for v in eqn.outvars)] if v in kept]
    return in_order, jaxprs.needed([eqn for eqn in eqns if not kept.intersection(eqn.outvars)], list(outvars))


def _results_of_b(jaxpr: Jaxpr, num_dx: int, num_dy: int) -> list[Var]:
    """Return dx, or for a first stage the values that depend on dy and from which W computes the gradients."""
    if num_dx:
        return list(jaxpr.outvars[:num_dx])
    of_dy = jaxprs.depending(jaxpr.eqns, jaxpr.invars[len(jaxpr.invars) - num_dy :])
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found: dict[Var, None] = {}
    waiting, seen = jaxprs.variables(jaxpr.outvars), set()
    while waiting:
        eqn = made_by.get(waiting.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        inputs = [var for var in jaxprs.variables(eqn.invars) if var in of_dy]
        if eqn.primitive.name in MOVES or eqn.primitive.name == "add_any":
            waiting += inputs
        else:
            found.update(dict.fromkeys(inputs))
    return list(found)


def _with_split_scans(closed: Jaxpr, num_dx: int, num_dy: int, prices: Prices) -> Jaxpr:
    """Return the program with two scans in place of each scan that computes values for B's results and other values.

    In a first stage, where B leads from dy to the weights' gradients, a scan over layers is split even if nothing reads
    the gradient in its final carry.
    """
    closed = jaxprs.laid_open(closed, _INLINED)
    results = _results_of_b(closed.jaxpr, num_dx, num_dy)
    read = set(jaxprs.read_by(jaxprs.needed(closed.jaxpr.eqns, results), results))

    def rule(eqn: Eqn, inputs: list[Value]) -> list[Value] | None:
        if eqn.primitive.name != "scan":
            return None
        first = [v in read for v in eqn.outvars]
        if not num_dx and not all(first):
            carried = _handed_on(eqn.params)
            first = [is_read or k in carried for k, is_read in enumerate(first)]
        return _two_scans(eqn.params, inputs, first, prices) if len({*first}) == 2 else None

    if not any(eqn.primitive.name == "scan" for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: jaxprs.evaluated(closed, args, rule))(*closed.in_avals)


def _handed_on(params: dict[str, Any]) -> set[int]:
    """Return the positions in a scan's carry from which its other outputs are computed; mere sums are left out."""
    jaxpr, found = params["jaxpr"].jaxpr, set[int]()
    _, carry_vars, _ = jaxprs.in_scan_parts(params, jaxpr.invars)
    for k, var in enumerate(carry_vars):
        dependent = jaxprs.depending(jaxpr.eqns, [var])
        if any(out in dependent for position, out in enumerate(jaxpr.outvars) if position != k):
            found.add(k)
    return found


def _two_scans(params: dict[str, Any], inputs: list[Value], first: list[bool], prices: Prices) -> list[Value]:
    """Return a scan's outputs, computed by two scans: the first computes the marked outputs, the second the others."""
    body = jaxprs.laid_open(params["jaxpr"], _INLINED)
    jaxpr = body.jaxpr
    consts, init, xs = jaxprs.in_scan_parts(params, inputs)
    const_vars, carry_vars, x_vars = jaxprs.in_scan_parts(params, jaxpr.invars)

    def pick(values: Sequence[Value], which: bool) -> list[Value]:
        return [value for value, is_first in zip(values, first, strict=False) if is_first is which]

    while True:  # a carry that feeds the first scan's outputs belongs to the first scan
        of_first = jaxprs.needed(jaxpr.eqns, pick(jaxpr.outvars, True))
        read = set(jaxprs.read_by(of_first, pick(jaxpr.outvars, True)))
        more = [is_first or (k < len(init) and carry_vars[k] in read) for k, is_first in enumerate(first)]
        if more == first:
            break
        first = more
    ids = {id(eqn) for eqn in of_first}
    rest = pick(jaxpr.outvars, False)
    weight_residuals, of_rest = _cheapest(jaxpr.eqns, ids, rest, pick(carry_vars, True), prices)
    one = jaxprs.part_of(
        body, [*const_vars, *pick(carry_vars, True), *x_vars], of_first, [*pick(jaxpr.outvars, True), *weight_residuals]
    )
    two = jaxprs.part_of(body, [*const_vars, *pick(carry_vars, False), *x_vars, *weight_residuals], of_rest, rest)

    def scan(part: Jaxpr, carry: list[Value], xs: list[Value]) -> list[Value]:
        def step(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
            outputs = core.jaxpr_as_fun(part)(*consts, *carry, *x)
            return outputs[: len(carry)], outputs[len(carry) :]

        how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
        carry, ys = lax.scan(step, carry, xs, **how)
        return [*carry, *ys]

    of_one = scan(one, pick(init, True), xs)
    count = sum(first)
    outputs, others = iter(of_one[:count]), iter(scan(two, pick(init, False), [*xs, *of_one[count:]]))
    return [next(outputs if is_first else others) for is_first in first]
