"""A loss function as it is, or as a pipeline of one stage that computes it: both kinds of model must train alike."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
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


def assert_same_bits(found: Any, expected: Any) -> None:
    """Assert that trees have the same leaves, in dtype and in every bit, keys as well."""

    def as_array(leaf: Any) -> np.ndarray:
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    for f, e in zip(*(map(as_array, jax.tree.leaves(tree)) for tree in (found, expected)), strict=True):
        assert (f.dtype, f.shape, f.tobytes()) == (e.dtype, e.shape, e.tobytes())
