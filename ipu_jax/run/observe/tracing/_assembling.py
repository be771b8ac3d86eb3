"""Assemble a timeline: choose the runs of a profile, place their devices, and put all instances on one time axis."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.tracing._matching import Measured, Place, measured
from ipu_jax.run.observe.tracing._merging import Part, told
from ipu_jax.run.observe.tracing._planned import median_costs, planned
from ipu_jax.run.observe.tracing._profile import Run
from ipu_jax.run.observe.tracing.errors import TraceError
from ipu_jax.run.observe.tracing.timeline import Slice, Step, Timeline


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
    """Return the first `count` steps of every device of this instance, numbered from 0.

    Raises:
        TraceError: the profile does not fit the plan, or a device is on none of the meshes.
    """
    found: list[Measured] = []
    devices = {device.id: device for device in jax.local_devices()}
    for number in sorted({run.device for run in runs}):
        place, done = _place_of(devices[number], plan, meshes), 0
        steps, slices = list[Step](), list[Slice]()
        for run in (run for run in runs if run.device == number):
            one = measured(run, place, plan)
            steps += [dataclasses.replace(step, step=step.step + done) for step in one.steps]
            slices += [dataclasses.replace(of, step=of.step + done) for of in one.slices]
            done += len(one.steps)
        kept = [step for step in steps if step.step < count]
        found.append(Measured(kept, [one for one in slices if one.step < count]))
    return found


def _place_of(device: Any, plan: PlanNames, meshes: list[Mesh]) -> Place:
    for mesh in meshes:
        if mesh.shape[IPU_AXIS] == plan.ipus:
            for replica, row in enumerate(mesh.devices):
                if device in row.tolist():
                    return Place(popdist.get_instance_index(), replica, row.tolist().index(device))
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
    return Timeline(plan.schedule, names, plan.backward, tuple(steps), tuple(slices), of_plan, told(parts))
