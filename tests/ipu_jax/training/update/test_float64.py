"""Test that float64 models train in float64 under every option, against plain jax and optax on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale, Reduction
from ipu_jax.steps import replicate
from support.trained import quick_compiles

M, UPDATES, DECAY, LIMIT = 3, 4, 0.9, 0.25
BOUND = 1e-14  # relative to a leaf's largest number
RNG = np.random.default_rng(5)
PARAMS = {"first": RNG.normal(size=(5, 4)), "last": {"w": RNG.normal(size=(4, 2)), "b": RNG.normal(size=2)}}
OPTIONS = {
    "defaults": {},
    "weighted": {"weighted": True},
    "static scale": {"loss_scale": 1000.0},
    "dynamic scale": {"loss_scale": DynamicScale(initial=700.0, factor=3.0, growth_interval=2)},
    "clipped": {"max_gradient_norm": LIMIT},
    "averaged": {"ema_decay": DECAY, "norms": True},
    "divided": {"shard_optimizer": True, "device_iterations": 2},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}


@pytest.fixture(autouse=True)
def _in_float64():
    with quick_compiles(), jax.enable_x64(True):
        yield


def batches_of(replicas):
    lead = (UPDATES, replicas, M)
    rng = np.random.default_rng(6)
    counted = (rng.random((*lead, 6)) < 0.6).astype(np.int32)
    return {"x": rng.normal(size=(*lead, 6, 5)), "y": rng.normal(size=(*lead, 6, 2)), "counted": counted}


def loss_of(last, hidden, mb, weighted):
    errors = ((hidden @ last["w"] + last["b"] - mb["y"]) ** 2).sum(-1)
    # the count is an integer, as a sum of bools is
    return (jnp.sum(errors * mb["counted"]), mb["counted"].sum()) if weighted else errors.mean()


def function_of(weighted):
    return lambda params, mb: loss_of(params["last"], jnp.tanh(mb["x"] @ params["first"]), mb, weighted)


def pipeline_of(weighted, reduction: Reduction, replicas):
    def first(w, x, mb, *, state):
        return Outputs(jnp.tanh(mb["x"] @ w), state=0.7 * state + 0.3 * mb["x"].mean(0))

    stages = [
        Stage(first, params="first", state="mean", ipu=0),
        Stage(lambda p, x, mb: loss_of(p, x, mb, weighted), params="last", ipu=1),
    ]
    return Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M, reduction=reduction)


def step_of(kind, optimizer, options, reduction: Reduction = "mean", replicas=2):
    """Return a step, and its first state."""
    weighted = options.get("weighted", False)
    if kind == "pipeline":
        model = pipeline_of(weighted, reduction, replicas)
    else:
        model = replicate(
            function_of(weighted), replication_factor=replicas, gradient_accumulation=M, reduction=reduction
        )
    step = make_train_step(model, optimizer, TrainOptions(outputs="all", **options))
    return step, step.init(PARAMS, stages={"mean": np.zeros(5)} if kind == "pipeline" else None)


def plain_update(params, batch, state, options, reduction):
    """Return loss, gradients and the stage's state of an update, leaves of the batch (replicas, M, ...)."""
    fn, replicas = function_of(weighted := options.get("weighted", False)), batch["x"].shape[0]

    def total(params):
        results: Any = [fn(params, jax.tree.map(lambda leaf, at=at: leaf[at], batch)) for at in np.ndindex(replicas, M)]
        return sum(result[0] for result in results) if weighted else sum(results)

    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    count = int(batch["counted"].sum()) if weighted else replicas * M
    states = [state] * replicas
    for r in range(replicas):
        for m in range(M):
            states[r] = 0.7 * states[r] + 0.3 * batch["x"][r, m].mean(0)
    if reduction == "mean":
        gradients = jax.tree.map(lambda g: g / count, gradients)
    return value if weighted and reduction == "sum" else value / count, gradients, np.mean(states, 0)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def close(found, expected):
    """Assert that trees of float64 are alike to the last digits."""

    def one(f, e):
        assert f.dtype == np.float64
        np.testing.assert_allclose(f, e, rtol=0, atol=BOUND * np.max(np.abs(e)))

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(one, jax.device_get(found), jax.device_get(expected))


def check_losses(kind, step, state, batch, options, reduction):
    """Compare what `step.loss` and the model's own methods return before any update."""
    weighted, several = options.get("weighted", False), "device_iterations" in options
    of_updates = [jax.tree.map(lambda leaf, i=i: leaf[i], batch) for i in range(2)] if several else [batch]
    losses = [plain_update(PARAMS, each, np.zeros(5), options, reduction)[0] for each in of_updates]
    counts = [each["counted"].sum() for each in of_updates] if weighted and reduction == "mean" else None
    loss = step.loss(state, batch)
    close(loss[0] if weighted else loss, np.average(losses, weights=counts))
    if not weighted and not several:
        stages = (state.stages,) if kind == "pipeline" else ()
        close(step.model.loss(state.params, batch, *stages), losses[0])
        close(step.model.value_and_grad(state.params, batch, *stages)[0], losses[0])


