"""Test that a trace says what each IPU ran when: with a stage that is slow on purpose, and against the schedule."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import re
import statistics
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.base import facts
from ipu_jax.observe import Timeline, TraceError, trace
from ipu_jax.run.observe.tracing.recording import Recording
from ipu_jax.run.observe.tracing.timeline import TASKS, WAITING
from ipu_jax.schedules import Task
from support.refusals import compilations, refused

D, M = 64, 4


def _recordings():
    return [listener for listener in facts.listeners() if isinstance(listener, Recording)]


def light(w, x, mb):
    return jnp.tanh((mb if x is None else x) @ w)


def heavy(w, x, mb):
    # 30 products one after the other, whatever XLA does
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=30)[0]


def loss(w, x, mb):
    return jnp.mean((x @ w) ** 2)


def weights(*names):
    return {name: np.eye(D, dtype=np.float32) for name in names}


def names_by_ipu(timeline, slices, step):
    """Return the names of tasks in the order of their starts, per replica and IPU."""
    found = defaultdict(list)
    for one in sorted(slices, key=lambda one: one.start):
        if one.kind in TASKS and one.step == step:
            found[one.replica, one.ipu] += one.name.split()
    return dict(found)


def assert_nested(slices):
    """No two slices overlap, unless one lies in the other; and only collectives lie in others."""
    outer_end = float("-inf")
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        if one.start >= outer_end:
            outer_end = one.end
        else:
            assert one.kind == "collective", one
            assert one.end <= outer_end + 1e-9, one


def three_stages():
    stages = [Stage(fn, params="abc"[k], ipu=k, name=fn.__name__) for k, fn in enumerate((light, heavy, loss))]
    return Pipeline(stages, mesh=make_mesh(1, 3), schedule="1f1b", gradient_accumulation=M)


def two_stages():
    return Pipeline([Stage(light, params="a", ipu=0), Stage(loss, params="b", ipu=1)], gradient_accumulation=M)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a recording of 3 steps, in calls of 2, of a pipeline whose last stage is slow, and its step."""
    step = make_train_step(three_stages(), optax.sgd(1e-3), TrainOptions(device_iterations=2))
    state, batch = step.init(weights("a", "b", "c")), np.ones((2, M, 256, D), np.float32)
    with trace(tmp_path_factory.mktemp("trace"), steps=3) as recording:
        state, _ = step(state, batch)
        before = len(compilations)
        for _ in range(3):
            assert not recording.is_recorded or not _recordings()
            state, _ = step(state, batch)
    assert len(compilations) == before, "the trace compiled a program"
    return recording


@pytest.mark.slow
def test_each_ipu_ran_the_tasks_of_the_schedule_in_its_order(recorded):
    timeline = recorded.timeline
    assert {step.step for step in timeline.steps} == {0, 1, 2}
    orders = {(0, ipu): [str(task) for task in timeline.schedule.order(ipu)] for ipu in range(3)}
    for step in range(3):
        assert names_by_ipu(timeline, timeline.slices, step) == orders
        assert names_by_ipu(timeline, timeline.plan, step) == orders


def test_the_slow_stage_is_slow_on_its_ipu_and_the_others_wait(recorded):
    seconds = defaultdict(list)
    for one in recorded.timeline.slices:
        if one.kind in TASKS:
            seconds[one.ipu, one.kind].append(one.seconds)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for kind in ("F", "B"):
        assert medians[1, kind] > 4 * max(medians[0, kind], medians[2, kind]), medians
    report = recorded.report
    assert report.slowest == (1,)
    assert "slowest stage: 'heavy'" in str(report)
    light_ipu, heavy_ipu, _ = report.ipus
    assert light_ipu.bubble_measured > 0.5 > heavy_ipu.bubble_planned
    assert light_ipu.waiting > heavy_ipu.waiting


def other_share(step, slices):
    """Return the share of a step in which nothing was measured; a collective in a task or an update is in these."""
    outer = [one for one in slices if not any(o.start <= one.start < o.end for o in slices if o is not one)]
    return 1 - sum(one.seconds for one in outer) / (step.end - step.start)


