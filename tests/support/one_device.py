"""What the tests of modules share: a batch, and how results are compared."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

M, ROWS, D = 2, 4, 5
BATCH = {
    "x": np.random.default_rng(0).normal(size=(M, ROWS, D)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(M, ROWS)).astype(np.float32),
}


def microbatches_of(batch: Any) -> list[Any]:
    return [jax.tree.map(operator.itemgetter(number), batch) for number in range(len(jax.tree.leaves(batch)[0]))]


def assert_trees_close(actual: Any, expected: Any) -> None:
    """Compare all leaves of two trees with the same structure, including integers."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def loss_of(y: Any, microbatch: Any) -> jax.Array:
    return jnp.mean((y.sum(-1) - microbatch["y"]) ** 2)
