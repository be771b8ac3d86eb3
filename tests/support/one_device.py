"""Run modules one after the other on one device, as their own library does, with the keys that stages get.

The tests of all libraries train a body and a head on the same batch.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Pipeline
from ipu_jax.nn import gather_stages

M, ROWS, D = 2, 4, 5
BATCH = {
    "x": np.random.default_rng(0).normal(size=(M, ROWS, D)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(M, ROWS)).astype(np.float32),
}

Apply = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any]]
"""`(params, state, x, microbatch, key)` to `(y, new state)`."""


def keys_of(key: Any, microbatch: int, stages: int) -> list[Any]:
    """Return the keys of a micro-batch on replica 0, by the documented rule."""
    own = jax.random.fold_in(jax.random.fold_in(key, 0), microbatch)
    return [jax.random.fold_in(own, stage) for stage in range(stages)]


def microbatches_of(batch: Any) -> list[Any]:
    return [jax.tree.map(operator.itemgetter(number), batch) for number in range(len(jax.tree.leaves(batch)[0]))]


def value_and_grad(
    modules: Sequence[tuple[str, Apply]],
    loss: Callable[[Any, Any], Any],
    params: dict[str, Any],
    state: dict[str, Any],
    batch: Any,
    key: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the mean loss of all micro-batches, its gradients, and the state after the last micro-batch."""

    def mean_loss(params: Any) -> tuple[Any, Any]:
        now, losses = dict(state), []
        for number, microbatch in enumerate(microbatches_of(batch)):
            x = None
            for (name, apply), own in zip(modules, keys_of(key, number, len(modules)), strict=True):
                x, new = apply(params[name], now.get(name), x, microbatch, own)
                now[name] = jax.lax.stop_gradient(new)  # as the documentation of Stage says
            losses.append(loss(x, microbatch))
        return jnp.mean(jnp.stack(losses)), {name: tree for name, tree in now.items() if name in state}

    (value, new_state), gradients = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(params)
    return value, gradients, new_state


def assert_trees_close(actual: Any, expected: Any) -> None:
    """Compare all leaves of two trees with the same structure, including integers."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def loss_of(y: Any, microbatch: Any) -> jax.Array:
    return jnp.mean((y.sum(-1) - microbatch["y"]) ** 2)


def assert_trains_as(modules: Sequence[tuple[str, Apply]], parts: Any, **options: Any) -> None:
    """Compare a step of a pipeline of the parts with the modules on one device: loss, gradients and new state."""
    stages, params, state = gather_stages(parts)
    pipeline = Pipeline(stages, gradient_accumulation=M, **options)
    key, placed = jax.random.key(5), (pipeline.shard(params), BATCH, pipeline.shard_state(state))
    loss, gradients, new_state = pipeline.value_and_grad(*placed, key)
    expected = value_and_grad(modules, loss_of, params, state, BATCH, key)
    assert_trees_close((loss, pipeline.unshard(gradients), pipeline.unshard(new_state)), expected)
