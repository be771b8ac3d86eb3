"""Train on whole weights with plain optax, on the dense twin of a model of `dense.chain`, without our library."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support.dense import Model, chain, largest_relative_error


def batches_of(model: Model, steps: int) -> Any:
    """Return the batches of all steps, stacked: leaves are (steps, [replicas,] M, ...)."""
    lead = 1 if model.replicas == 1 else 2
    rolled = [jax.tree.map(lambda leaf, i=i: jnp.roll(leaf, i, axis=lead), model.batch) for i in range(steps)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rolled)


def train_dense(model: Model, optimizer: Any, steps: int) -> tuple[Any, Any, list[float]]:
    """Return whole weights, optax's state and the losses after `steps` updates."""

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = dataclasses.replace(model, params=params, batch=batch).twin()
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, losses = model.params, jax.jit(optimizer.init)(model.params), []
    batches = batches_of(model, steps)
    for i in range(steps):
        params, state, loss = update(params, state, jax.tree.map(lambda leaf, i=i: leaf[i], batches))
        losses.append(float(loss))
    return params, state, losses


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile without most of XLA's optimizations, for programs that run only once."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def compiled_quickly() -> Any:
    """Return a fixture that compiles each test of a module quickly; assign it to a name there."""

    def quickly() -> Iterator[None]:
        with quick_compiles():
            yield

    return pytest.fixture(autouse=True)(quickly)


def state_error(found: Any, expected: Any) -> float:
    """Return `largest_relative_error` of two optimizer states of the same structure, including counts and keys."""

    return largest_relative_error(jax.tree.map(_as_array, found), jax.tree.map(_as_array, expected))


def bits(tree: Any) -> list[tuple[Any, tuple[int, ...], bytes]]:
    """Return the dtype, the shape and the bytes of each leaf, also of keys."""
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(_as_array, jax.tree.leaves(tree))]


def _as_array(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


MODELS = {  # and the number of IPUs of each
    "unlike local stages": lambda: (chain((0, 1, 2), 2, like=False), 3),
    "like stages stacked": lambda: (chain((0, 1, 2, 3), 2), 4),
    "a concurrent head, split unevenly": lambda: (chain((0, 1, None), 2, like=False), 4),
    "a tied table, split unevenly": lambda: (chain((None, 0, 1, 2, 3, None), 2, tied=True), 4),
}
