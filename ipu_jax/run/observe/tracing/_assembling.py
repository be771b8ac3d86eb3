"""Assemble a timeline: find the task of each loop of a profile, and put all instances on one time axis.

    scan       |-------------------------------------------------------------|      one step
    F.0        |-0-|     |-1-|     |2|                                              tick 0, 1, 2: the plan has 0F0, 0F1
    y.0             |--|      |--|    |--|
    update                                                                    |--|

Every loop runs once in each tick, even where the IPU has no task: then its body does not run. So the plan says in which
ticks the body must have run, and the profile in which ticks it did. If they differ, a `TraceError` says where. XLA
turns a loop with little to do into one kernel. Then only the plan says in which ticks the loop ran a task.

The plan is shown beside the measurement: the schedule, simulated with each task's median time.

    measured   IPU 1   exchange y ......| 1F0 |ex.| 1B0 | ...
    plan       IPU 1                    | 1F0 | 1B0 | ...         the same tasks as if exchanges took no time

The difference between the two is the cost of exchanges, shared cores and the work between tasks.

With further axes, an IPU is a group of devices that run the same tasks. Its first device stands for it.

Instances on one host read the same CLOCK_MONOTONIC. With several hosts, all instances read their clocks right after a
barrier, a few times. The median difference to instance 0's clock is taken for the difference of the clocks. It is as
exact as the barrier is at releasing all instances at once; `clocks` says how far the readings were apart.
"""

import bisect
import dataclasses
import json
import math
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base.annotations import Device, Function, Json
from ipu_jax.core.engine.labels import Guard, PlanNames
from ipu_jax.core.engine.order import EXCHANGES
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.schedules import Schedule, Task
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.tracing._profile import DeviceRun, Event
from ipu_jax.run.observe.tracing.timeline import TASKS, Kind, Slice, Step, Timeline, TraceError
from ipu_jax.run.observe.tracing.trace_report import Costs, median_costs, simulated


class Coordinates(NamedTuple):
    """Hold the instance, replica and IPU of a device, and the number of a step."""

    instance: int
    replica: int
    ipu: int
    step: int = 0


