"""Test the guards of IPUs that are groups of devices: what XLA puts into a stage, what would hang, and uniform guards.

XLA permutes data where a dim that is split is shifted or convolved. A permute in a guard that only one IPU runs waits
for ever, so a program that has one never runs.
"""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, make_mesh, make_train_step, verify
from ipu_jax.core.compiled.guards import StageCollectives
from ipu_jax.core.engine.stash import Stash
from support.against_plain import bubbles_hold_nan
from support.annotated import Annotated, annotated
from support.dense import chain, largest_relative_error
from support.layers import normal
from support.refusals import compilations, refusals, refused

__all__ = ["bubbles_hold_nan"]

KINDS, SCHEDULES = ("shift", "convolution"), ("1f1b", "zb-h1", "grouped", "sequential")
CROSSINGS = [*itertools.product(KINDS, SCHEDULES, [(1, 2, 2), (2, 2, 2), (1, 4, 2)])]


def mesh_of(shape):
    return make_mesh(*shape[:2], tensor=shape[2])


@functools.cache
def model_of(kind: str, shape: tuple[int, int, int] = (1, 2, 2)) -> Annotated:
    return annotated(kind, shape[1], replicas=shape[0])


def gradients_of(pipeline, model):
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    return float(loss), pipeline.unshard(gradients)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schedule", "shape"), CROSSINGS)
def test_a_stage_that_exchanges_data_gets_uniform_guards(bubbles_hold_nan, kind, schedule, shape):
    model = model_of(kind, shape)
    pipeline = model.pipeline(mesh_of(shape), schedule=schedule)
    loss, gradients = gradients_of(pipeline, model)
    assert any(pipeline.placement.guards.needed.values())
    expected_loss, expected = model.twin()
    assert largest_relative_error(loss, expected_loss) < 1e-5
    assert largest_relative_error(gradients, expected) < 1e-5


@pytest.mark.fast("zb-h1")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uniform_guards_have_a_spare_place_in_each_buffer(schedule):
    """An IPU writes there what it computes for another IPU's task."""
    model = chain((0, 1, None), 3)
    lengths = []
    for guards in ("own", "uniform"):
        pipeline = model.pipeline(2, guards=guards, schedule=schedule)
        stash = Stash(pipeline.placement.plan(pipeline.shard(model.params), model.batch))
        lengths.append({name: math.prod(buffer.shape) for name, buffer in stash.shapes.items()})
    own, uniform = lengths
    assert own.keys() == uniform.keys()
    assert own
    assert all(uniform[name] > own[name] for name in own)


