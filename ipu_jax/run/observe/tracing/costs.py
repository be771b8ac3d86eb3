"""Find what each task cost in a measured timeline, and simulate a schedule with these costs."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from ipu_jax.core.schedules import Schedule
from ipu_jax.run.observe.tracing.timeline import TASKS, Kind, Slice

Costs = dict[tuple[tuple[int, ...], Kind], float]


def net_seconds(tasks: Iterable[Slice], collectives: Iterable[Slice]) -> list[tuple[Slice, float]]:
    """Return the tasks of one IPU, each with its seconds except the time that it waited in collectives."""
    waits = sorted(collectives, key=lambda one: one.start)
    found, k = list[tuple[Slice, float]](), 0
    for task in sorted(tasks, key=lambda one: one.start):
        while k < len(waits) and waits[k].start < task.start:
            k += 1
        inside, j = 0.0, k
        while j < len(waits) and waits[j].start < task.end:
            inside += min(waits[j].end, task.end) - waits[j].start
            j += 1
        found.append((task, task.seconds - inside))
    return found


def median_costs(slices: Iterable[Slice]) -> Costs:
    """Return the median seconds of each segment's tasks, by the segment's stages and the kind of task."""
    of_ipu: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for one in slices:
        of_ipu[one.replica, one.ipu].append(one)
    seconds: dict[tuple[tuple[int, ...], Kind], list[float]] = defaultdict(list)
    for mine in of_ipu.values():
        tasks = [one for one in mine if one.kind in TASKS]
        for task, net in net_seconds(tasks, [one for one in mine if one.kind == "collective"]):
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
