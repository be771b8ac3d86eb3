"""Test norms, learning rates and texts of a training step, and calls that make only some updates of their batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import NonFiniteLossError
from support.small_problems import product_loss, product_rows, product_weights
from support.trained import compiled_quickly

STEPS = 3


_compiled_quickly = compiled_quickly()


# norms


def test_frozen_weights_count_in_no_norm_and_whole_ones_once():
    """`fixed` shares a slot with a weight of the other IPU; every IPU has `gain`."""
    stages = [
        Stage(lambda p, x, mb: mb * p["w"] + p["fixed"], params="first", ipu=0),
        Stage(lambda p, x, mb: x * p["u"] + p["v"], params="second", ipu=1),
        Stage(lambda p, x, mb: jnp.sum(x) * p["gain"], params="last", ipu=ALL_IPUS),
    ]
    frozen = {"first": {"fixed": True, "w": False}}
    pipeline = Pipeline(stages, mesh=make_mesh(2, 2), specs={"last": {"gain": P()}}, frozen=frozen)
    floats = lambda *values: np.array(values, np.float32)
    params = {
        "first": {"w": floats(3), "fixed": floats(50, 60)},
        "second": {"u": floats(1, 2), "v": floats(4, 5)},
        "last": {"gain": np.float32(2)},
    }
    step = make_train_step(pipeline, optax.sgd(0.0), TrainOptions(norms=True))
    _, outputs = step(step.init(params), np.full((2, 1, 1), 7, np.float32))
    np.testing.assert_allclose(outputs.parameter_norm, np.sqrt(9 + 1 + 4 + 16 + 25 + 4), rtol=1e-6)
    x = 7 * 3 + params["first"]["fixed"]  # the loss is gain * sum(x * u + v)
    y = x * params["second"]["u"] + params["second"]["v"]
    squares = [(2 * 7 * 3) ** 2, *(2 * x) ** 2, 2**2 + 2**2, y.sum() ** 2]
    np.testing.assert_allclose(outputs.gradient_norm, np.sqrt(np.sum(squares)), rtol=1e-6)


def test_norms_in_half_are_of_sums_in_float32_and_of_weights_that_are_kept():
    """The mean gradient, 128.5, is none in bfloat16; its gradient scaled by 8 is exact."""
    options = TrainOptions(norms=True, precision="16.16", loss_scale=DynamicScale(initial=8.0), replication_factor=2)
    step = make_train_step(lambda w, mb: jnp.sum(w * mb), optax.sgd(2.0**-7), options)
    state, outputs = step(step.init(np.zeros(1, np.float32)), np.array([256, 1], np.float32).reshape(2, 1, 1))
    assert float(outputs.gradient_norm) == 128.5
    assert float(outputs.parameter_norm) == 0
    state, outputs = step(state, np.full((2, 1, 1), np.inf, np.float32))
    assert not np.isfinite(outputs.gradient_norm)
    assert float(outputs.parameter_norm) == 1
    _, outputs = step(state, np.zeros((2, 1, 1), np.float32))
    assert float(outputs.parameter_norm) == 1


# learning rate


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)), [0.1, 0.09, 0.08]),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)), [0.5] * 3),
        (optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), None),
        (optax.chain(*(optax.inject_hyperparams(optax.sgd)(learning_rate=rate) for rate in (0.5, 0.25))), None),
    ],
    ids=["schedule", "constant", "kept nowhere", "in two places"],
)
def test_the_learning_rate_is_the_one_that_the_optimizer_keeps(optimizer, expected):
    step = make_train_step(product_loss, optimizer, TrainOptions(device_iterations=STEPS, outputs="all"))
    state = step.init(product_weights())
    _, outputs = jax.eval_shape(step, state, product_rows(STEPS, 1))
    assert outputs.gradient_norm is None
    assert outputs.parameter_norm is None
    if expected is None:
        assert outputs.learning_rate is None
    else:
        np.testing.assert_allclose(step(state, product_rows(STEPS, 1))[1].learning_rate, expected, rtol=1e-6)


# texts


def test_what_prints():
    options = TrainOptions(ema_decay=0.5, loss_scale=DynamicScale(initial=4.0), norms=True)
    step = make_train_step(product_loss, optax.adam(0.1), options)
    first = step.init(product_weights())
    state, outputs = step(first, product_rows(1))
    told: list[Any] = []
    shapes = jax.eval_shape(lambda s: (told.append(repr(s)), s)[1], state)
    for printed, holds in (
        (repr(step), ("loss function on 1 IPU", f"loss_scale={DynamicScale(initial=4.0)!r}", "ema_decay=0.5")),
        (repr(first), ("used up", "go on with the state that it returned")),
        (repr(state), ("step=1, 18 weights in 72 B, optimizer state in 148 B", "loss scale 4")),
        (repr(outputs), (f"loss={float(outputs.loss):.6g}, updated=1, gradient_norm=", "skipped=0")),
        (repr(shapes), ("step=int32[], 18 weights in 72 B",)),
        (repr(jax.tree.map(lambda _: P(), state)), ("TrainState(step=P",)),
        (repr(step.model), ("Replicas(product_loss, replication_factor=1",)),
    ):
        assert not [text for text in holds if text not in printed], printed
    assert told == [repr(shapes)]


# calls that make only some updates of their batch

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
