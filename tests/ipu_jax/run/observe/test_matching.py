"""Test how a profile becomes a timeline, with profiles that are written here: each number is worked out by hand."""

import dataclasses

import numpy as np
import pytest

from ipu_jax.core.engine.labels import Guard, PlanNames, SegmentNames
from ipu_jax.core.schedules import make_schedule
from ipu_jax.observe import Timeline, TraceError
from ipu_jax.run.observe.tracing._assembling import Coordinates, InstanceTrace, measured, merged
from ipu_jax.run.observe.tracing._profile import DeviceRun, Event, Operation, in_turn, program_of
from ipu_jax.run.observe.tracing.timeline import Slice, Step
from ipu_jax.run.observe.tracing.trace_report import make_report, split_of

SCHEDULE = make_schedule("gpipe", ipus=2, gradient_accumulation=1)  # 0F0 | 1F0 | 1B0 | 0B0
F: Guard = ("F", 0)
B: Guard = ("B", 0)
Y: Guard = ("y", 0)
PLAN = PlanNames(
    SCHEDULE,
    ipus=2,
    role="training",
    backward=True,
    segments=(SegmentNames(0, ("a",), 0), SegmentNames(1, ("b",), 1)),
    classes=((0,), (1,)),
    ticks=4,
    microbatches={
        F: np.array([[0, -1], [-1, -1], [-1, -1], [-1, -1]]),
        ("F", 1): np.array([[-1, -1], [-1, 0], [-1, -1], [-1, -1]]),
        B: np.array([[-1, -1], [-1, -1], [-1, -1], [0, -1]]),
        Y: np.array([[0, 0], [-1, -1], [-1, -1], [-1, -1]]),
    },
)


def run_on_ipu_0(*, task_in_tick=0, late=0.0, without=None, plan=PLAN):
    """Return a run of IPU 0: F takes 30 ns, the exchange 10, B 50; empty loops take 1; the update 20."""
    events = [Event(Operation("scan", plan=plan), 100, 1000 + late)]
    at = 100.0
    for tick in range(4):
        for guard, rows in plan.microbatches.items():
            is_active = rows[tick, 0] >= 0
            if guard == F:
                is_active = tick == task_in_tick
            length = {F: 30, Y: 10, B: 50}.get(guard, 1) if is_active else 1
            if (guard, tick) != without:
                events.append(Event(Operation("guard", guard=guard), at, at + length + (late if is_active else 0)))
            if is_active:
                events.append(Event(Operation("inner", guard=guard), at + 0.5, at + length))
            if is_active and guard == Y:
                events.append(Event(Operation("collective", "collective-permute", guard=guard), at + 1, at + length))
            at += length
    events.append(Event(Operation("update", in_update=True), at + 5, at + 15))
    events.append(Event(Operation("collective", "all-reduce", in_update=True), at + 15, at + 25))
    return DeviceRun(0, 90, at + 40, sorted(events, key=lambda event: event.start))


def test_an_end_that_came_late_is_no_later_than_the_next_run_of_the_device():
    update = Operation("update", in_update=True)
    first = DeviceRun(0, 100, 260, [Event(update, 100, 150), Event(update, 160, 260), Event(update, 210, 220)])
    other = DeviceRun(1, 110.0, 250.0, [Event(update, 110.0, 250.0)])
    second = DeviceRun(0, 200.0, 300.0, [Event(update, 200.0, 300.0)])
    assert in_turn([first, other, second]) == [
        DeviceRun(0, 100, 200, [Event(update, 100, 150), Event(update, 160, 200), Event(update, 210, 210)]),
        DeviceRun(1, 110.0, 250.0, [Event(update, 110.0, 250.0)]),
        DeviceRun(0, 200.0, 300.0, [Event(update, 200.0, 300.0)]),
    ]


def test_a_loop_is_the_task_of_its_tick():
    steps, found = measured(run_on_ipu_0(), Coordinates(0, 0, 0), PLAN)
    # 13 empty loops: 2 between F and the exchange, 10 more before B, 1 after it
    assert [(one.name, one.start, one.end, one.tick) for one in found] == [
        ("0F0", 100, 130, 0),
        ("exchange y", 132, 142, 0),
        ("0B0", 152, 202, 3),
        ("update", 208, 228, None),
        ("all-reduce", 218, 228, None),
    ]
    assert [(step.start, step.end) for step in steps] == [(90, 243)]