def measured(run: DeviceRun, first: Coordinates, plan: PlanNames) -> tuple[list[Step], list[Slice]]:
    """Return the steps of a plan in a run on one IPU, and their slices, with times in nanoseconds of the clock.

    The first step has the number `first.step`.

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
    return steps, slices


def _ended(loops: list[Event], events: list[Event]) -> list[Event]:
    """Return the loops of a step with corrected ends: a loop ends before the next loop starts, which waits for it.

    What starts after the scan and after all operations of its last loop waits for that loop, too.
    """
    if not loops:
        return []
    last = loops[-1]
    begun = max(e.start for e in events if e.start >= last.start and e.operation.guard == last.operation.guard)
    outside = [e.start for e in events if e.operation.role in ("update", "outside") and e.start > begun]
    following = [*(loop.start for loop in loops[1:]), min([last.end, *outside])]
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


_ROUNDS: Final = 9


def main_plan(runs: list[DeviceRun]) -> PlanNames:
    """Return the plan that took the most time; other plans, such as an evaluation's, are left out.

    Raises:
        TraceError: there is no plan.
    """
    seconds: dict[int, float] = {}
    plans: dict[int, PlanNames] = {}
    for run in runs:
        for event in run.events:
            plan = event.operation.plan if event.operation.role == "scan" else None
            if plan is not None:
                plans[id(plan)] = plan
                seconds[id(plan)] = seconds.get(id(plan), 0.0) + event.end - event.start
    if not plans:
        raise TraceError(
            "the recorded programs have no scan over ticks that this process has planned: Replicas have none, nor a "
            "schedule of one tick, nor a program from a cache of executables that another version of ipu_jax filled"
        )
    return plans[max(seconds, key=lambda key: seconds[key])]


def recorded_here(plan: PlanNames, runs: list[DeviceRun], meshes: list[Mesh], count: int) -> dict[str, Any]:
    """Return what this instance recorded, as a JSON value with times in nanoseconds.

    It contains the first `count` steps of the first device of each IPU, numbered from 0, and the devices of an IPU.

    Raises:
        TraceError: the profile does not fit the plan, or a device is on none of the meshes.
    """
    ran = {run.device for run in runs if any(event.operation.plan is plan for event in run.events)}
    own = jax.process_index()

    def differs(mesh: Mesh) -> bool:
        return {device.id for device in mesh.devices.flat if device.process_index == own} != ran

    # the meshes with the plan's number of IPUs, those with exactly the devices that ran it first
    likely = sorted((mesh for mesh in meshes if mesh.shape[IPU_AXIS] == plan.ipus), key=differs)
    steps, slices = list[Step](), list[Slice]()
    for device in jax.local_devices():
        of_device = [run for run in runs if run.device == device.id]
        at = _coordinates_of(device, likely) if of_device else None
        if at is None:
            continue
        for run in of_device:
            of_run, slices_of_run = measured(run, at, plan)
            at = at._replace(step=at.step + len(of_run))
            steps += of_run
            slices += slices_of_run
    return {
        "steps": [vars(step) for step in steps if step.step < count],
        "slices": [vars(one) for one in slices if one.step < count],
        "devices": math.prod(likely[0].devices.shape[2:]),
    }


def _coordinates_of(device: Device, meshes: list[Mesh]) -> Coordinates | None:
    """Return the coordinates of a device; None if it is not the first one of an IPU."""
    for mesh in meshes:
        for (replica, ipu, *further), one in np.ndenumerate(mesh.devices):
            if one == device:
                return None if any(further) else Coordinates(popdist.get_instance_index(), replica, ipu)
    raise TraceError(
        f"{device} is on no mesh that the outputs name: return from your program an array on the pipeline's mesh"
    )


@dataclasses.dataclass(frozen=True)
class InstanceTrace:
    """Hold what one instance recorded, with the times of its own clock.

    Attributes:
        ahead: by how many nanoseconds its clock is ahead of instance 0's.
        uncertainty: how far the readings behind `ahead` were apart, in nanoseconds; 0 if all are on one host.
        recorded: the result of `recorded_here`, or {"error": a text}.
    """

    ahead: float
    uncertainty: float
    recorded: Json


def gathered(recorded: Json) -> list[InstanceTrace]:
    """Return what every instance recorded. All instances must call this. Communicates a few bytes per slice."""
    instance, count = popdist.get_instance_index(), popdist.get_num_instances()
    if count == 1:
        return [InstanceTrace(0.0, 0.0, recorded)]
    hosts = _from_each(_host())
    readings = np.zeros((count, 0))
    if len(set(hosts)) > 1:
        mine: list[int] = []
        for _ in range(_ROUNDS):
            popdist.barrier("clocks")
            mine.append(time.monotonic_ns())
        readings = np.array(_from_each(mine), np.int64)
    ahead, apart = clock_differences(readings)
    all_recorded = _from_each(recorded)
    assert all_recorded[instance] == json.loads(json.dumps(recorded)), "each instance gets back what it gave"
    return [InstanceTrace(ahead[i], apart[i], all_recorded[i]) for i in range(count)]


def clock_differences(readings: Json) -> tuple[list[float], list[float]]:
    """Return by how much each clock is ahead of the first one, and how far its readings were apart.

    >>> clock_differences(np.array([[10, 20, 30], [1010, 1021, 1029]]))
    ([0.0, 1000.0], [0.0, 2.0])
    """
    if not readings.shape[1]:
        return [0.0] * len(readings), [0.0] * len(readings)
    differences = (readings - readings[:1]).tolist()
    return [float(statistics.median(row)) for row in differences], [float(max(row) - min(row)) for row in differences]


def merged(plan: PlanNames, traces: list[InstanceTrace]) -> Timeline:
    """Return the timeline of all instances, in seconds from the start of the first step."""
    begin = min(step["start"] - trace.ahead for trace in traces for step in trace.recorded["steps"])

    def read(kind: Function, name: str) -> tuple[Json, ...]:
        found: list[Json] = []
        for trace in traces:
            for fields in trace.recorded[name]:
                times = {key: (fields[key] - trace.ahead - begin) / 1e9 for key in ("start", "end")}
                found.append(kind(**{**fields, **times}))
        return tuple(sorted(found, key=lambda one: (one.replica, one.ipu, one.start, -one.end)))

    steps: tuple[Step, ...] = read(Step, "steps")
    slices = tuple(dataclasses.replace(one, stages=tuple(one.stages)) for one in read(Slice, "slices"))
    names = tuple(name for segment in plan.segments for name in segment.stages)
    of_plan = planned(plan.schedule, median_costs(slices), steps, slices)
    group = max(trace.recorded["devices"] for trace in traces)
    return Timeline(plan.schedule, names, plan.backward, steps, slices, of_plan, told(traces), group)


def planned(schedule: Schedule, costs: Costs, steps: Iterable[Step], slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Return the plan of each step, from the start of its first task."""
    run = simulated(schedule, costs)
    begins: dict[int, float] = {}
    for one in slices:
        if one.kind in TASKS:
            begins[one.step] = min(begins.get(one.step, one.start), one.start)
    found: list[Slice] = []
    for stages, kind in costs:
        place = schedule.placement[stages[0]]
        ipus = range(schedule.ipus) if place is None else [place]
        for microbatch in range(schedule.micro_batches):
            tasks = [
                Task(stage, letter, microbatch) for stage in stages for letter in ("F", "B", "W") if letter in kind
            ]
            times = [(run.start_times[task], run.end_times[task]) for task in tasks]
            start, end = min(start for start, _ in times), max(end for _, end in times)
            name = task_name(stages, kind, microbatch)
            for step in sorted({step.step for step in steps} & begins.keys()):
                at = begins[step]
                found += [
                    Slice(0, 0, ipu, step, kind, name, at + start, at + end, None, stages, microbatch) for ipu in ipus
                ]
    return tuple(sorted(found, key=lambda one: (one.ipu, one.start, -one.end)))


def told(traces: list[InstanceTrace]) -> str:
    """Describe in words how the clocks of the instances were aligned."""
    worst = max(trace.uncertainty for trace in traces)
    if len(traces) == 1:
        return "one instance"
    if not worst:
        return f"{len(traces)} instances on one clock"
    return f"{len(traces)} instances, whose hosts' clocks are compared to within {worst / 1e6:.2f} ms"


def _host() -> str:
    """Return a name that is the same for instances that share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _from_each(value: Json) -> list[Json]:
    """Return the JSON value of each instance."""
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    found: list[Json] = []
    for root in range(popdist.get_num_instances()):
        size = popdist.broadcast(len(payload), root)
        own = payload if root == popdist.get_instance_index() else np.zeros(size, np.uint8)
        found.append(json.loads(np.asarray(popdist.broadcast(own, root)).tobytes()))
    return found
