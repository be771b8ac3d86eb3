"""Assemble a timeline: choose the runs of a profile, place their devices, and put all instances on one time axis.

The plan is shown beside the measurement: the schedule, simulated with each task's median time.

    measured   IPU 1   exchange y ......| 1F0 |ex.| 1B0 | ...
    plan       IPU 1                    | 1F0 | 1B0 | ...         the same tasks as if exchanges took no time

The difference between the two is the cost of exchanges, shared cores and the work between tasks.

With further axes, an IPU is a group of devices that run the same tasks. Its first device stands for it.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.core.schedules import Schedule, Task
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.tracing._matching import Measured, Place, measured, task_name
from ipu_jax.run.observe.tracing._merging import Part, told
from ipu_jax.run.observe.tracing._profile import Run
from ipu_jax.run.observe.tracing.costs import Costs, median_costs, simulated
from ipu_jax.run.observe.tracing.timeline import TASKS, Kind, Slice, Step, Timeline, TraceError


def main_plan(runs: list[Run]) -> PlanNames:
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


def measured_by_device(plan: PlanNames, runs: list[Run], meshes: list[Mesh], count: int) -> list[Measured]:
    """Return the first `count` steps of the first device of each IPU of this instance, numbered from 0.

    Raises:
        TraceError: the profile does not fit the plan, or a device is on none of the meshes.
    """
    found: list[Measured] = []
    devices = {device.id: device for device in jax.local_devices()}
    meshes = _likeliest_first(plan, runs, meshes)
    for number in sorted({run.device for run in runs}):
        place, done = _place_of(devices[number], meshes), 0
        if place is None:
            continue
        steps, slices = list[Step](), list[Slice]()
        for run in (run for run in runs if run.device == number):
            one = measured(run, place, plan)
            steps += [dataclasses.replace(step, step=step.step + done) for step in one.steps]
            slices += [dataclasses.replace(of, step=of.step + done) for of in one.slices]
            done += len(one.steps)
        kept = [step for step in steps if step.step < count]
        found.append(Measured(kept, [one for one in slices if one.step < count]))
    return found


def devices_per_ipu(plan: PlanNames, runs: list[Run], meshes: list[Mesh]) -> int:
    """Return the number of devices in the group that is an IPU."""
    return math.prod(_likeliest_first(plan, runs, meshes)[0].devices.shape[2:])


def _likeliest_first(plan: PlanNames, runs: list[Run], meshes: list[Mesh]) -> list[Mesh]:
    """Return the meshes with the plan's number of IPUs, those with exactly the devices that ran it first."""
    ran = {run.device for run in runs if any(event.operation.plan is plan for event in run.events)}
    own = jax.process_index()

    def differs(mesh: Mesh) -> bool:
        return {device.id for device in mesh.devices.flat if device.process_index == own} != ran

    return sorted((mesh for mesh in meshes if mesh.shape[IPU_AXIS] == plan.ipus), key=differs)


def _place_of(device: Any, meshes: list[Mesh]) -> Place | None:
    """Return the place of a device; None if it is not the first one of an IPU."""
    for mesh in meshes:
        for (replica, ipu, *further), one in np.ndenumerate(mesh.devices):
            if one == device:
                return None if any(further) else Place(popdist.get_instance_index(), replica, ipu)
    raise TraceError(
        f"{device} is on no mesh that the outputs name: return from your program an array on the pipeline's mesh"
    )


def merged(plan: PlanNames, parts: list[Part]) -> Timeline:
    """Return the timeline of all instances, in seconds from the start of the first step."""
    begin = min(step["start"] - part.ahead for part in parts for step in part.recorded["steps"])

    def read(part: Part, name: str) -> list[dict[str, Any]]:
        on_axis = lambda time: (time - part.ahead - begin) / 1e9  # noqa: E731
        times = lambda fields: {key: on_axis(fields[key]) for key in ("start", "end")}  # noqa: E731
        return [{**fields, **times(fields)} for fields in part.recorded[name]]

    order = lambda one: (one.replica, one.ipu, one.start, -one.end)  # noqa: E731
    steps = sorted((Step(**fields) for part in parts for fields in read(part, "steps")), key=order)
    as_slice = lambda fields: Slice(**{**fields, "stages": tuple(fields["stages"])})  # noqa: E731
    slices = sorted((as_slice(fields) for part in parts for fields in read(part, "slices")), key=order)
    names = tuple(name for segment in plan.segments for name in segment.stages)
    of_plan = planned(plan.schedule, median_costs(slices), steps, slices)
    group = max(part.recorded["devices"] for part in parts)
    return Timeline(plan.schedule, names, plan.backward, tuple(steps), tuple(slices), of_plan, told(parts), group)


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
            times = [(run.start_times[task], run.end_times[task]) for task in _tasks(stages, kind, microbatch)]
            start, end = min(start for start, _ in times), max(end for _, end in times)
            name = task_name(stages, kind, microbatch)
            for step in sorted({step.step for step in steps} & begins.keys()):
                at = begins[step]
                found += [
                    Slice(0, 0, ipu, step, kind, name, at + start, at + end, None, stages, microbatch) for ipu in ipus
                ]
    return tuple(sorted(found, key=lambda one: (one.ipu, one.start, -one.end)))


def _tasks(stages: tuple[int, ...], kind: Kind, microbatch: int) -> list[Task]:
    return [Task(stage, letter, microbatch) for stage in stages for letter in ("F", "B", "W") if letter in kind]
