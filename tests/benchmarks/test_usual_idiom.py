"""Test that the usual JAX pipeline, with which ours is compared, computes the right loss and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import configure, make_mesh
from rivals_of.usual_idiom import value_and_grad

ROWS, WIDTH = 3, 4


def mean_squared_error(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("variation", [{}, {"checkpoint": True}, {"skip_idle": True}])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 3)])
def test_it_equals_the_unsharded_program(stages, micro_batches, variation):
    configure(4)
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(stages, WIDTH, WIDTH)), jnp.float32)
    batch = {key: jnp.asarray(random.normal(size=(micro_batches, ROWS, WIDTH)), jnp.float32) for key in ("x", "y")}
    stage = lambda w, x: jnp.tanh(x @ w)  # noqa: E731

    def unsharded(w: jax.Array) -> jax.Array:
        y = batch["x"]
        for i in range(stages):
            y = stage(w[i], y)
        return mean_squared_error(y, batch["y"])

    step = value_and_grad(stage, mean_squared_error, make_mesh(1, stages), micro_batches, **variation)
    found, expected = step(w, batch), jax.value_and_grad(unsharded)(w)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)
