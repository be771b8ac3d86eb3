"""Test that `TrainStep.loss` evaluates as the step trains; the expected numbers are plain jax's on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale, Reduction
from ipu_jax.steps import replicate
from support.dense import largest_relative_error
from support.small_problems import masked_sum, tokens
from support.trained import bits, compiled_quickly

M, REPLICAS = 3, 2
PARAMS = {"w": np.random.default_rng(3).normal(size=(5, 7)).astype(np.float32), "b": np.ones(7, np.float32)}


_compiled_quickly = compiled_quickly()


def mean(params, microbatch):
    return jnp.mean((jnp.tanh(microbatch["x"] @ params["w"] + params["b"]).sum(-1) - microbatch["y"]) ** 2)


def as_pipeline(fn, replicas, **options):
    stages = [
        Stage(lambda p, x, mb: mb["x"] @ p["w"], params="first", ipu=0),
        Stage(lambda p, x, mb: fn({"w": jnp.eye(7, dtype=x.dtype), "b": p["b"]}, {**mb, "x": x}), params="last", ipu=1),
    ]
    return Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M, **options)


def step_of(kind, fn, replicas, reduction: Reduction = "mean", **options):
    options = TrainOptions(**options)
    if kind == "pipeline":
        step = make_train_step(as_pipeline(fn, replicas, reduction=reduction), optax.sgd(0.1), options)
        return step, step.init({"first": {"w": PARAMS["w"]}, "last": {"b": PARAMS["b"]}})
    model = replicate(fn, replication_factor=replicas, gradient_accumulation=M, reduction=reduction)
    step = make_train_step(model, optax.sgd(0.1), options)
    return step, step.init(PARAMS)


def whole_of(step, state):
    params = step.whole(state)["params"]
    return params if "w" in params else params["first"] | params["last"]


def rows_of(batch, dims):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[dims:]), batch)


@pytest.mark.fast("function-mean-1")
@pytest.mark.parametrize(
    ("kind", "reduction", "updates", "options"),
    [
        ("function", "mean", 1, {"loss_scale": DynamicScale(initial=64.0)}),
        ("function", "sum", 3, {}),
        ("pipeline", "sum", 1, {"loss_scale": 64.0, "shard_optimizer": True}),
        ("pipeline", "mean", 3, {}),
    ],
    ids=["function-mean-1", "function-sum-3", "pipeline-sum-1", "pipeline-mean-3"],
)
def test_counts_weigh_as_in_training(kind, reduction, updates, options):
    step, state = step_of(kind, masked_sum, REPLICAS, reduction, weighted=True, device_iterations=updates, **options)
    batch = tokens(*(updates,) * (updates > 1), REPLICAS, M)
    if updates > 1:
        batch["mask"][1] = 0  # an update without anything that counts
    loss, counts = step.loss(state, batch)
    total, count = jax.jit(masked_sum)(PARAMS, rows_of(batch, batch["x"].ndim - 2))
    # the sum of one update, averaged over the updates
    np.testing.assert_allclose(loss, total / count if reduction == "mean" else total / updates, rtol=1e-6)
    np.testing.assert_array_equal(counts, batch["mask"].sum(-1))
    without = batch | {"mask": np.zeros_like(batch["mask"])}
    assert float(step.loss(state, without)[0]) == 0
    if updates > 1:
        return
    state, outputs = step(state, batch)
    np.testing.assert_allclose(outputs.loss, loss, rtol=1e-6)

    def of_all(params, rows):
        total, count = masked_sum(params, rows)
        return total / count if reduction == "mean" else total

    gradients = jax.jit(jax.grad(of_all))(PARAMS, rows_of(batch, 3))
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, PARAMS, gradients)
    found = whole_of(step, state)
    assert largest_relative_error(found, moved) <= 1e-6
    # without any token nothing is learned, and nothing is NaN
    state, outputs = step(state, without)
    assert float(outputs.loss) == 0
    assert bits(whole_of(step, state)) == bits(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "function"])
def test_an_average_of_half_weights_is_in_float32_and_evaluated_in_half(kind):
    step, state = step_of(kind, mean, REPLICAS, precision="16.16", shard_optimizer=True, ema_decay=0.75)
    batch, wide = tokens(REPLICAS, M), lambda leaf: np.asarray(leaf, np.float32)
    before = step.whole(state)["params"]
    state, _ = step(state, batch)
    whole = step.whole(state)
    expected = jax.tree.map(lambda old, new: 0.75 * wide(old) + 0.25 * wide(new), before, whole["params"])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole["ema"])} == {"float32"}
    assert largest_relative_error(whole["ema"], expected) <= 1e-6
    loss = float(step.loss(state, batch, ema=True))
    assert loss == float(step.loss(step.init(whole["ema"]), batch)) != float(step.loss(state, batch))


def test_stages_evaluate_with_the_state_that_training_left():
    def scaled(w, x, mb, *, state, key):
        noise = jax.random.normal(key)
        return Outputs(jnp.mean(mb * w) * noise, state=state + 1, aux={"trained": noise})

    def evaluated(w, x, mb, *, state, key):
        return jnp.mean(mb * w) * state, {"evaluated": state}

    stage = Stage(scaled, params="w", state="s", random=True, evaluate=evaluated)
    step = make_train_step(Pipeline([stage], gradient_accumulation=M), optax.sgd(0.0))
    state = step.init({"w": np.ones(3, np.float32)}, stages={"s": np.float32(10)}, key=jax.random.key(0))
    state, _ = step(state, np.ones((M, 4, 3), np.float32))
    loss, aux = step.loss(state, np.full((M, 4, 3), 2, np.float32))
    assert float(loss) == 2 * (10 + M)
    assert aux["evaluated"].tolist() == [10 + M] * M
    assert float(step.whole(state)["stages"]["s"]) == 10 + M
