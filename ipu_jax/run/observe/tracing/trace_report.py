"""Report where the time of an IPU went, what the plan promised, and which layers to move.

    replica  IPU     busy  waiting   update    other     step   bubble planned  measured
          0    0  12.1 ms   3.0 ms   2.2 ms   0.4 ms  17.7 ms            20.0%     21.3%

A step of an IPU consists of busy time (tasks), waiting (exchanges, and collectives wherever they are), update, and all
other time: the bookkeeping between tasks, and the work before and after the scan. The four add up to the step.

The bubble is the share of the time, from a replica's first task to its last one, in which the IPU ran no task.
"""

import bisect
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.analysis.balance import balance_layers
from ipu_jax.core.schedules import Schedule
from ipu_jax.run.observe.tracing.timeline import TASKS, WAITING, Kind, Slice, Timeline, group_in_words

Costs = dict[tuple[tuple[int, ...], Kind], float]

_WORTH_MOVING = 0.02  # a smaller gain is within the run-to-run variation of measured costs


@dataclasses.dataclass(frozen=True)
class IpuTimes:
    """Hold where the time of one IPU went, in seconds of a mean step.

    Attributes:
        replica, ipu, instance: where.
        busy: in tasks, without the collectives in them.
        waiting: in exchanges and in collectives.
        update: in the weight update, without its collectives.
        other: the rest of the step.
        step: the whole step.
        bubble_planned, bubble_measured: the share of the time between the first task and the last in which the IPU
            ran no task; planned with each task's median time and exchanges that take no time.
    """

    replica: int
    ipu: int
    instance: int
    busy: float
    waiting: float
    update: float
    other: float
    step: float
    bubble_planned: float
    bubble_measured: float


@dataclasses.dataclass(frozen=True, repr=False)
class TraceReport(Shown):
    """Summarise a timeline; `str()` makes the text to print.

    Attributes:
        steps: how many steps were measured.
        step_seconds: the mean step of the slowest IPU.
        ipus: one report per IPU and replica.
        stage_seconds: per stage, the median seconds of its tasks for one micro-batch; stages that run as one segment
            share its time equally.
        slowest: the stages of the segment that takes the longest on its IPU.
        split: which stages `balance_layers` would move, given these costs.
        schedule, stages, clocks, devices: as in `Timeline`.
    """

    steps: int
    step_seconds: float
    ipus: tuple[IpuTimes, ...]
    stage_seconds: tuple[float, ...]
    slowest: tuple[int, ...]
    split: str
    schedule: str
    stages: tuple[str, ...]
    clocks: str
    devices: int = 1

    def _shown(self) -> list[str | Table]:
        rows = [["replica", "IPU", "busy", "waiting", "update", "other", "step", "bubble planned", "measured"]]
        for one in self.ipus:
            times = [f"{1e3 * s:.2f} ms" for s in (one.busy, one.waiting, one.update, one.other, one.step)]
            bubbles = [f"{one.bubble_planned:.1%}", f"{one.bubble_measured:.1%}"]
            rows.append([str(one.replica), str(one.ipu), *times, *bubbles])
        seconds = sum(self.stage_seconds[stage] for stage in self.slowest)
        names = " + ".join(repr(self.stages[stage]) for stage in self.slowest)
        steps = f"{counted(self.steps, 'step')} of {1e3 * self.step_seconds:.2f} ms (mean of the slowest IPU)"
        return [
            f"{steps} under {self.schedule}; {self.clocks}{group_in_words(self.devices)}",
            Table(rows, left=0),
            f"slowest stage: {names}, {1e3 * seconds:.2f} ms for the tasks of one micro-batch",
            f"split: {self.split}",
        ]


def make_report(timeline: Timeline) -> TraceReport:
    """Return the summary of a timeline."""
    costs = median_costs(timeline.slices)
    plan = simulated(timeline.schedule, costs)
    spans: dict[tuple[int, int], tuple[float, float]] = {}  # by replica and step
    for one in timeline.slices:
        if one.kind in TASKS:
            start, end = spans.get((one.replica, one.step), (one.start, one.end))
            spans[one.replica, one.step] = min(start, one.start), max(end, one.end)
    ipus: list[IpuTimes] = []
    for replica, ipu in timeline.ipus:
        span = sum(end - start for (of, _), (start, end) in spans.items() if of == replica)
        planned = 1 - plan.busy[ipu] / plan.makespan if plan.makespan else 0.0
        ipus.append(_times_of_ipu(timeline, replica, ipu, span, planned))
    stage_seconds = _per_stage(timeline.schedule, costs)
    segments = {stages for stages, _ in costs}
    return TraceReport(
        len({step.step for step in timeline.steps}),
        max(one.step for one in ipus),
        tuple(ipus),
        stage_seconds,
        max(segments, key=lambda stages: sum(stage_seconds[stage] for stage in stages)),
        split_of(timeline.schedule, stage_seconds, timeline.stages),
        timeline.schedule.name,
        timeline.stages,
        timeline.clocks,
        timeline.devices,
    )