# "all" has every option but a scale that is fixed
ALWAYS = (("function", "static scale", "mean"), ("pipeline", "defaults", "sum"), ("pipeline", "all", "mean"))


def cases():
    for kind in ("function", "pipeline"):
        for options in OPTIONS:
            for reduction in ("mean", "sum"):
                marks = () if (kind, options, reduction) in ALWAYS else pytest.mark.slow
                yield pytest.param(kind, OPTIONS[options], reduction, id=f"{kind}-{options}-{reduction}", marks=marks)


@pytest.mark.parametrize(("kind", "options", "reduction"), list(cases()))
def test_training_is_as_exact_as_plain_float64(kind, options, reduction):
    optimizer: Any = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.03, 7), eps=0.1)
    step, state = step_of(kind, optimizer, options, reduction)
    batches, k, told = batches_of(2), options.get("device_iterations", 1), []
    batch_at = lambda i: jax.tree.map(lambda leaf: leaf[i : i + k] if k > 1 else leaf[i], batches)  # noqa: E731
    check_losses(kind, step, state, batch_at(0), options, reduction)
    for first in range(0, UPDATES, k):
        state, outputs = step(state, batch_at(first))
        told.append(jax.device_get(outputs))

    params, stages, average = PARAMS, np.zeros(5), PARAMS
    rates, losses, norms, memory = [], [], [], optimizer.init(params)
    for number in range(UPDATES):
        batch = jax.tree.map(lambda leaf, i=number: leaf[i], batches)
        loss, gradients, stages = plain_update(params, batch, stages, options, reduction)
        losses.append(loss)
        norms.append([norm(gradients), norm(params)])
        if "max_gradient_norm" in options:
            gradients = jax.tree.map(lambda g: g * min(1, LIMIT / norms[-1][0]), gradients)
        updates, memory = optimizer.update(gradients, memory, params)
        rates.append(memory.hyperparams["learning_rate"])
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda e, w: DECAY * e + (1 - DECAY) * w, average, params)

    flat = lambda name: np.concatenate([np.atleast_1d(getattr(outputs, name)) for outputs in told])  # noqa: E731
    close(flat("loss"), np.array(losses))
    np.testing.assert_array_equal(flat("learning_rate"), np.array(rates))  # optax keeps it in float32
    whole = step.whole(state)
    close(whole["params"], params)
    moments = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]  # noqa: E731
    close(moments(whole["optimizer"]), moments(memory))
    if kind == "pipeline":
        close(whole["stages"], {"mean": stages})
    if "norms" in options:
        close(np.stack([flat("gradient_norm"), flat("parameter_norm")], 1), np.array(norms))
    if "ema_decay" in options:
        close(whole["ema"], average)


def test_an_optimizer_sees_the_loss_in_float64():
    def update(gradients, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: g * value, gradients), state

    update_by_loss: Any = update
    optimizer = optax.chain(optax.GradientTransformationExtraArgs(lambda params: (), update_by_loss), optax.sgd(0.1))
    step, state = step_of("pipeline", optimizer, {})
    batch = jax.tree.map(lambda leaf: leaf[0], batches_of(2))
    state, _ = step(state, batch)
    loss, gradients, _ = plain_update(PARAMS, batch, np.zeros(5), {}, "mean")
    close(step.whole(state)["params"], jax.tree.map(lambda w, g: w - 0.1 * loss * g, PARAMS, gradients))


@pytest.mark.parametrize("kind", ["function", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_loss_beyond_float32_is_finite(kind):
    options = {"on_nonfinite": "stop"}
    step, state = step_of(kind, optax.sgd(1e-40), options)
    batch = jax.tree.map(lambda leaf: leaf[0], batches_of(2))
    batch["y"] *= 1e20
    assert step.find_nonfinite(state, batch) is None
    state, outputs = step(state, batch)
    step.check(state)
    assert outputs.loss > np.finfo(np.float32).max


def test_float32_weights_stay_float32():
    step, _ = step_of("function", optax.adam(0.1), OPTIONS["all"] | {"device_iterations": 1})
    batch = jax.tree.map(lambda leaf: leaf[0].astype(np.float32), batches_of(2))
    state, outputs = step(step.init(jax.tree.map(np.float32, PARAMS)), batch)
    floats = [leaf for leaf in jax.tree.leaves((state, outputs)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype.name for leaf in floats} == {"float32"}
