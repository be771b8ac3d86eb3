"""Test Pipeline(schedule="auto"): the costs it counts, the schedule that it finds for a step, and its results."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from ipu_jax.core.schedules import _auto
from ipu_jax.schedules import StageCosts, find_schedule
from support.dense import chain, largest_relative_error
from support.platforms import programs_for
from support.refusals import refusals, refused

N, K, D, E, V = 3, 6, 8, 10, 9  # V columns on 2 IPUs: 5 on each, one of them padding
M = 6
FLOAT = 4  # bytes
NOT_CHOSEN = "schedule='auto'", "for the shapes of a step", "pipeline.choose_schedule(params, batch).schedule"


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    """Let each search try a tenth of what it would: the tests of `find_schedule` have the whole ones."""
    monkeypatch.setattr(_auto, "_LEAST", 40)
    monkeypatch.setattr(_auto, "_TRIES", 20)
    _auto._searched.cache_clear()
    yield
    _auto._searched.cache_clear()


def unlike_stages(**options):
    """Return a pipeline of unlike stages, its weights and batch: two stages of one segment, a reshape, a head."""
    stages = [
        Stage(lambda w, x, mb: mb @ w, params="first", ipu=0),
        Stage(lambda w, x, mb: x @ w, params="second", ipu=0),
        Stage(lambda w, x, mb: x.reshape(N, E, 1), name="reshape", ipu=1),
        Stage(lambda w, x, mb: lax.psum((x[..., 0] @ w).sum(), "ipu"), params="head", ipu=ALL_IPUS),
    ]
    columns = {"head": PartitionSpec(None, "ipu")}
    pipeline = Pipeline(
        stages, mesh=make_mesh(1, 2), specs=columns, gradient_accumulation=M, **{"schedule": "auto", **options}
    )
    rng = np.random.default_rng(0)
    shapes = {"first": (K, D), "second": (D, E), "head": (E, V)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return pipeline, pipeline.shard(params), rng.normal(size=(M, N, K)).astype(np.float32)


# By hand, for one micro-batch. 2 FLOPs for each multiply-add, 1 for each number summed. The batch needs no gradient, so
# the first segment's B computes that of the second layer's input alone, and W those of both layers' weights. From B to
# W it keeps the cotangents of both layers' results.
FIRST, SECOND = 2 * N * K * D, 2 * N * D * E
HEAD = 2 * N * E * 5  # on each IPU
RESHAPE = FLOAT * N * E  # no FLOPs: the bytes of its result
WEIGHTS, SEGMENT = (FIRST + SECOND) / 2, (FIRST + 2 * SECOND) / 2
BY_HAND = StageCosts(
    forward=[(FIRST + SECOND) / 2, (FIRST + SECOND) / 2, RESHAPE, 2 * (HEAD + N * 5)],
    backward=[SECOND / 2, SECOND / 2, RESHAPE, 2 * 2 * HEAD],
    weight=[WEIGHTS, WEIGHTS, 0, 0],
    whole_backward=[SEGMENT, SEGMENT, RESHAPE, 2 * 2 * HEAD],
    stash=[FLOAT * N * D / 2, FLOAT * N * D / 2, 0, 0],  # the second layer's input
    weight_residuals=[FLOAT * N * (D + E) / 2, FLOAT * N * (D + E) / 2, 0, 0],
    unit="FLOPs",
)


# costs


@pytest.mark.parametrize("schedule", ["auto", "grouped", "zb-h1"])
def test_counted_costs_are_those_by_hand(schedule):
    pipeline, params, batch = unlike_stages(schedule=schedule)
    assert pipeline.stage_costs(params, batch) == BY_HAND
    assert pipeline.stage_costs(params, jax.ShapeDtypeStruct(batch.shape, batch.dtype)) == BY_HAND


def test_the_search_gets_the_costs_by_hand_and_lockstep():
    pipeline, params, batch = unlike_stages()
    found = pipeline.choose_schedule(params, batch)
    assert found == find_schedule(BY_HAND, placement=(0, 0, 1, None), gradient_accumulation=M, ipus=2, lockstep=True)
    assert pipeline.choose_schedule(params, batch).schedule is found.schedule  # searches are remembered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "flops", "bytes_per_second"), [("tpu", 4000, 4.5e10), ("gpu", 2000, 4.5e11), ("cpu", 0, np.inf)]
)
def test_on_chips_messages_take_time_in_the_unit_of_the_costs(platform, flops, bytes_per_second):
    message = FLOAT * N * E  # from the second layer to the reshape; the head's broadcast is not counted
    measured = dataclasses.replace(BY_HAND, unit="seconds")
    with programs_for(platform):
        without_unit = StageCosts([1, 1, 5, 1], [1, 1, 5, 1], [1, 1, 0, 0])
        known = ((None, message * flops), (measured, message / bytes_per_second), (without_unit, 0))
        for costs, transfer in known:
            pipeline, params, batch = unlike_stages()
            found = pipeline.choose_schedule(params, batch, costs=costs)
            assert found.transfer == pytest.approx(transfer)


@pytest.mark.parametrize(("platform", "per_byte"), [("tpu", 240), ("gpu", 300)])
def test_on_chips_what_b_writes_for_w_costs_time(platform, per_byte):
    pipeline, params, batch = unlike_stages()
    plain = pipeline.stage_costs(params, batch)
    with programs_for(platform):
        pipeline, params, batch = unlike_stages()
        costs = pipeline.stage_costs(params, batch)
    assert costs.weight_residuals is not None
    assert max(costs.weight_residuals) > 0
    extra = [per_byte * size for size in costs.weight_residuals]
    np.testing.assert_allclose(np.subtract(costs.backward, plain.backward), extra)
    np.testing.assert_allclose(np.subtract(costs.weight, plain.weight), extra)
    assert (costs.forward, costs.whole_backward) == (plain.forward, plain.whole_backward)


@pytest.mark.parametrize(("layers", "width", "clock"), [(1, 64, "two-phase"), (64, 16384, "one-phase")])
def test_on_chips_the_choice_depends_on_how_much_is_computed_per_byte(layers, width, clock):
    """A message takes 8000 / width of a layer's F on a TPU: 125 F, or 1/131 of a stage's F. Nothing is run."""

    def stage(w, x, mb):
        return lax.scan(lambda y, layer: (y @ layer, None), x + 1, w)[0]

    stages = [Stage(lambda w, x, mb: mb["x"] * w, params="scale", ipu=0)]
    stages += [Stage(stage, params=f"w{ipu}", ipu=ipu) for ipu in range(4)]
    stages.append(Stage(lambda w, x, mb: jnp.mean(x), ipu=3))
    with programs_for("tpu"):
        pipeline = Pipeline(stages, gradient_accumulation=8, schedule="auto")
        shape = jax.ShapeDtypeStruct((layers, width, width), "float32")
        weights = {"scale": jax.ShapeDtypeStruct((width,), "float32"), **{f"w{ipu}": shape for ipu in range(4)}}
        batch = {"x": jax.ShapeDtypeStruct((8, 4, width), "float32")}
        found = pipeline.choose_schedule(pipeline.shard_shapes(weights), batch)
    assert found.schedule.clock == clock


@pytest.mark.slow
def test_a_report_says_the_name_and_how_idle_the_schedule_found_leaves_the_ipus():
    pipeline, params, batch = unlike_stages()
    report = pipeline.report(params, batch, compile=False)
    schedule = pipeline.choose_schedule(params, batch).schedule
    assert report.schedule == schedule.name
    assert BY_HAND.whole_backward is not None
    # a report counts no time for the reshape
    forward, whole = ([*row[:2], 0, row[3]] for row in (BY_HAND.forward, BY_HAND.whole_backward))
    run = schedule.simulate(forward, whole, BY_HAND.weight, lockstep=True)
    assert [part.idle for part in report.ipus] == pytest.approx([1 - busy / run.makespan for busy in run.busy])


def test_a_stage_without_flops_and_without_bytes_costs_one():
    stages = [
        Stage(lambda w, x, mb: {}, name="nothing", ipu=0),
        Stage(lambda w, x, mb: (mb @ w).sum(), params="w", ipu=1),
    ]
    pipeline = Pipeline(stages, schedule="auto")
    costs = pipeline.stage_costs(pipeline.shard({"w": np.ones((K, 1), np.float32)}), np.ones((1, N, K), np.float32))
    assert (costs.forward[0], costs.backward[0], costs.weight[0], costs.whole_backward) == (1, 1, 0, (1, 2 * N * K))


@pytest.mark.slow
def test_measured_costs_are_seconds_of_every_task_and_the_same_bytes():
    pipeline, params, batch = unlike_stages()
    costs = pipeline.stage_costs(params, batch, measured=True, repeats=2)
    assert (costs.unit, costs.stash, costs.weight_residuals) == ("seconds", BY_HAND.stash, BY_HAND.weight_residuals)
    for field in ("forward", "backward", "weight", "whole_backward"):
        measured, counted = getattr(costs, field), getattr(BY_HAND, field)
        assert [seconds > 0 for seconds in measured] == [flops > 0 for flops in counted]
        assert all(seconds < 10 for seconds in measured)
    found = pipeline.choose_schedule(params, batch, costs=costs)
    assert found == find_schedule(costs, placement=(0, 0, 1, None), gradient_accumulation=M, ipus=2, lockstep=True)


@pytest.mark.slow
def test_like_stages_are_measured_once():
    model = chain((0, 1, 0, None), M)  # the first stage alone needs no gradient of its input
    pipeline = model.pipeline(2, schedule="auto")
    costs = pipeline.stage_costs(pipeline.shard(model.params), model.batch, measured=True, repeats=1)
    assert costs.forward[0] != costs.forward[1] == costs.forward[2] != costs.forward[3]


@pytest.mark.slow
def test_keys_and_state_are_arguments_of_measured_programs():
    pipeline, params, batch, state, key = random_and_counting()
    costs = pipeline.stage_costs(params, batch, state, key, measured=True, repeats=1)
    assert all(seconds > 0 for seconds in costs.forward)


def random_and_counting():
    def first(w, x, mb, *, state, key):
        return Outputs((mb @ w) * jax.random.normal(key, (N, D)), state={"seen": state["seen"] + 1})

    stages = [
        Stage(first, params="first", state="s", random=True, ipu=0),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="second", ipu=1),
    ]
    pipeline = Pipeline(stages, schedule="auto", gradient_accumulation=M)
    params = pipeline.shard({"first": np.ones((K, D), np.float32), "second": np.ones((D, E), np.float32)})
    state = pipeline.shard_state({"s": {"seen": np.int32(0)}})
    return pipeline, params, np.ones((M, N, K), np.float32), state, jax.random.key(0)


# the choice


def test_a_pipeline_is_the_same_value_before_and_after_its_first_call():
    """Each step takes the schedule of its shapes. In a long sequence the second stage takes the most time."""
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="first", ipu=0),
        Stage(lambda w, x, mb: (x @ x.T) @ x * w[0, 0], params="attention", ipu=1),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=0),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=M, schedule="Auto")
    params = pipeline.shard({name: np.ones((4, 4), np.float32) for name in ("first", "attention", "last")})
    text = lambda of, rows: re.sub(r"plan\.\S+", "", of.lower(params, rows).as_text())
    before, found = {**vars(pipeline.placement)}, set()
    for length in (2, 200):
        rows = np.ones((M, length, 4), np.float32)
        jax.eval_shape(pipeline.value_and_grad, params, rows)
        given = pipeline.replace(schedule=pipeline.choose_schedule(params, rows).schedule)
        assert text(pipeline, rows) == text(given, rows)
        assert pipeline.report(params, rows, compile=False).timetable == given.schedule
        found.add(given.schedule)
    assert len(found) == 2
    assert {name: vars(pipeline.placement)[name] for name in before} == before
    for copy in (pipeline, pipeline.replace()):
        with refused(*NOT_CHOSEN):
            _ = copy.schedule


@pytest.mark.slow
def test_verify_chooses_too_with_state_and_keys():
    pipeline, params, batch, state, key = random_and_counting()
    verify(pipeline, params, batch, state, key)
    found = pipeline.choose_schedule(params, batch, state, key)
    assert [list(row) for row in found.schedule.forward] == [sorted(row) for row in found.schedule.forward]


def test_costs_without_bytes_get_the_counted_ones():
    pipeline, params, batch = unlike_stages()
    given = StageCosts([1, 1, 5, 1], [1, 1, 5, 1], [1, 1, 0, 0])
    found = pipeline.choose_schedule(params, batch, costs=given)
    assert found.candidates[0].stash_bytes == pytest.approx(BY_HAND.stash_bytes(found.schedule))
    assert found.makespan == given.simulate(found.schedule, lockstep=True).makespan


# what it computes


@pytest.mark.slow
def test_a_table_of_its_own_runs():
    model = chain((0, 1, 0, 1, None), 4, like=False)
    pipeline = model.pipeline(2, schedule="auto")
    params = pipeline.shard(model.params)
    # stages so unlike that no family is the best
    costs = StageCosts([7, 9, 3, 8, 6], [3, 2, 8, 5, 9], [9, 9, 6, 2, 0])
    assert pipeline.choose_schedule(params, model.batch, costs=costs).schedule.name == "auto"
    loss, gradients = pipeline.value_and_grad(params, model.batch)
    assert largest_relative_error((loss, pipeline.unshard(gradients)), model.twin()) < 1e-5


# memory


def totals(pipeline, params, batch):
    report = pipeline.report(params, batch, compile=False)
    return [report.total(part.ipu) for part in report.ipus]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_what_is_found_fits_in_the_memory_of_an_ipu(share, recwarn):
    model = chain((0, 1, 2, 3), 8, like=False)
    least, free = (model.pipeline(4, schedule=schedule) for schedule in ("sequential", "auto"))
    params = free.shard(model.params)
    low, high = (max(totals(pipeline, params, model.batch)) for pipeline in (least, free))
    assert low < high
    limit = low + share * (high - low)
    pipeline = model.pipeline(4, schedule="auto", ipu_memory=limit)
    loss, gradients = pipeline.value_and_grad(params, model.batch)
    assert max(totals(pipeline, params, model.batch)) <= limit
    assert not [warning for warning in recwarn if "ipu_memory" in str(warning.message)]
    assert largest_relative_error((loss, pipeline.unshard(gradients)), model.twin()) < 1e-5


@pytest.mark.parametrize("call", ["choose_schedule", "value_and_grad", "report"])
def test_memory_for_no_schedule(call):
    least, params, batch = unlike_stages(schedule="sequential")
    report = least.report(params, batch, compile=False)
    needed = [report.total(0), report.total(1)]
    pipeline, _, _ = unlike_stages(ipu_memory=max(needed) - 1)
    ipu = needed.index(max(needed))
    in_words = lambda size: f"{size / 1000:.1f} kB" if size >= 1000 else f"{size} B"
    parts = ", ".join(f"{kind} {in_words(size)}" for kind, size in report.bytes_by_kind(ipu).items())
    too_low = f"ipu_memory={max(needed) - 1:g}", "too low for any schedule"
    with refused(
        *too_low, f"IPU {ipu} needs {max(needed)} bytes ({parts})", "recompute='all'", "a smaller micro-batch"
    ):
        getattr(pipeline, call)(params, batch)


# refusals


def chosen(call="choose_schedule", rows=M, schedule="auto", **options):
    """Return a call of the method with the first rows of the batch."""
    pipeline, params, batch = unlike_stages(schedule=schedule)
    return lambda: getattr(pipeline, call)(params, batch[:rows], **options)


def under_jit():
    pipeline, params, batch = unlike_stages()
    return jax.jit(lambda batch: pipeline.stage_costs(params, batch, measured=True))(batch)


FIVE = f"batch has shape (5, {N}, {K})", f"(gradient_accumulation, ...) = ({M}, ...)"


@refusals(
    (chosen(schedule="1F1B"), "the schedule is '1f1b'", "was given", "schedule='auto'"),
    (chosen(costs=StageCosts([1], [1], [1])), "costs has 1 stages", "placement has 4", "costs per stage"),
    (chosen(costs=3), "costs=3", "give StageCosts(forward=, backward=, weight=)"),
    (under_jit, "measured=True", "tracers", "outside of jax.jit"),
    (chosen("stage_costs", measured=True, repeats=0), "repeats=0", "count", "at least 1"),
    (chosen("stage_costs", measured=False, repeats=0), "repeats=0", "count", "at least 1"),
    (chosen("choose_schedule", rows=5), *FIVE),
    (chosen("stage_costs", rows=5), *FIVE),
)
def test_a_choice_that_there_cannot_be_is_refused(call, holds):
    with refused(*holds):
        call()
