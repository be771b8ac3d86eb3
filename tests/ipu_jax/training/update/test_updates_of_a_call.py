"""Test calls that make only some updates of their batch, against plain optax on one device."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.steps import NonFiniteLossError

K, M, B, D = 5, 2, 3, 4
RATE = 0.1


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.cache
def step_of(**options):
    pipeline = Pipeline(
        [
            Stage(lambda p, x, mb: jnp.tanh(mb @ p), params="a", ipu=0),
            Stage(lambda p, x, mb: jnp.mean((x @ p) ** 2), params="b", ipu=1),
        ],
        mesh=make_mesh(1, 2),
        gradient_accumulation=M,
    )
    return make_train_step(pipeline, optax.sgd(RATE), TrainOptions(device_iterations=K, **options))


def weights():
    return {"a": normal(0, D, 7), "b": normal(1, 7, 3)}


@pytest.mark.fast("sum")
@pytest.mark.parametrize(
    ("outputs", "of"),
    [
        ("final", lambda every: every[4]),
        ("sum", lambda every: every.sum(0)),
        ("all", lambda every: every),
        (2, lambda every: every[[1, 3, 4]]),  # the last group is cut short
        (6, lambda every: every[4]),
    ],
    ids=["final", "sum", "all", "2", "6"],
)
def test_outputs_are_those_of_the_updates_that_were_made(outputs, of):
    loss_fn = lambda w, rows: (jnp.mean((rows * w) ** 2), rows.sum())
    options = TrainOptions(device_iterations=6, outputs=outputs, gradient_accumulation=M)
    step = make_train_step(loss_fn, optax.sgd(RATE), options)
    batch, w, losses = normal(4, 6, M, B), 2.0, []
    for rows in batch:
        losses.append(np.mean((rows * w) ** 2))
        w -= RATE * 2 * w * np.mean(rows**2)
    state, found = step(step.init(jnp.float32(2)), batch, updates=5)
    np.testing.assert_allclose(found.loss, of(np.array(losses[:5])), rtol=1e-5)
    np.testing.assert_allclose(found.aux, of(batch[:5].sum(-1)), rtol=1e-5)
    state, found = step(state, batch, updates=range(5, 6))
    np.testing.assert_allclose(np.ravel(found.loss), [losses[5]], rtol=1e-5)
    np.testing.assert_allclose(state.params, w, rtol=1e-5)
    assert step._program._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue] (jax hides it)
    np.testing.assert_allclose(step.loss(state, batch)[0], np.mean((batch * w) ** 2), rtol=1e-5)


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_found_in_its_piece_of_the_batch():
    batch = normal(5, K, M, B, D)
    batch[3, 1, 2, 0] = np.nan
    step = step_of(on_nonfinite="stop", donate=False)
    state = step.init(weights())
    for made in (range(2), range(2, K)):
        state, _ = step(state, batch, updates=made)
    with pytest.raises(NonFiniteLossError, match="update 4, replica 0, micro-batch 1, stage 0"):
        step.check(state)
    assert int(state.step) == 3