def test_a_notebook_shows_the_table_of_a_recording_and_a_timeline_is_a_line(recorded):
    page = recorded._repr_html_()
    assert page.startswith(recorded.report._repr_html_())
    assert "<th style='text-align:right'>waiting</th>" in page
    assert f"Trace: {recorded.path}" in page
    first, *table = str(recorded.report).splitlines()
    column = [float(row.split(" ms")[4].split()[-1]) for row in table[1:4]]
    assert f"{max(column):.2f} ms" in first  # the longest step
    assert repr(recorded).splitlines() == [*str(recorded.report).splitlines(), f"Trace: {recorded.path}"]
    assert repr(recorded.timeline).startswith(f"Timeline(3 steps of 3 IPUs, {len(recorded.timeline.slices)} slices; ")


def test_the_parts_of_a_step_add_up_and_do_not_overlap(recorded):
    timeline = recorded.timeline
    for one in recorded.report.ipus:
        assert one.step == pytest.approx(one.busy + one.waiting + one.update + one.other)
        assert min(one.busy, one.waiting, one.update, one.other) > 0
        mine = timeline.of_ipu(one.replica, one.ipu)
        assert_nested(mine)
        steps = [step for step in timeline.steps if step.ipu == one.ipu]
        for slice_ in mine:
            step = steps[slice_.step]
            assert step.start <= slice_.start <= slice_.end <= step.end + 1e-9
        for a, b in itertools.pairwise(steps):
            assert a.end <= b.start
        assert [s.kind for s in mine].count("update") == 3
        # the busiest neighbour on the machine lets one step of three alone
        assert min(other_share(step, [s for s in mine if s.step == step.step]) for step in steps) < 0.3


def test_messages_come_before_the_tasks_that_use_them(recorded):
    for step in range(3):
        of_step = [one for one in recorded.timeline.slices if one.step == step]
        at = {one.name: one for one in of_step if one.kind in TASKS}
        for m in range(M):
            assert at[f"0F{m}"].end <= at[f"1F{m}"].start
            assert at[f"1F{m}"].end <= at[f"2F{m}"].start
            assert at[f"2B{m}"].end <= at[f"1B{m}"].start
            assert at[f"1B{m}"].end <= at[f"0B{m}"].start


def test_the_plan_begins_with_the_tasks_and_takes_as_long_as_the_simulation_says(recorded):
    timeline = recorded.timeline
    for step in range(3):
        plan, measured = (
            min(one.start for one in slices if one.step == step and one.kind in TASKS)
            for slices in (timeline.plan, timeline.slices)
        )
        assert plan == pytest.approx(measured)
    # with the median of each stage as its cost
    lengths = {one.name: one.seconds for one in timeline.plan if one.step == 0}
    seconds = [one.seconds for one in timeline.slices if one.stages == (1,) and one.kind == "F"]
    assert lengths["1F2"] == pytest.approx(statistics.median(seconds))


def test_the_file_has_the_plan_above_each_ipu_and_its_slices_nest(recorded):
    assert list(recorded.path.parent.iterdir()) == [recorded.path]
    assert recorded.path.name == "trace.json.gz"
    contents = json.loads(gzip.decompress(recorded.path.read_bytes()))
    events = contents["traceEvents"]
    (instance,) = (e for e in events if e["name"] == "process_name")
    assert instance["args"]["name"] == "instance 0"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    # Perfetto sorts them by number, but one of its process's number comes first, and it mixes up those of number 0
    assert [threads[thread] for thread in sorted(threads)] == [
        f"replica 0, IPU {ipu}, {kind}" for ipu in range(3) for kind in ("plan", "measured")
    ]
    assert all(pid == instance["pid"] and tid > pid for pid, tid in threads)
    slices = [e for e in events if e["ph"] == "X"]
    plan, measured = recorded.timeline.plan, recorded.timeline.slices
    assert len(slices) == len(measured) + len(plan)
    for thread, name in threads.items():
        mine = [e for e in slices if (e["pid"], e["tid"]) == thread]
        on_ipu = [one for one in (plan if name.endswith("plan") else measured) if f"IPU {one.ipu}" in name]
        waiting = ", waiting"
        assert sorted(e["name"] for e in mine) == sorted(one.name + waiting * (one.kind in WAITING) for one in on_ipu)
        open_until: list[int] = []
        for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert end >= start
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)
    # one colour: Perfetto colours by name
    tasks = {e["name"] for e in slices if e["cat"] in TASKS}
    assert tasks == {str(Task(stage, kind, m)) for stage in range(3) for kind in ("F", "B") for m in range(M)}


def events_by_name(recording, ipu):
    """Return the measured slices of an IPU in the first step, as events by name."""
    events = json.loads(gzip.decompress(recording.path.read_bytes()))["traceEvents"]
    thread = {e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == f"replica 0, IPU {ipu}, measured"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] in thread and event["args"]["step"] == 0:
            found[event["name"]].append(event)
    return found


