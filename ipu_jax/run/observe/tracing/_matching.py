"""Find out which task each loop of a profile was: its tick is the number of its earlier runs in the scan.

    scan       |-------------------------------------------------------------|      one step
    F.0        |-0-|     |-1-|     |2|                                              tick 0, 1, 2: the plan has 0F0, 0F1
    y.0             |--|      |--|    |--|
    update                                                                    |--|

Every loop runs once in each tick, even where the IPU has no task: then its body does not run. So the plan says in which
ticks the body must have run, and the profile in which ticks it did. If they differ, a `TraceError` says where. XLA
turns a loop with little to do into one kernel. Then only the plan says in which ticks the loop ran a task.
"""

import bisect
import dataclasses
from collections import defaultdict
from typing import NamedTuple

from ipu_jax.core.engine.labels import Guard, PlanNames
from ipu_jax.core.engine.order import EXCHANGES
from ipu_jax.run.observe.tracing._profile import DeviceRun, Event
from ipu_jax.run.observe.tracing.timeline import Kind, Slice, Step, TraceError


class Coordinates(NamedTuple):
    """Hold the instance, replica and IPU of a device, and the number of a step."""

    instance: int
    replica: int
    ipu: int
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Hold the steps of one run on one IPU, with times in nanoseconds of the clock."""

    steps: list[Step]
    slices: list[Slice]


def measured(run: DeviceRun, first: Coordinates, plan: PlanNames) -> Measured:
    """Return the steps of a plan in a run on one IPU. The first one has the number `first.step`.

    Raises:
        TraceError: the profile does not fit the plan.
    """
    scans = [event for event in run.events if event.operation.role == "scan"]
    starts = [scan.start for scan in scans]
    of_scan: list[list[Event]] = [[] for _ in scans]
    for event in run.events:
        k = bisect.bisect_right(starts, event.start) - 1
        if event.operation.role != "scan" and k >= 0:
            of_scan[k].append(event)
    steps: list[Step] = []
    slices: list[Slice] = []
    # what a call of several steps does before its loop over the steps belongs to no step
    loops_over_steps = [e for e in run.events if e.operation.role == "outside" and e.operation.name == "while"]
    around = [loop for loop in loops_over_steps if scans and loop.start < scans[0].start < scans[0].end <= loop.end]
    begin = max((loop.start for loop in around), default=run.start)
    for scan, events in zip(scans, of_scan, strict=True):
        if scan.operation.plan is not plan:  # such as an evaluation in the same program
            begin = max([begin, *(event.end for event in events if event.operation.role == "guard")])
            continue
        at = first._replace(step=first.step + len(steps))
        loops = _ended([e for e in events if e.operation.role == "guard"], events)
        scanned = loops[-1].end if loops else begin
        of_step = _tasks(plan, at, loops, events)
        updating = [e for e in events if e.operation.role == "update" or e.operation.in_update]
        of_step += _update(at, [event for event in updating if event.start >= scanned])
        collectives = [event for event in events if event.operation.role == "collective"]
        of_step += _collectives(at, collectives, [one for one in of_step if one.kind == "exchange"])
        is_last = scan is scans[-1] and not around
        end = run.end if is_last else max([scanned, *(one.end for one in of_step)])
        steps.append(Step(*at, begin, end))
        slices += sorted(of_step, key=lambda one: (one.start, -one.end))
        begin = end
    return Measured(steps, slices)


def _ended(loops: list[Event], events: list[Event]) -> list[Event]:
    """Return the loops of a step with corrected ends: a loop ends before the next loop starts, which waits for it.

    The operations after the scan wait for its last loop.
    """
    if not loops:
        return []
    following = [loop.start for loop in loops[1:]]
    outside = [e.start for e in events if e.operation.role in ("update", "outside") and e.start > loops[-1].start]
    following.append(min(outside, default=loops[-1].end))
    ends = [min(loop.end, limit) for loop, limit in zip(loops, following, strict=True)]
    return [dataclasses.replace(loop, end=end) for loop, end in zip(loops, ends, strict=True)]


def _tasks(plan: PlanNames, at: Coordinates, loops: list[Event], events: list[Event]) -> list[Slice]:
    """Return the tasks and exchanges of a step."""
    of_guard: dict[Guard | None, list[Event]] = defaultdict(list)
    inner: dict[Guard | None, list[float]] = defaultdict(list)
    for loop in loops:
        of_guard[loop.operation.guard].append(loop)
    for event in events:
        if event.operation.role != "guard":
            inner[event.operation.guard].append(event.start)
    found: list[Slice] = []
    for guard, rows in plan.microbatches.items():
        if len(of_guard[guard]) != plan.ticks:
            raise TraceError(
                f"step {at.step} on IPU {at.ipu} of replica {at.replica} has {len(of_guard[guard])} loops "
                f"{guard[0]}.{guard[1]} for {plan.ticks} ticks: XLA lost events, or changed the program; record fewer "
                "steps at once"
            )
        ran = inner[guard]
        for tick, loop in enumerate(of_guard[guard]):
            microbatch = int(rows[tick, at.ipu])
            k = bisect.bisect_left(ran, loop.start)
            has_run = k < len(ran) and ran[k] < loop.end
            if loop.operation.is_opaque:
                has_run = microbatch >= 0
            elif plan.uniform and microbatch < 0:
                has_run = False  # it ran another IPU's task, without effect
            elif has_run != (microbatch >= 0):
                did, planned = ("ran", "no task") if has_run else ("did not run", f"micro-batch {microbatch}")
                raise TraceError(
                    f"step {at.step}, tick {tick}, IPU {at.ipu} of replica {at.replica}: {guard[0]} of class "
                    f"{guard[1]} {did}, but the plan has {planned}: this is an error of ipu_jax"
                )
            if has_run:
                found.append(_slice(plan, at, guard, tick, microbatch, loop))
    return found


def _slice(plan: PlanNames, at: Coordinates, guard: Guard, tick: int, microbatch: int, loop: Event) -> Slice:
    if guard[0] in EXCHANGES:
        received = plan.received.get(guard, {}).get(at.ipu)
        return Slice(*at, "exchange", f"exchange {guard[0]}", loop.start, loop.end, tick, received=received)
    segment = plan.segment(guard[1], at.ipu)
    stages = tuple(range(segment.first, segment.first + len(segment.stages)))
    kind: Kind = guard[0]  # pyright: ignore[reportAssignmentType]
    name, flops = task_name(stages, kind, microbatch), plan.flops.get(guard)
    return Slice(*at, kind, name, loop.start, loop.end, tick, stages, microbatch, flops)


def task_name(stages: tuple[int, ...], kind: Kind, microbatch: int) -> str:
    """Return the name of a task.

    >>> task_name((2,), "F", 0), task_name((2, 3), "W", 1), task_name((4,), "FB", 0)
    ('2F0', '2-3W1', '4F0 4B0')
    """
    which = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
    return " ".join(f"{which}{letter}{microbatch}" for letter in kind)


def _update(at: Coordinates, events: list[Event]) -> list[Slice]:
    if not events:
        return []
    start, end = min(event.start for event in events), max(event.end for event in events)
    return [Slice(*at, "update", "update", start, end)]


def _collectives(at: Coordinates, events: list[Event], exchanges: list[Slice]) -> list[Slice]:
    """Return the collectives, except those within exchanges, which are slices already."""
    starts = sorted(one.start for one in exchanges)
    ends = sorted(one.end for one in exchanges)
    found: list[Slice] = []
    for event in events:
        k = bisect.bisect_right(starts, event.start) - 1
        if k < 0 or event.start > ends[k]:
            found.append(Slice(*at, "collective", event.operation.name, event.start, event.end))
    return found