@pytest.mark.fast("shift-'block1', 'head'-B")
@pytest.mark.parametrize(
    ("kind", "stages", "task"), [("shift", "'block1', 'head'", "B"), ("convolution", "'block0'", "F")]
)
def test_own_guards_refuse_it_by_stage_and_axis(kind, stages, task):
    model = model_of(kind)
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b", guards="own")
    params = pipeline.shard(model.params)
    with pytest.raises(ValueError, match="use guards='uniform'") as refusal:
        pipeline.value_and_grad(params, model.batch)
    assert f"stage {stages} makes XLA exchange data over axis 'tensor'" in str(refusal.value)
    assert f"(collective-permute in {task})" in str(refusal.value)
    if kind == "shift":
        return
    step = make_train_step(model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b", guards="own"), optax.sgd(0.1))
    with pytest.raises(ValueError, match="use guards='uniform'"):
        step(step.init(model.params), model.batch)


def test_a_stage_without_exchanges_keeps_its_own_guards():
    model = model_of("mlp")
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    gradients_of(pipeline, model)
    assert [*pipeline.placement.guards.needed.values()] == [False]


OF_A_USER = {
    "loss": lambda pipeline, params, batch: pipeline.loss(params, batch),
    "predict": lambda pipeline, params, batch: pipeline.predict(params, batch),
    "grad": lambda pipeline, params, batch: jax.grad(lambda p: pipeline.loss(p, batch, training=True))(params),
    "jit": lambda pipeline, params, batch: jax.jit(lambda p, b: pipeline.value_and_grad(p, b))(params, batch)[1],
    "report": lambda pipeline, params, batch: pipeline.report(params, batch).collectives,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_A_USER)
def test_programs_of_every_kind_are_looked_at_before_they_run(kind):
    model = model_of("convolution")
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    found = OF_A_USER[kind](pipeline, pipeline.shard(model.params), model.batch)
    assert any(pipeline.placement.guards.needed.values()) or kind == "grad"
    if kind == "report":
        assert found
    elif kind == "predict":
        assert largest_relative_error(found, jax.jit(model.logits)(model.params)) < 1e-5
    elif kind == "loss":
        assert float(found) == pytest.approx(float(model.twin()[0]), rel=1e-5)
    else:
        assert largest_relative_error(pipeline.unshard(found), model.twin()[1]) < 1e-5


@pytest.mark.slow
def test_training_takes_uniform_guards_and_compiles_once_more():
    model = model_of("shift")
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    step, plain = make_train_step(pipeline, optax.adam(0.01)), optax.adam(0.01)
    state, params = step.init(model.params), jax.tree.map(jnp.asarray, model.params)
    memory, gradients_of, update_of = plain.init(params), jax.jit(jax.grad(model.loss)), jax.jit(plain.update)
    for update in range(3):
        before = len(compilations)
        state, _ = step(state, model.batch)
        assert update == 0 or len(compilations) == before
        updates, memory = update_of(gradients_of(params), memory, params)
        params = optax.apply_updates(params, updates)
    assert largest_relative_error(step.whole(state)["params"], params) < 1e-5


@pytest.mark.slow
def test_what_is_not_finite_is_searched_under_the_guards_of_the_step():
    """Under own guards the search would wait for ever."""
    model = model_of("shift")
    step = make_train_step(model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b"), optax.sgd(0.1))
    batch = jax.tree.map(np.array, model.batch)
    batch["x"][1, 0] = np.nan
    found = step.find_nonfinite(step.init(model.params), batch)
    assert found is not None
    assert (found.microbatch, found.stage, found.name) == (1, 0, "block0")


def stateful(guards: Any) -> tuple[Pipeline, Any, Any, Any, Any]:
    """Return a pipeline with state, aux, skips, random numbers and unlike stages, and its arguments."""

    def first(w, x, mb, *, state, key):
        y = jnp.tanh(mb["x"] @ w) * jax.random.bernoulli(key, 0.8, (4, 6))
        return Outputs(
            y, state={"seen": state["seen"] + 1, "mean": 0.9 * state["mean"] + y.mean(0)}, skips={"s": y[:2]}
        )

    def second(w, x, mb):
        return Outputs(x @ w["a"] + w["b"], aux={"largest": x.max()})

    def last(w, x, mb, *, skips):
        return jnp.mean((x @ w - mb["y"]) ** 2) + jnp.mean(skips["s"])

    stages = [
        Stage(first, params="first", ipu=0, state="count", random=True, predict=first),
        Stage(second, params="second", ipu=1),
        Stage(last, params="last", ipu=1, takes=("s",), predict=lambda w, x, mb, *, skips: x @ w),
    ]
    pipeline = Pipeline(
        stages, mesh=make_mesh(1, 2, tensor=2), schedule="zb-h1", gradient_accumulation=5, guards=guards
    )
    weights = {"first": normal(3, 6), "second": {"a": normal(6, 5), "b": normal(5)}, "last": normal(5, 2, seed=1)}
    state = {"count": {"seen": np.int32(0), "mean": np.zeros(6, np.float32)}}
    batch = {"x": normal(5, 4, 3), "y": normal(5, 4, 2, seed=1)}
    return pipeline, pipeline.shard(weights), batch, pipeline.shard_state(state), jax.random.key(3)


@pytest.mark.slow
def test_uniform_guards_change_no_result_of_training_evaluation_and_prediction(bubbles_hold_nan):
    results = []
    for guards in ("own", "uniform"):
        pipeline, *arguments = stateful(guards)
        value, gradients, state = pipeline.value_and_grad(*arguments)
        predicted, new = pipeline.predict(*arguments, return_state=True)
        found = value, *map(pipeline.unshard, (gradients, state, new)), predicted, pipeline.loss(*arguments)
        results.append(jax.tree.map(np.asarray, found))
        verify(pipeline, *arguments)
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    assert largest_relative_error(*results) < 1e-6


@pytest.mark.slow
def test_uniform_guards_on_two_axes_change_no_result_either():
    model = annotated("plain", 2)
    found = [
        gradients_of(model.pipeline(make_mesh(1, 2), schedule="1f1b", guards=g), model) for g in ("own", "uniform")
    ]
    assert largest_relative_error(*found) < 1e-6


@refusals(
    (lambda: model_of("mlp").pipeline(mesh_of((1, 2, 2)), guards="same"), "guards='same'", "'auto', 'own', 'uniform'"),
)
def test_other_guards_are_refused(call, holds):
    with refused(*holds):
        call()


# what the report lists


@pytest.mark.slow
def test_the_report_lists_what_each_stage_sends():
    model = model_of("mlp")
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    report = pipeline.report(pipeline.shard(model.params), model.batch)
    rows = {(row.stages, row.task, row.op): row for row in report.collectives or ()}
    first = ("block0",)
    activation = model.batch["x"][0].nbytes
    for task in ("F", "B"):
        assert rows[first, task, "all-reduce"] == StageCollectives(first, task, "all-reduce", "tensor", 1, activation)
    assert {row.axis for row in rows.values()} == {"tensor"}
    assert {row.op for row in rows.values()} == {"all-reduce"}
    text = str(report)
    assert re.search(r"^stage +task +collective +axis +per micro-batch$", text, re.MULTILINE)
    assert re.search(r"^block0 +F +all-reduce +tensor +1 x 1\.0 kB$", text, re.MULTILINE)
    assert "2 per IPU" in text


def test_the_report_counts_a_devices_bytes():
    model = model_of("mlp")
    single, pairs = (
        pipeline.report(pipeline.shard(model.params), model.batch, compile=False)
        for pipeline in (model.pipeline(mesh_of((1, 2, size)), schedule="1f1b") for size in (1, 2))
    )
    scale = 4 * 8  # not split
    for one, two in zip(single.ipus, pairs.ipus, strict=True):
        assert two.weights - scale == (one.weights - scale) / 2
        assert two.gradients - scale == (one.gradients - scale) / 2
    assert single.collectives is pairs.collectives is None


@pytest.mark.slow
@pytest.mark.parametrize("guards", ["auto", "uniform"])
def test_an_update_that_exchanges_data_is_refused(guards):
    """An IPU updates its own leaf in a guard, which no option makes uniform."""
    rolled = optax.stateless(lambda updates, _: jax.tree.map(lambda g: jnp.roll(g, 1, axis=-1), updates))
    model = model_of("mlp")
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b", guards=guards)
    step = make_train_step(pipeline, optax.chain(rolled, optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"the optimizer makes XLA exchange data over axis 'tensor' \(collective-perm"):
        step(step.init(model.params), model.batch)