def test_events_say_the_stage_its_work_and_what_an_ipu_waits_for(recorded):
    events = [events_by_name(recorded, ipu) for ipu in range(3)]
    product, rows = 2 * 256 * D * D, 256 * D
    # by hand: F is a product and tanh, 30 times in "heavy"; B of the first stage needs no gradient of the batch
    for name, ipu, least in (
        ("0F1", 0, product),
        ("0B1", 0, product),
        ("1F2", 1, 30 * product),
        ("1B2", 1, 60 * product),
    ):
        (event,) = events[ipu][name]
        args = event["args"]
        assert (args["stage"], args["microbatch"]) == (("light", "heavy")[ipu], int(name[2]))
        assert least < args["FLOP"] < least + 6 * 30 ** (ipu == 1) * (rows + D * D)
        assert args["GFLOP/s"] == pytest.approx(args["FLOP"] / event["dur"] / 1e3, abs=1e-3)
    # IPU 0  0F0 > | 0F1 > | ...
    # IPU 1        | 1F0 > | ...
    first, second = ([e["args"] for e in events[ipu]["exchange y, waiting"]][:2] for ipu in (0, 1))
    assert [(e["tick"], e["for"], e.get("received bytes")) for e in second] == [
        (0, "0F0 of IPU 0", 4 * rows),
        (1, "0F1 of IPU 0", 4 * rows),
    ]
    assert {(e["for"], e.get("received bytes")) for e in first} == {("all IPUs, of which none sends to this one", None)}
    exchanges = [events[ipu][f"exchange {name}, waiting"] for ipu in (0, 1) for name in ("y", "dx")]
    without = [e["args"] for of in exchanges for e in of if "none sends" in e["args"]["for"]]
    assert without
    assert not [e for e in without if "received bytes" in e]
    assert {e["args"]["tick"]: e["args"]["for"] for e in events[0]["exchange dx, waiting"]}[4] == "1B0 of IPU 1"
    waiting = sum(e["dur"] for name, of in events[1].items() if name.endswith(", waiting") for e in of)
    slices = [one for one in recorded.timeline.of_ipu(0, 1) if one.kind in WAITING and one.step == 0]
    assert waiting == pytest.approx(1e6 * sum(one.seconds for one in slices), rel=1e-3)


def test_a_timeline_is_read_back_from_its_json(recorded):
    text = recorded.timeline.to_json()
    assert Timeline.from_json(text) == recorded.timeline
    fields = json.loads(text)
    fields["slices"], fields["plan"] = ([row[:-2] for row in fields[name]] for name in ("slices", "plan"))  # of before
    before = [dataclasses.replace(one, flops=None, received=None) for one in recorded.timeline.slices]
    assert [*Timeline.from_json(json.dumps(fields)).slices] == before
    with pytest.raises(ValueError, match=r"text begins with 'nothing': give what Timeline\.to_json returned"):
        Timeline.from_json("nothing")


@pytest.mark.slow
def test_a_with_that_ends_before_its_steps_waits_for_those_in_flight(tmp_path):
    pipeline = two_stages()
    params, batch = pipeline.shard(weights("a", "b")), np.ones((M, 512, D), np.float32)
    with trace(tmp_path, steps=9) as recording:
        for _ in range(3):
            pipeline.value_and_grad(params, batch)
    timeline = recording.timeline
    for number in range(2):
        found = names_by_ipu(timeline, timeline.slices, number)
        assert found == {(0, ipu): [str(task) for task in timeline.schedule.order(ipu)] for ipu in range(2)}
    assert recording.report.steps == 2


# other schedules and models