def test_an_end_that_comes_late_is_that_of_the_next_loop_at_the_latest():
    at_once, late = (measured(run_on_ipu_0(late=late), Coordinates(0, 0, 0), PLAN)[1] for late in (0, 500))
    assert late == at_once


def test_a_task_in_another_tick_than_planned_is_an_error():
    message = "step 0, tick 0, IPU 0 of replica 3: F of class 0 did not run, but the plan has micro-batch 0"
    with pytest.raises(TraceError, match=message):
        measured(run_on_ipu_0(task_in_tick=1), Coordinates(0, 3, 0), PLAN)


def test_what_an_ipu_runs_of_others_tasks_under_uniform_guards_is_no_task_of_its_own():
    uniform = dataclasses.replace(PLAN, uniform=True)
    run = run_on_ipu_0(plan=uniform)
    (loop,) = (event for event in run.events if event.operation.guard == ("F", 1) and event.start == 130)
    without_effect = Event(Operation("inner", guard=("F", 1)), loop.start + 0.5, loop.end)
    events = sorted([*run.events, without_effect], key=lambda event: event.start)
    found = measured(dataclasses.replace(run, events=events), Coordinates(0, 0, 0), uniform)
    assert found == measured(run_on_ipu_0(), Coordinates(0, 0, 0), PLAN)


def test_a_lost_event_is_an_error():
    with pytest.raises(TraceError, match=r"step 0 on IPU 0 of replica 0 has 3 loops F\.1 for 4 ticks: XLA lost events"):
        measured(run_on_ipu_0(without=(("F", 1), 2)), Coordinates(0, 0, 0), PLAN)


def test_the_clock_of_another_host_is_set_right():
    def part(instance, replica, ahead, start):
        of = {"instance": instance, "replica": replica, "ipu": 0, "step": 0}
        step = {**of, "start": start, "end": start + 3e9}
        task = {**of, "kind": "F", "name": "0F0", "start": start + 1e9, "end": start + 2e9, "tick": 0}
        recorded = {"steps": [step], "slices": [{**task, "stages": [0], "microbatch": 0}], "devices": 1}
        return InstanceTrace(ahead, 4e6, recorded)

    timeline = merged(PLAN, [part(0, 0, 0.0, 5e9), part(1, 1, 100e9, 106e9)])
    assert [(step.instance, step.start) for step in timeline.steps] == [(0, 0.0), (1, 1.0)]
    assert [(one.start, one.stages) for one in timeline.slices] == [(1.0, (0,)), (2.0, (0,))]
    assert timeline.clocks == "2 instances, whose hosts' clocks are compared to within 4.00 ms"


def timeline_by_hand():
    """0F0 takes 2 s, 1F0 and 1B0 1 s each, 0B0 3 s, of which 1 s is an all-reduce; then an update of 1 s."""
    slices = [
        Slice(0, 0, 0, 0, "F", "0F0", 1, 3, 0, (0,), 0),
        Slice(0, 0, 0, 0, "exchange", "exchange y", 3, 6, 0),
        Slice(0, 0, 0, 0, "B", "0B0", 6, 9, 3, (0,), 0),
        Slice(0, 0, 0, 0, "collective", "all-reduce", 7, 8),
        Slice(0, 0, 0, 0, "update", "update", 9, 10),
        Slice(0, 0, 1, 0, "exchange", "exchange y", 1, 3.5, 0),
        Slice(0, 0, 1, 0, "F", "1F0", 3.5, 4.5, 1, (1,), 0),
        Slice(0, 0, 1, 0, "B", "1B0", 4.5, 5.5, 2, (1,), 0),
    ]
    steps = (Step(0, 0, 0, 0, 0, 10.5), Step(0, 0, 1, 0, 0, 10))
    return Timeline(SCHEDULE, ("a", "b"), True, steps, tuple(slices))