def _times_of_ipu(timeline: Timeline, replica: int, ipu: int, span: float, bubble_planned: float) -> IpuTimes:
    """Return the report of an IPU, whose replica's steps have tasks for `span` seconds."""
    mine = timeline.of_ipu(replica, ipu)
    steps = [step for step in timeline.steps if (step.replica, step.ipu) == (replica, ipu)]
    # collectives lie in tasks and in the update, and may overlap
    seconds = [_covered(one for one in mine if one.kind in kinds) for kinds in (WAITING, (*WAITING, *TASKS))]
    whole, count = sum(step.end - step.start for step in steps), len(steps)
    waiting, busy, update, other = np.diff([0.0, *seconds, _covered(mine), whole]).tolist()
    per_step = (each / count for each in (busy, waiting, update, other, whole))
    bubbles = {"bubble_planned": bubble_planned, "bubble_measured": 1 - busy / span if span else 0.0}
    return IpuTimes(replica, ipu, steps[0].instance, *per_step, **bubbles)


def _covered(slices: Iterable[Slice]) -> float:
    """Return for how many seconds at least one of the slices of an IPU lasts."""
    total, until = 0.0, -math.inf
    for one in sorted(slices, key=lambda one: one.start):
        total += max(0.0, one.end - max(one.start, until))
        until = max(until, one.end)
    return total


def net_seconds(slices: Iterable[Slice]) -> list[tuple[Slice, float]]:
    """Return the tasks of one IPU, each with its seconds except the waiting in collectives."""
    in_order = sorted(slices, key=lambda one: one.start)
    waits = [one for one in in_order if one.kind == "collective"]
    starts, found = [wait.start for wait in waits], list[tuple[Slice, float]]()
    for task in (one for one in in_order if one.kind in TASKS):
        inside = waits[bisect.bisect_left(starts, task.start) : bisect.bisect_left(starts, task.end)]
        found.append((task, _covered([task, *inside]) - _covered(inside)))
    return found


def median_costs(slices: Iterable[Slice]) -> Costs:
    """Return the median seconds of each segment's tasks, by the segment's stages and the kind of task."""
    of_ipu: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for one in slices:
        of_ipu[one.replica, one.ipu].append(one)
    seconds: dict[tuple[tuple[int, ...], Kind], list[float]] = defaultdict(list)
    for mine in of_ipu.values():
        for task, net in net_seconds(mine):
            seconds[task.stages, task.kind].append(net)
    return {key: statistics.median(values) for key, values in seconds.items()}


def simulated(schedule: Schedule, costs: Costs):
    """Return a run of a schedule in which each task takes its median time, and exchanges take no time."""
    stages = len(schedule.placement)
    per_stage = {kind: [0.0] * stages for kind in ("F", "B", "W")}
    for (of_segment, kind), seconds in costs.items():
        for stage in of_segment:
            # the simulator divides the cost of a concurrent stage by the IPUs
            sharers = schedule.ipus if schedule.placement[stage] is None else 1
            for letter in kind:
                per_stage[letter][stage] = seconds * sharers / len(of_segment) / len(kind)
    backward = [b + w for b, w in zip(per_stage["B"], per_stage["W"], strict=True)]
    return schedule.simulate(per_stage["F"], backward, per_stage["W"], lockstep=True)


def _per_stage(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    seconds = [0.0] * len(schedule.placement)
    for (stages, _), cost in costs.items():
        for stage in stages:
            seconds[stage] += cost / len(stages)
    return tuple(seconds)


def split_of(schedule: Schedule, seconds: Sequence[float], names: Sequence[str]) -> str:
    """Return which stages `balance_layers` would move, in words, given the seconds of each stage.

    >>> from ipu_jax.core.schedules import make_schedule
    >>> schedule = make_schedule("grouped", ipus=2, gradient_accumulation=4, placement=[0, 0, 0, 1])
    >>> print(split_of(schedule, [2e-3, 2e-3, 2e-3, 1e-3], ["a", "b", "c", "d"]))
    move 'c' from IPU 0 to IPU 1: the largest load falls from 6.00 ms to 4.00 ms per micro-batch
    """
    local = [stage for stage, place in enumerate(schedule.placement) if place is not None]
    if len(local) < schedule.ipus or not any(seconds[stage] for stage in local):
        return f"nothing to move: {len(local)} local stages for {schedule.ipus} IPUs; cut the slowest finer"
    now = [0.0] * schedule.ipus
    for stage in local:
        now[schedule.placement[stage] or 0] += seconds[stage]
    places = [schedule.placement[stage] or 0 for stage in local]
    runs = [place for k, place in enumerate(places) if k == 0 or place != places[k - 1]]
    rounds = 1 if runs == sorted(runs) else len(runs) // schedule.ipus
    if runs != sorted(runs) and runs != [k % schedule.ipus for k in range(rounds * schedule.ipus)]:
        return f"the stages do not go round IPUs 0 to {schedule.ipus - 1} in order, as balance_layers places them"
    best = balance_layers(local, [seconds[stage] for stage in local], schedule.ipus, rounds=rounds)
    moves = [
        f"{names[stage]!r} from IPU {schedule.placement[stage]} to IPU {ipu}"
        for stage, ipu in zip(local, best.ipus, strict=True)
        if ipu != schedule.placement[stage]
    ]
    if not moves or max(best.loads) > (1 - _WORTH_MOVING) * max(now):
        is_finest = len(local) == len(runs)
        why = "no IPU has two stages in a row; cut the slowest one finer" if is_finest else "no split is more even"
        return f"nothing to move: {why}"
    change = f"the largest load falls from {1e3 * max(now):.2f} ms to {1e3 * max(best.loads):.2f} ms per micro-batch"
    return f"move {', '.join(moves)}: {change}"