def recording_of(tmp_path, schedule, places, *, replicas=1, ipus=2):
    stages = [Stage(light, params=f"p{i}", ipu=place) for i, place in enumerate(places[:-1])]
    stages.append(Stage(loss, params=f"p{len(stages)}", ipu=places[-1]))
    specs = {str(stage.params): PartitionSpec() for stage in stages if stage.ipu == ALL_IPUS}
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, ipus), schedule=schedule, gradient_accumulation=M, specs=specs)
    params = pipeline.shard(weights(*(stage.params for stage in stages)))
    batch = np.ones((M, 8, D) if replicas == 1 else (replicas, M, 8, D), np.float32)
    with trace(tmp_path, steps=2) as recording:
        for _ in range(4):
            pipeline.value_and_grad(params, batch)
    return recording


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "places", "replicas"),
    [
        ("zbv", (0, 1, 1, 0), 1),
        ("grouped-zb", (0, 1, 0, 1), 1),
        ("grouped", (0, 1, ALL_IPUS), 2),
        ("interleaved", (ALL_IPUS, 0, 1, ALL_IPUS), 1),
        ("zb-wave", (0, 1, 0, 1), 1),
    ],
)
def test_the_order_is_that_of_the_schedule(schedule, places, replicas, tmp_path):
    recording = recording_of(tmp_path, schedule, places, replicas=replicas)
    timeline = recording.timeline
    assert timeline.ipus == [(replica, ipu) for replica in range(replicas) for ipu in range(2)]
    segments = {stages[0]: stages for stages in timeline.schedule.segments}
    for ipu in range(2):
        order = [task for task in timeline.schedule.order(ipu) if task.stage in segments]
        order = [t for t in order if not (t.kind == "W" and timeline.schedule.placement[t.stage] is None)]
        expected = []
        for task in order:
            stages = segments[task.stage]
            which = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
            expected.append(f"{which}{task.kind}{task.microbatch}")
        for step, replica in itertools.product(range(2), range(replicas)):
            assert names_by_ipu(timeline, timeline.slices, step)[replica, ipu] == expected
    for replica, ipu in timeline.ipus:
        assert_nested(timeline.of_ipu(replica, ipu))
    if places[-1] == ALL_IPUS:  # all IPUs of a replica receive the head's input, and so compute it at one time
        by_name = defaultdict(list)
        for one in timeline.slices:
            if one.kind == "FB":
                by_name[one.replica, one.step, one.name].append(one)
        assert len(by_name) == replicas * 2 * M
        (head,) = {e["args"]["stage"] for e in events_by_name(recording, 0)[f"{len(places) - 1}F0 {len(places) - 1}B0"]}
        assert head == timeline.stages[-1]
        waits = [e["args"]["for"] for e in events_by_name(recording, 0)["all-reduce, waiting"]]
        assert waits.count("the other IPUs, which run this task together") >= M
        for together in by_name.values():
            assert max(one.start for one in together) < min(one.end for one in together)


SPLIT = {"up": PartitionSpec(None, "tensor"), "down": PartitionSpec("tensor", None)}


def split_light(w, x, mb):
    """A step over a hidden layer that is split over "tensor", and so ends with one all-reduce."""
    hidden = jax.lax.with_sharding_constraint(
        jnp.tanh((mb if x is None else x) @ w["up"]), PartitionSpec(None, "tensor")
    )
    return jax.lax.with_sharding_constraint(hidden @ w["down"], PartitionSpec())


def split_heavy(w, x, mb):
    """Four of them, and a loss."""
    return jnp.mean(jax.lax.scan(lambda x, _: (split_light(w, x, None), None), x, None, length=4)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "guards"), [(1, "own"), (1, "uniform"), (2, "own")])
def test_the_first_device_of_each_group_is_shown(replicas, guards, tmp_path):
    """Under uniform guards an IPU's own tasks are shown, and not what it runs of others' tasks without effect."""
    stages = [Stage(fn, params="ab"[k], ipu=k, name=fn.__name__) for k, fn in enumerate((split_light, split_heavy))]
    options = {"schedule": "1f1b", "gradient_accumulation": M, "guards": guards}
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, 2, tensor=2), specs={"a": SPLIT, "b": SPLIT}, **options)
    params = pipeline.shard({name: {"up": np.eye(D, 2 * D), "down": np.eye(2 * D, D)} for name in "ab"})
    batch = np.ones((M, 8, D) if replicas == 1 else (replicas, M, 8, D), np.float32)
    other = two_stages()  # on other devices: the first one of its IPU 1 is the second one of this IPU 0
    params_of_other, batch_of_other = other.shard(weights("a", "b")), np.ones((M, 8, D), np.float32)
    with trace(tmp_path, steps=3) as recording:
        other.value_and_grad(params_of_other, batch_of_other)
        for _ in range(4):
            pipeline.value_and_grad(params, batch)
    timeline = recording.timeline
    places = [(replica, ipu) for replica in range(replicas) for ipu in range(2)]
    assert (timeline.devices, timeline.ipus) == (2, places)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert "each IPU is 2 devices, shown by the first\n" in str(recording.report)
    contents = json.loads(gzip.decompress(recording.path.read_bytes()))
    assert contents["otherData"]["devices"] == 2
    for step in range(3):
        found = names_by_ipu(timeline, timeline.slices, step)
        assert found == {(r, ipu): [str(task) for task in timeline.schedule.order(ipu)] for r, ipu in places}
    for replica, ipu in places:
        mine = timeline.of_ipu(replica, ipu)
        assert_nested(mine)
        forwards = [one for one in mine if one.kind == "F"]
        reductions = [one for one in mine if one.kind == "collective" and one.name == "all-reduce"]
        inside = [sum(f.start <= one.start < f.end for one in reductions) for f in forwards]
        assert inside == [4 if ipu else 1] * (3 * M)
        waits = [e["args"]["for"] for e in events_by_name(recording, ipu)["all-reduce, waiting"]]
        assert waits.count("the other devices of this IPU") >= M * (4 if ipu else 1)


