"""Call an optimizer's update with the extra arguments that it takes, and refuse one that needs what a step has not.

A training step has one thing to give beside gradients, state and weights: `value=`, the loss.
"""

from typing import Any

import jax
import optax

_OF_LOSS_FUNCTIONS = ("value_fn", "grad_fn", "obj_fn")


class MissingArgumentError(ValueError):
    """An optimizer's update needs an argument that a training step cannot give."""


def updated(optimizer: Any, gradients: Any, state: Any, params: Any, value: Any) -> Any:
    """Return `(updates, new state)`. An update that does not take the loss as `value=`, such as sam's, is not given it.

    Raises:
        MissingArgumentError: the update calls the loss function itself.
    """
    try:
        try:
            return optax.with_extra_args_support(optimizer).update(gradients, state, params, value=value)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            return optimizer.update(gradients, state, params)
    except (TypeError, ValueError) as error:
        needed = next((name for name in _OF_LOSS_FUNCTIONS if name in str(error)), None)
        if needed is None:
            raise
        raise MissingArgumentError(
            f"optimizer: its update needs {needed}=, a function that computes the loss of other weights, but a "
            "training step computes one loss and its gradients per update: use an optimizer without a line search and "
            "without gradients of its own (adamw, lion, muon; of optax.contrib.sam the one without opaque_mode)"
        ) from error


def check_arguments(optimizer: Any) -> None:
    """Raise `MissingArgumentError` if it shows with any weights that the update calls the loss function itself."""

    def update(params: Any, value: Any) -> Any:
        return updated(optimizer, params, optimizer.init(params), params, value)

    try:
        jax.eval_shape(update, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 2), ())))
    except MissingArgumentError:
        raise
    except Exception:
        return  # it may be an optimizer for certain weights: `analyze_update` calls it with these
