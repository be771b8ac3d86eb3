"""Put an operation that keeps its operand's shape into each construct in which a trace must still see it."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Op = Callable[[Any], Any]


def only_forward(op: Op) -> Op:
    wrapped = jax.custom_vjp(lambda x: op(x))
    wrapped.defvjp(lambda x: (op(x), None), lambda _, g: (g,))
    return wrapped


def only_backward(op: Op) -> Op:
    wrapped = jax.custom_vjp(lambda x: x)
    wrapped.defvjp(lambda x: (x, None), lambda _, g: (op(g),))
    return wrapped


def _in_cond(op: Op) -> Op:
    return lambda x: lax.cond(x.sum() > 0, op, lambda x: x, x)


def _in_loop(op: Op) -> Op:
    return lambda x: lax.fori_loop(0, 2, lambda _, x: op(x), x)


WAYS: dict[str, Callable[[Op], Op]] = {
    "plainly": lambda op: op,
    "in jit": jax.jit,
    "in checkpoint": jax.checkpoint,
    "in cond": _in_cond,
    "in scan": lambda op: lambda x: lax.scan(lambda c, _: (op(c), None), x, None, length=2)[0],
    "in while": lambda op: lambda x: lax.stop_gradient(lax.while_loop(lambda c: c.sum() < 0, op, lax.stop_gradient(x))),
    "in a loop in jit": lambda op: jax.jit(_in_loop(op)),
    "in a loop in cond": lambda op: _in_cond(_in_loop(op)),
    "in F alone": only_forward,
    "in B alone": only_backward,
}