@pytest.mark.slow
def test_a_program_of_ones_own_counts_the_steps_that_it_is_said_to_make(tmp_path):
    pipeline = two_stages()
    params, batches = pipeline.shard(weights("a", "b")), np.ones((3, M, 8, D), np.float32)

    @jax.jit
    def losses(params, batches):
        return jax.lax.map(lambda batch: pipeline.value_and_grad(params, batch)[0], batches)

    with trace(tmp_path, steps=4) as recording:
        for _ in range(5):
            recording.run(losses, params, batches, steps=3)
    assert {step.step for step in recording.timeline.steps} == {0, 1, 2, 3}
    assert recording.report.steps == 4


# what goes wrong


@pytest.mark.slow
def test_names_of_tasks_change_nothing_in_the_compiled_program(monkeypatch):
    def compiled():
        pipeline = Pipeline([Stage(light, params="a", ipu=0), Stage(loss, params="b", ipu=1)], gradient_accumulation=2)
        step = make_train_step(pipeline, optax.sgd(0.1))
        return step.lower(step.init(weights("a", "b")), np.ones((2, 8, D), np.float32)).compile().as_text()

    without_metadata = lambda text: re.sub(r", metadata=\{[^}]*\}", "", text.partition("\nFileNames")[0])
    named = compiled()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    unnamed = compiled()
    assert "ipu_jax.F.0/while" in named
    assert "ipu_jax.update" in named
    assert "ipu_jax.F.0/while" not in unnamed
    assert without_metadata(named) == without_metadata(unnamed)


def test_programs_without_a_scan_over_ticks_are_told_from_none(tmp_path):
    recording = trace(tmp_path).__enter__()
    for _ in range(5):
        recording.run(jnp.sin, 1.0)
    with pytest.raises(TraceError, match="have no scan over ticks that this process has planned: Replicas have none"):
        recording.finish()


def test_what_a_trace_is_given_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    no_folder: Any = 3
    with refused(f"trace {tmp_path}/file is not a folder", "a name that is free"):
        trace(tmp_path / "file")
    with refused("folder=3", "not a folder: give a path"):
        trace(no_folder)
    with refused("steps=0", "at least 1"):
        trace(tmp_path, steps=0)


def test_there_is_one_trace_at_a_time_and_one_with_for_it(tmp_path):
    recording = trace(tmp_path)
    recording.__enter__()
    with pytest.raises(TraceError, match="the recording has not finished"):
        _ = recording.timeline
    with pytest.raises(ValueError, match="another trace is being recorded: leave its `with` first"):
        trace(tmp_path / "other").__enter__()
    with pytest.raises(TraceError, match="no step was recorded: 0 programs ran inside"):
        recording.finish()
    with pytest.raises(ValueError, match="a recording is for one `with`"):
        recording.__enter__()
    assert not _recordings()


def test_an_exception_inside_is_not_covered_by_one_of_the_trace(tmp_path):
    with pytest.raises(KeyError, match="mine"), trace(tmp_path):
        raise KeyError("mine")
    assert not _recordings()
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_that_runs_already_lets_the_loop_go_on(tmp_path):
    values = []

    def train():
        with trace(tmp_path / "ours") as recording:
            values.extend(recording.run(jnp.sin, 1.0) for _ in range(6))

    failed = pytest.raises(TraceError, match=r"the profiler failed: .*started")
    with jax.profiler.trace(str(tmp_path / "theirs")), failed:
        train()
    assert len(values) == 6
    assert list((tmp_path / "ours").iterdir()) == []
