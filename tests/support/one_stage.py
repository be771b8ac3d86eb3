"""A loss function as it is, or as a pipeline of one stage that computes it: both kinds of model must train alike."""

from collections.abc import Callable
from typing import Any

import pytest

from ipu_jax import Pipeline, Stage

KINDS = pytest.mark.parametrize("kind", ["function", "pipeline"])


def model_of(kind: str, loss_fn: Callable[[Any, Any], Any], **options: Any) -> Any:
    """Return what `make_train_step` takes, whose weights are {"p": what `loss_fn` takes}.

    The options are the pipeline's. A function has none: say them in `TrainOptions` as well.
    """
    if kind == "function":
        return lambda params, microbatch: loss_fn(params["p"], microbatch)
    return Pipeline([Stage(lambda p, x, microbatch: loss_fn(p, microbatch), params="p")], **options)
