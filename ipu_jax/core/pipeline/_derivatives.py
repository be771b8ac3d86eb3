"""Differentiate the loss by means of its own gradients, and refuse other derivatives with an explanation.

The engine computes gradients inside its program. Nothing differentiates through that program: its loops have no reverse
mode, and would keep residuals of every tick. So the loss has a rule of its own. Its derivative along a change of the
weights is the inner product of that change and the engine's gradients. jax transposes it for `jax.grad`, and uses it
directly for `jax.jvp`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, linear_call, zero_from_primal

ARGUMENTS = ("params", "batch", "state", "key")


def refusing_derivatives(program: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Return a program that raises `ValueError(why)` if anything differentiates through it."""
    guarded = jax.custom_jvp(program)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise ValueError(why)

    def call(*args: Any) -> Any:
        # arguments without tracers are not differentiated, and calls are faster without the rule
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return (guarded if is_traced else program)(*args)

    return call


def differentiable_loss(
    run: Callable[..., tuple[Any, Any, Any]], run_with_gradients: Callable[..., tuple[Any, Any, Any, Any]]
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function like `run` that is differentiable with respect to `params`.

    Args:
        run: `(params, batch, state, key) -> (loss, aux, new state)`, forward only.
        run_with_gradients: the same function with gradients, `-> (loss, aux, gradients of the loss, new state)`.

    No gradient flows through the new state. A gradient through aux, or with respect to batch, state or key, is refused.
    """
    with_gradients = refusing_derivatives(
        run_with_gradients,
        "pipeline.loss has no second derivatives: its gradients are computed inside one program, by jax.vjp of each "
        "stage; differentiate the model outside of a Pipeline for them",
    )
    loss = jax.custom_jvp(lambda *args: run(*args))

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        for name, tangent in zip(ARGUMENTS[1:], tangents[1:], strict=True):
            if any(type(leaf) is not SymbolicZero for leaf in jax.tree.leaves(tangent)):
                raise ValueError(
                    f"pipeline.loss has no derivative by {name}, only by params: use jax.lax.stop_gradient({name}), or "
                    "make it a weight of the first stage"
                )
        value, aux, gradients, new_state = with_gradients(*primals)
        terms = [
            jnp.vdot(gradient.astype(value.dtype), tangent.astype(value.dtype))
            for gradient, tangent in zip(jax.tree.leaves(gradients), jax.tree.leaves(tangents[0]), strict=True)
            if type(tangent) is not SymbolicZero and jnp.issubdtype(gradient.dtype, jnp.floating)
        ]
        along = sum(terms, jnp.zeros((), value.dtype))
        results = value, aux, new_state
        return results, (along, _without_gradient(aux, along), zero_from_primal(new_state, symbolic_zeros=True))

    loss.defjvp(rule, symbolic_zeros=True)
    return loss


def _without_gradient(aux: Any, along: Any) -> Any:
    """Return zero tangents of aux that raise a `ValueError` if a gradient flows back through them."""

    def refuse(_: Any, cotangents: Any) -> NoReturn:
        raise ValueError(
            "no gradient flows through aux, but the function that is differentiated uses it: add such terms to the "
            "loss inside the last stage, or use jax.lax.stop_gradient(aux)"
        )

    leaves, treedef = jax.tree.flatten(aux)
    zeros = [zero_from_primal(leaf, symbolic_zeros=True) for leaf in leaves]
    floating = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if floating:
        shapes = [(leaves[k].shape, leaves[k].dtype) for k in floating]
        refused = linear_call(lambda _, __: [jnp.zeros(*shape) for shape in shapes], refuse, (), along)
        for k, zero in zip(floating, refused, strict=True):
            zeros[k] = zero
    return jax.tree.unflatten(treedef, zeros)
