"""Jit the programs of a pipeline, differentiate its loss by its own gradients, and refuse other derivatives.

The engine computes gradients inside its program. Nothing differentiates through that program: its loops have no reverse
mode, and would keep residuals of every tick. So the loss has a rule of its own. Its derivative along a change of the
weights is the inner product of that change and the engine's gradients. jax transposes it for `jax.grad`, and uses it
directly for `jax.jvp`.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, linear_call, zero_from_primal

from ipu_jax.base.annotations import Function, Tree, Value
from ipu_jax.core.mesh.in_flight import InFlight
from ipu_jax.core.mesh.instances import taken
from ipu_jax.core.pipeline.arguments import count_samples
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.stage import Role
from ipu_jax.core.step_args import StepArgs, given_dims


class Programs:
    """The programs of a pipeline, jitted once each, so that all calls with the same shapes run the same program.

    They take the four arguments of a `StepArgs` as a user gives them, checked. Only a few calls are ever in flight.
    """

    def __init__(self, placed: PlacedStages):
        self._placed, self._window = placed, InFlight()

    def value_and_grad(self, given: StepArgs) -> Tree:
        """Return `(loss with aux, gradients, new state)`."""
        samples = count_samples(given.batch, 2 + given_dims(self._placed.replicas))
        why = (
            "pipeline.value_and_grad cannot be differentiated again: it returns gradients already; use "
            "jax.value_and_grad(pipeline.loss) for a function of the loss"
        )
        return self._bounded(self.update, given, trains=True, not_again=why, updates=1, samples=samples)

    def loss(self, given: StepArgs, role: Role) -> tuple[Tree, Tree, Tree]:
        """Return `(loss, aux, new state)`; the loss is differentiable."""
        return self._losses[role](*given)

    def predict(self, given: StepArgs, *, reuses_state: bool = False) -> tuple[Tree, Tree]:
        """Return `(outputs, new state)`; the buffers of the state may be reused."""
        why = "pipeline.predict and forward cannot be differentiated: compute a loss instead, and use pipeline.loss"
        return self._bounded(self._predictions[reuses_state], given, trains=False, not_again=why)

    def lower_prediction(self, given: StepArgs, *, reuses_state: bool = False) -> Any:
        """Return the program of `predict`, lowered."""
        program = self._predictions[reuses_state]
        return self._placed.chosen(program, given, trains=False, runs=False).lowered(program, given)

    def _bounded(
        self,
        program: Any,
        given: StepArgs,
        *,
        trains: bool,
        not_again: str | None = None,
        updates: int = 0,
        samples: int = 0,
    ) -> Any:
        """Run a program. If something differentiates through it, raise `ValueError(not_again)`."""
        run = functools.partial(program, self._placed.chosen(program, given, trains=trains))
        given = given._replace(batch=taken(given.batch))
        self._window.begin(given)
        result = (run if not_again is None else _refusing_derivatives(run, not_again))(*given)
        # otherwise a loop that never waits would exhaust the threads of the CPU backend
        self._window.admit(result, updates=updates, samples=samples)
        return result

    @functools.cached_property
    def update(self) -> Any:
        """Return `(placed stages, *arguments) -> (loss with aux, gradients, new state)`, as `jax.jit` made it."""

        @functools.partial(jax.jit, static_argnums=0)
        def update(placed: PlacedStages, *given: Tree) -> Tree:
            results = placed.run(StepArgs(*given), role="training", backward=True, reduction=placed.options.reduction)
            return placed.loss_with_aux(results.loss, results.aux), results.gradients, results.state

        return update

    @functools.cached_property
    def _losses(self) -> dict[Role, Function]:
        def of(role: Role) -> Function:
            @functools.partial(jax.jit, static_argnums=0)
            def alone(placed: PlacedStages, *given: Tree) -> Tree:
                results = placed.run(StepArgs(*given), role=role, backward=False)
                return results.loss, results.aux, results.state

            @functools.partial(jax.jit, static_argnums=0)
            def with_gradients(placed: PlacedStages, *given: Tree) -> Tree:
                results = placed.run(StepArgs(*given), role=role, backward=True)
                return results.loss, results.aux, results.gradients, results.state

            trains = role == "training"
            return _differentiable_loss(
                lambda *given: self._bounded(alone, StepArgs(*given), trains=False),
                lambda *given: self._bounded(with_gradients, StepArgs(*given), trains=trains, updates=1),
            )

        return {"training": of("training"), "evaluation": of("evaluation")}

    @functools.cached_property
    def _predictions(self) -> dict[bool, Any]:
        def predict(placed: PlacedStages, *given: Tree) -> Tree:
            results = placed.run(StepArgs(*given), role="prediction", backward=False)
            return results.outputs, results.state

        state = 1 + StepArgs._fields.index("state")
        return {
            reuses_state: jax.jit(predict, static_argnums=0, donate_argnums=(state,) * reuses_state)
            for reuses_state in (False, True)
        }


def _refusing_derivatives(program: Function, why: str) -> Function:
    """Return a program that raises `ValueError(why)` if anything differentiates through it."""

    def refuse(primals: Tree, tangents: Tree) -> NoReturn:
        raise ValueError(why)

    def call(*args: Tree) -> Tree:
        # arguments without tracers are not differentiated, and calls are faster without the rule
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return program(*args)
        guarded = jax.custom_jvp(program)
        guarded.defjvp(refuse)
        return guarded(*args)

    return call


def _differentiable_loss(
    run: Callable[..., tuple[Value, Tree, Tree]], run_with_gradients: Callable[..., tuple[Value, Tree, Tree, Tree]]
) -> Callable[..., tuple[Value, Tree, Tree]]:
    """Return a function like `run` that is differentiable with respect to the weights.

    Args:
        run: `(params, batch, state, key) -> (loss, aux, new state)`, forward only.
        run_with_gradients: the same function with gradients, `-> (loss, aux, gradients of the loss, new state)`.

    No gradient flows through the new state. A gradient through aux, or with respect to batch, state or key, is refused.
    """
    with_gradients = _refusing_derivatives(
        run_with_gradients,
        "pipeline.loss has no second derivatives: its gradients are computed inside one program, by jax.vjp of each "
        "stage; differentiate the model outside of a Pipeline for them",
    )
    loss = jax.custom_jvp(lambda *given: run(*given))

    def rule(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
        along_params, *others = tangents
        for name, tangent in zip(StepArgs._fields[1:], others, strict=True):
            if any(type(leaf) is not SymbolicZero for leaf in jax.tree.leaves(tangent)):
                raise ValueError(
                    f"pipeline.loss has no derivative by {name}, only by params: use jax.lax.stop_gradient({name}), or "
                    "make it a weight of the first stage"
                )
        value, aux, gradients, new_state = with_gradients(*primals)
        terms = [
            jnp.vdot(gradient.astype(value.dtype), tangent.astype(value.dtype))
            for gradient, tangent in zip(jax.tree.leaves(gradients), jax.tree.leaves(along_params), strict=True)
            if type(tangent) is not SymbolicZero and jnp.issubdtype(gradient.dtype, jnp.floating)
        ]
        along = sum(terms, jnp.zeros((), value.dtype))
        results = value, aux, new_state
        return results, (along, _without_gradient(aux, along), zero_from_primal(new_state, symbolic_zeros=True))

    loss.defjvp(rule, symbolic_zeros=True)
    return loss


def _without_gradient(aux: Tree, along: Tree) -> Tree:
    """Return zero tangents of aux that raise a `ValueError` if a gradient flows back through them."""

    def refuse(_: object, cotangents: Tree) -> NoReturn:
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
