"""Assemble a timeline: choose the runs of a profile, place their devices, and put all instances on one time axis.

The plan is shown beside the measurement: the schedule, simulated with each task's median time.

    measured   IPU 1   exchange y ......| 1F0 |ex.| 1B0 | ...
    plan       IPU 1                    | 1F0 | 1B0 | ...         the same tasks as if exchanges took no time

The difference between the two is the cost of exchanges, shared cores and the work between tasks.

With further axes, an IPU is a group of devices that run the same tasks. Its first device stands for it.

Instances on one host read the same CLOCK_MONOTONIC. With several hosts, all instances read their clocks right after a
barrier, a few times. The median difference to instance 0's clock is taken for the difference of the clocks. It is as
exact as the barrier is at releasing all instances at once; `clocks` says how far the readings were apart.
"""

import dataclasses
import json
import math
import socket
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base.annotations import Device, Function, Json
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.schedules import Schedule, Task
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.tracing._matching import Coordinates, measured, task_name
from ipu_jax.run.observe.tracing._profile import DeviceRun
from ipu_jax.run.observe.tracing.timeline import TASKS, Slice, Step, Timeline, TraceError
from ipu_jax.run.observe.tracing.trace_report import Costs, median_costs, simulated

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
            found = measured(run, at, plan)
            at = at._replace(step=at.step + len(found.steps))
            steps += found.steps
            slices += found.slices
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
