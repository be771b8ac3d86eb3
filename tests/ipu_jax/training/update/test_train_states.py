"""Test what a step requires of its state: live buffers, its own optimizer's structure, and weights placed as now."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import Replicas
from support.dense import largest_relative_error
from support.one_stage import KINDS
from support.refusals import refused
from support.small_problems import product_loss, product_weights
from support.trained import bits, compiled_quickly

REUSED = "an earlier call reused the buffers of its arrays"
GO_ON = "TrainOptions(donate=False)"
PASS = "pass what that call returned"
OTHER = (
    "state.optimizer is another optimizer's",
    "use the step that made it",
    "step.init(other.whole(state)['params']",
)
WEIGHTS = {"a": {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}, "b": {"v": np.ones(2, np.float32)}}
ROWS = np.random.default_rng(0).normal(size=(2, 1, 4, 3)).astype(np.float32)


_compiled_quickly = compiled_quickly()


def loss_of(params: Any, rows: Any) -> Any:
    return jnp.mean((jnp.tanh(rows @ params["a"]["w"]) @ params["b"]["v"]) ** 2)


def pipeline_of(**options: Any) -> Pipeline:
    stages = [
        Stage(lambda p, x, mb: jnp.tanh(mb @ p["w"]), params="a", ipu=0),
        Stage(lambda p, x, mb: jnp.mean((x @ p["v"]) ** 2), params="b", ipu=1),
    ]
    return Pipeline(stages, mesh=make_mesh(2, 2), **options)


def step_of(kind: str, optimizer: Any = None, **options: Any) -> Any:
    model = pipeline_of() if kind == "pipeline" else loss_of
    return make_train_step(model, optimizer or optax.adam(0.1), TrainOptions(replication_factor=2, **options))


# donated buffers


@pytest.mark.fast("pipeline")
@KINDS
def test_a_state_that_a_call_has_used_is_refused(kind):
    step, given = step_of(kind, shard_optimizer=True), jax.tree.map(jnp.asarray, WEIGHTS)
    used = step.init(given)
    state, _ = step(used, ROWS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(used))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    for call in (step.whole, lambda state: step(state, ROWS), lambda state: step.lower(state, ROWS)):
        with refused(f"state: {REUSED}", GO_ON):
            call(used)
    for call in (lambda params: step.model.loss(params, ROWS), lambda params: step.model.value_and_grad(params, ROWS)):
        with refused(f"params: {REUSED}", PASS):
            call(used.params)
    with refused(f"sharded: {REUSED}", PASS):
        step.model.unshard(used.params)
    batch = jnp.asarray(ROWS)
    batch.delete()
    for call in (lambda: step(state, batch), lambda: step.model.loss(state.params, batch)):
        with refused(f"batch: {REUSED}", PASS):
            call()
    step(state, ROWS)  # what was returned is alive


def test_a_state_of_stages_that_was_deleted_is_refused():
    stage = Stage(lambda p, x, mb, *, state: Outputs(jnp.mean(mb * p), state=state), params="w", state="s")
    pipeline = Pipeline([stage])
    params, state = pipeline.shard({"w": np.ones(3)}), pipeline.shard_state({"s": np.ones(2)})
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    with refused(f"state: {REUSED}", PASS):
        pipeline.loss(params, np.ones((1, 2, 3)), state)


@pytest.mark.fast("function")
@KINDS
def test_a_state_that_is_not_donated_may_be_used_again(kind):
    kept, donated = step_of(kind, donate=False), step_of(kind)
    first = kept.init(WEIGHTS)
    before = kept.whole(first)
    once, twice = kept(first, ROWS)[0], kept(first, ROWS)[0]
    assert bits(kept.whole(first)) == bits(before)
    assert bits(once) == bits(twice)
    assert bits(kept.whole(once)) == bits(donated.whole(donated(donated.init(WEIGHTS), ROWS)[0]))


@pytest.mark.slow
def test_placed_weights_begin_a_training_as_whole_ones_do():
    step, whole = step_of("pipeline"), step_of("pipeline").init(WEIGHTS)
    placed = pipeline_of().shard(WEIGHTS)
    state = step.init(placed)
    assert bits(step.whole(state)["params"]) == bits(step.whole(whole)["params"])
    step(state, ROWS)
    assert bits(pipeline_of().unshard(placed)) == bits(WEIGHTS), "the state has copies"
    for leaf in jax.tree.leaves(placed):
        leaf.delete()
    with refused("params: ", REUSED, PASS):
        step.init(placed)


def test_whole_hands_out_copies():
    """It copies everything, also the key and the scale, and a key in the optimizer's own state."""
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(0.1))
    options = TrainOptions(replication_factor=2, loss_scale=DynamicScale())
    step = make_train_step(
        Replicas(lambda p, rows, *, key: loss_of(p, rows), replication_factor=2, random=True), optimizer, options
    )
    state = step.init(WEIGHTS, key=jax.random.key(7))
    whole = step.whole(state)
    before = bits(whole)
    for _ in range(3):
        state, _ = step(state, ROWS)
    assert bits(whole) == before
    restored, _ = step(step.restore(whole), ROWS)
    first, _ = step(step.init(WEIGHTS, key=jax.random.key(7)), ROWS)
    assert bits(step.whole(restored)["params"]) == bits(step.whole(first)["params"])


# whose state it is