def test_a_report_counts_what_the_timeline_has():
    report = make_report(timeline_by_hand())
    first, second = report.ipus
    assert (first.busy, first.waiting, first.update, first.other, first.step) == (4, 4, 1, 1.5, 10.5)
    assert (second.busy, second.waiting, second.update, second.other, second.step) == (2, 2.5, 0, 5.5, 10)
    # from 1 to 9 s; by the plan the tasks follow one another: 2 + 1 + 1 + 2 s
    assert (first.bubble_measured, second.bubble_measured) == (0.5, 0.75)
    assert first.bubble_planned == pytest.approx(1 - 4 / 6)
    assert second.bubble_planned == pytest.approx(1 - 2 / 6)
    assert (report.stage_seconds, report.slowest) == ((4, 2), (0,))
    times = "4000.00 ms  4000.00 ms  1000.00 ms  1500.00 ms  10500.00 ms"
    assert str(report).splitlines()[2].strip() == f"0    0  {times}           33.3%     50.0%"


def test_what_overlaps_counts_once():
    whole = timeline_by_hand()
    beside = Slice(0, 0, 0, 0, "collective", "all-gather", 7.5, 8.5), Slice(0, 0, 0, 0, "update", "update", 8.75, 10)
    first, _ = make_report(dataclasses.replace(whole, slices=(*whole.slices, *beside))).ipus
    assert (first.busy, first.waiting, first.update, first.other) == (3.5, 4.5, 1, 1.5)


def test_what_starts_beside_the_last_loop_does_not_end_it():
    rows = {guard: rows for guard, rows in PLAN.microbatches.items() if guard != B} | {B: PLAN.microbatches[B]}
    plan = dataclasses.replace(PLAN, microbatches=rows)
    run = run_on_ipu_0(plan=plan)
    last = max((event for event in run.events if event.operation.role == "guard"), key=lambda event: event.start)
    assert (last.operation.guard, last.end - last.start) == (B, 50)
    beside = Event(Operation("outside", "copy"), last.start + 0.25, last.start + 20)
    events = sorted([*run.events, beside], key=lambda event: event.start)
    found = measured(dataclasses.replace(run, events=events), Coordinates(0, 0, 0), plan)
    assert found == measured(run, Coordinates(0, 0, 0), plan)


def test_a_loop_that_is_one_kernel_is_a_task_where_the_plan_says_so():
    run = run_on_ipu_0()
    opaque = lambda op: dataclasses.replace(op, is_opaque=op.role == "guard")
    events = [dataclasses.replace(e, operation=opaque(e.operation)) for e in run.events if e.operation.role != "inner"]
    found = measured(dataclasses.replace(run, events=events), Coordinates(0, 0, 0), PLAN)
    assert found == measured(run, Coordinates(0, 0, 0), PLAN)


@pytest.mark.parametrize(
    ("placement", "seconds", "answer"),
    [
        ((0, 1), (3, 1), "nothing to move: no IPU has two stages in a row; cut the slowest one finer"),
        ((0, 0, 1), (1, 1, 2), "nothing to move: no split is more even"),
        ((0, None), (1, 1), "nothing to move: 1 local stages for 2 IPUs; cut the slowest finer"),
        ((0, 1, 1, 0), (1, 1, 1, 1), "the stages do not go round IPUs 0 to 1 in order, as balance_layers places them"),
        (
            (0, 0, 1, 0, 1),
            (2, 2, 1, 3, 3),  # of the four ways to make four runs of them, a | b c | d | e has the smallest largest one
            "move 'b' from IPU 0 to IPU 1: the largest load falls from 7000.00 ms to 6000.00 ms per micro-batch",
        ),
    ],
)
def test_what_to_move(placement, seconds, answer):
    schedule = make_schedule("sequential", ipus=2, gradient_accumulation=2, placement=placement)
    assert split_of(schedule, seconds, "abcdef") == answer


def test_a_program_of_a_cache_is_found_by_its_name_unless_another_has_it():
    one, other = {"a": Operation("scan")}, {"b": Operation("scan")}
    assert program_of("step", 54, {("step", 56): one, ("loss", 54): other}) is one
    assert program_of("step", 54, {("step", 56): one, ("step", 54): other}) is other
    assert program_of("step", 52, {("step", 56): one, ("step", 54): other}) is None
