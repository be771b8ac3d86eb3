"""Call an optimizer's update with the extra arguments that it takes, and refuse optimizers that need anything else.

A training step can pass one extra argument besides gradients, state and weights: `value=`, the loss. It has the
gradients of an update, not of each example.
"""

from typing import Any

import jax
import optax

from ipu_jax.base.annotations import Params, Tree, Value
from ipu_jax.base.checks import in_line

_OF_LOSS_FUNCTIONS = ("value_fn", "grad_fn", "obj_fn")


class MissingArgumentError(ValueError):
    """An optimizer's update needs an argument, or gradients, that a training step cannot give."""


def updated(optimizer: Any, gradients: Params, state: Tree, params: Params, value: Value) -> Tree:
    """Return `(updates, new state)`. Passes the loss as `value=` only to an update that takes it (sam's does not).

    Raises:
        MissingArgumentError: the update calls the loss function itself, or reads gradients per example.
    """
    try:
        try:
            return optax.with_extra_args_support(optimizer).update(gradients, state, params, value=value)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            return optimizer.update(gradients, state, params)
    except (TypeError, ValueError) as error:
        if "have a batch dimension in the 0th axis" in str(error):
            raise MissingArgumentError(
                "optimizer: its update needs the gradients of each example, as optax.contrib.dpsgd does, but a "
                "training step has only their sum: clip them inside the loss function, with a jax.custom_vjp as in "
                "'Gradients per example' of docs/training.md, and add noise by optax.chain(optax.add_noise(...), "
                "optax.sgd(...))"
            ) from error
        needed = next((name for name in _OF_LOSS_FUNCTIONS if name in str(error)), None)
        if needed is None:
            raise
        raise MissingArgumentError(
            f"optimizer: its update needs {needed}=, a function that computes the loss of other weights, but a "
            "training step computes one loss and its gradients per update: use an optimizer without a line search and "
            "without gradients of its own (adamw, lion, muon; of optax.contrib.sam the one without opaque_mode)"
        ) from error


def checked_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Return an optimizer as a `GradientTransformation`, which `optax.MultiSteps` is not.

    Raises:
        ValueError: it is not an optimizer, such as `optax.adam` without its arguments.
        MissingArgumentError: a trace with small test weights shows what `updated` refuses.
    """
    if isinstance(optimizer, optax.MultiSteps):
        several: Any = optimizer.update
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, several)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"optimizer={in_line(optimizer)} is not an optax.GradientTransformation: give optax.sgd(...)")

    def update(params: Params, value: Value) -> Tree:
        return updated(optimizer, params, optimizer.init(params), params, value)

    try:
        matrix, bias, loss = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 2), (3,), ()))
        jax.eval_shape(update, [matrix, bias], loss)  # of unequal rows, which cannot be examples
    except MissingArgumentError:
        raise
    except Exception:
        pass  # perhaps the optimizer needs certain weights: `analyze_update` calls it with the real weights
    return optimizer