MOMENTUM = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "mine", "others"),
    [
        ("function", optax.adam(0.1), MOMENTUM),  # fewer arrays
        ("pipeline", optax.adam(0.1), optax.sgd(0.1)),
        ("pipeline", optax.adam(0.1), optax.amsgrad(0.1)),  # more
        ("function", optax.adam(0.1), optax.chain(optax.clip(1.0), optax.adam(0.1))),  # as many, otherwise nested
        ("function", MOMENTUM, optax.rmsprop(0.1)),  # and in the same shapes
    ],
)
def test_another_optimizers_state_is_refused(kind, mine, others):
    step = step_of(kind, mine)
    step.init(WEIGHTS)
    state = step_of(kind, others).init(WEIGHTS)
    for call in (step.whole, lambda state: step(state, ROWS)):
        with refused(*OTHER):
            call(state)


@pytest.mark.slow
def test_a_state_that_lies_otherwise_is_refused():
    """Test state that is sharded over the replicas or not, on the same step or on one made in the same way."""
    sharded, whole = step_of("pipeline", shard_optimizer=True), step_of("pipeline")
    for step, others in ((sharded, whole), (whole, sharded)):
        state = others.init(WEIGHTS)
        with refused(*OTHER):
            step(state, ROWS)
    alike = step_of("pipeline")
    state, _ = alike(whole.init(WEIGHTS), ROWS)  # no init of its own
    assert bits(alike.whole(state)) == bits(whole.whole(whole(whole.init(WEIGHTS), ROWS)[0]))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    "other",
    [
        {"a": {"w": np.ones((3, 5), np.float32)}, "b": {"v": np.ones(5, np.float32)}},
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), WEIGHTS),
    ],
    ids=["shapes", "dtypes"],
)
def test_an_init_with_other_weights_leaves_older_states_valid(kind, other):
    """It is not mistaken for the older ones."""
    step = step_of(kind)
    older, newer = step.init(WEIGHTS), step.init(other)
    whole = step.whole(older)
    assert bits(whole["params"]) == bits(WEIGHTS)
    for state, weights in ((older, WEIGHTS), (newer, other)):
        alone = step_of(kind)
        assert bits(step.whole(step(state, ROWS)[0])) == bits(alone.whole(alone(alone.init(weights), ROWS)[0]))


def test_an_average_begins_anew_from_a_state_without_one():
    plain, averaging = (make_train_step(product_loss, optax.sgd(0.1), TrainOptions(ema_decay=d)) for d in (None, 0.75))
    saved = plain.whole(plain.init(product_weights()))
    del saved["ema"]  # as an older version saved it
    assert plain.whole(plain.restore(saved))["ema"] is None
    begun = averaging.restore({**saved, "ema": saved["params"]})
    np.testing.assert_array_equal(averaging.whole(begun)["ema"]["u"], product_weights()["u"])


@pytest.mark.slow
def test_unfreezing_begins_the_optimizer_anew():
    """Weights can be reused, but moments of weights that were frozen don't exist, so the state is refused."""
    first = make_train_step(pipeline_of(frozen={"a": True}), optax.adam(0.1))
    second = make_train_step(pipeline_of(), optax.adam(0.1))
    state, _ = first(first.init(WEIGHTS), ROWS)
    second.init(WEIGHTS)
    with refused("state is of a step with other frozen weights", "step.init(other.whole(state)['params']"):
        second(state, ROWS)
    whole = first.whole(state)
    with pytest.raises(ValueError, match=r"^the saved optimizer state has leaves "):
        second.restore(whole)
    assert bits(whole["params"]["a"]) == bits(WEIGHTS["a"])
    found = second.whole(second(second.init(whole["params"]), ROWS)[0])["params"]
    rows = ROWS.reshape(-1, 3)
    adam, weights = optax.adam(0.1), whole["params"]

    @jax.jit
    def updated(w: Any) -> Any:
        updates, _ = adam.update(jax.grad(loss_of)(w, rows), adam.init(w), w)
        return optax.apply_updates(w, updates)

    assert largest_relative_error(found, updated(weights)) <= 1e-6
    assert bits(found["a"]) != bits(WEIGHTS["a"])


# how many calls are in flight


def test_calls_in_flight_are_counted_and_waited_for():
    """Every way to dispatch a program adds each call to its window, which waits for all but the last four calls."""
    step, function = step_of("pipeline"), step_of("function")
    state, of_function = step.init(WEIGHTS), function.init(WEIGHTS)
    params, replicated = step.model.shard(WEIGHTS), function.model.shard(WEIGHTS)
    pipeline, replicas = pipeline_of(), Replicas(loss_of, replication_factor=2)
    evaluated, evaluating = pipeline_of(), Replicas(loss_of, replication_factor=2)

    def trained() -> Any:
        nonlocal state
        state, outputs = step(state, ROWS)
        return outputs.loss

    def trained_function() -> Any:
        nonlocal of_function
        of_function, outputs = function(of_function, ROWS)
        return outputs.loss

    programs, evaluating_programs = pipeline._programs, evaluated._programs
    models = (step, function, programs, evaluating_programs, replicas, evaluating)
    for model, call in (
        (step, trained),
        (function, trained_function),
        (programs, lambda: pipeline.value_and_grad(params, ROWS)[0]),
        (evaluating_programs, lambda: evaluated.loss(params, ROWS)),
        (replicas, lambda: replicas.value_and_grad(replicated, ROWS)[0]),
        (evaluating, lambda: evaluating.loss(replicated, ROWS)),
    ):
        losses = []
        for count in range(1, 8):
            losses.append(call())
            assert model._window.outstanding == min(count, 4)
            assert sum(each._window.outstanding for each in models) <= 4
            assert all(loss.is_ready() for loss in losses[:-4])
