"""Count the floating-point operations of F and B of each equation, to balance stages before they exist.

B computes the gradient of each differentiable operand. For a product or a convolution each of them takes as much as F;
for other operations, all of them together do. So `x @ w` counts 3 times its F, and `x @ constant` 2 times.
A block under `jax.checkpoint` counts its F once more.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from ipu_jax.base.jaxprs import CHECKPOINTS, closed_of, scan_parts
from ipu_jax.core.programs.cost import equation_flops

_PRODUCTS = ("dot_general", "conv_general_dilated")
_CALLS = (*CHECKPOINTS, "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def work_of(eqn: Any, differentiable: Sequence[bool]) -> float:
    """Return the FLOPs of F and B of an equation.

    Args:
        eqn: the equation.
        differentiable: per input, whether its gradient is wanted.
    """
    forward, backward = _forward_and_backward(eqn, differentiable)
    return forward + backward


def _forward_and_backward(eqn: Any, differentiable: Sequence[bool]) -> tuple[float, float]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry = scan_parts(params)
        flags, body = list(differentiable), closed_of(params["jaxpr"])
        # what a later iteration differentiates, an earlier one does, too
        flags[consts : consts + carry] = [f or any(flags) for f in flags[consts : consts + carry]]
        forward, backward = _of_body(body, flags)
        return params["length"] * forward, params["length"] * backward
    if name == "cond":
        return max(_of_body(closed_of(branch), differentiable[1:]) for branch in params["branches"])
    body = next((params[key] for key in ("call_jaxpr", "jaxpr") if key in params), None) if name in _CALLS else None
    if body is not None:
        forward, backward = _of_body(closed_of(body), differentiable)
        again = forward if name in CHECKPOINTS and backward else 0
        return forward, backward + again
    forward = float(equation_flops(eqn))
    wanted = sum(differentiable)
    return forward, forward * (wanted if name in _PRODUCTS else min(wanted, 1))


def _of_body(closed: Any, differentiable: Sequence[bool]) -> tuple[float, float]:
    jaxpr = closed.jaxpr
    wanted = {v for v, f in zip(jaxpr.invars, differentiable, strict=True) if f}
    forward = backward = 0.0
    for eqn in jaxpr.eqns:
        flags = [not isinstance(v, core.Literal) and v in wanted for v in eqn.invars]
        one, other = _forward_and_backward(eqn, flags)
        forward, backward = forward + one, backward + other
        if any(flags):
            wanted.update(v for v in eqn.outvars if is_float(v))
    return forward, backward


def is_float(var: Any) -> bool:
    """Return whether a variable has a float dtype, so that it can have a gradient."""
    return hasattr(var.aval, "dtype") and _is_inexact(var.aval.dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
