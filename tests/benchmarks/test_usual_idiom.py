"""Test that the usual JAX pipeline, with which ours is compared, computes the right loss and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import configure, make_mesh
from rivals_of.usual_idiom import value_and_grad

ROWS, WIDTH = 3, 4


def scaled(shared: Any, microbatch: Any) -> jax.Array:
    return microbatch["x"] * shared["scale"]


def loss(shared: Any, y: jax.Array, microbatch: Any) -> jax.Array:
    return jnp.mean((y @ shared["head"] * shared["scale"] - microbatch["y"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variation", [{}, {"checkpoint": True}, {"skip_idle": True}, {"checkpoint": True, "skip_idle": True}]
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 3)])
def test_it_equals_the_unsharded_program(stages, micro_batches, variation):
    configure(4)
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(stages, WIDTH, WIDTH)), jnp.float32)
    batch = {key: jnp.asarray(random.normal(size=(micro_batches, ROWS, WIDTH)), jnp.float32) for key in ("x", "y")}
    # of the first stage and of the last, so that its gradient is a sum
    shared = {"scale": jnp.float32(0.7), "head": jnp.asarray(random.normal(size=(WIDTH, WIDTH)), jnp.float32)}
    stage = lambda w, x: jnp.tanh(x @ w)  # noqa: E731

    def unsharded(w: jax.Array, shared: Any) -> jax.Array:
        y = batch["x"] * shared["scale"]
        for i in range(stages):
            y = stage(w[i], y)
        return jnp.mean((y @ shared["head"] * shared["scale"] - batch["y"]) ** 2)

    step = value_and_grad(stage, loss, make_mesh(1, stages), micro_batches, first=scaled, **variation)
    found, expected = step(w, shared, batch), jax.value_and_grad(unsharded, argnums=(0, 1))(w, shared)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-6), found[1], expected[1])
