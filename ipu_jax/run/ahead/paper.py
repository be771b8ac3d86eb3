"""Estimate the time of a step on paper: the tasks in the order of the schedule, and what is sent.

    step  =  F, B and W of the IPU that works the most
          +  bubble                                         that IPU waits, under the schedule
          +  messages                                       collectives between IPUs that no work hides
          +  sums                                           collectives between replicas that no work hides
          +  update                                         weights and state are read and written once

The devices of an IPU share its FLOPs and bytes evenly, if it has several.

A task takes as long as its FLOPs, or as its arguments and results take to be read and written, or as the cycles that
XLA's compiler for TPU estimates, whichever is longest. Without cycles this is a lower bound, which no chip reaches. Use
it to compare schedules, sizes and topologies.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh_axes import parts
from ipu_jax.core.programs.cost import bytes_of, jaxpr_flops
from ipu_jax.run.ahead.kinds import Kind
from ipu_jax.run.ahead.traffic import Row


@dataclasses.dataclass(frozen=True)
class Paper:
    """The seconds of a step, part by part, on the IPU that works the most, and the share of its FLOP/s that it uses."""

    forward: float
    backward: float
    weight: float
    bubble: float
    messages: float
    sums: float
    update: float
    share_of_peak: float

    @property
    def seconds(self) -> float:
        """Return the time of the step."""
        parts = (self.forward, self.backward, self.weight, self.bubble, self.messages, self.sums, self.update)
        return sum(parts)


def flops_by_task(plan: Plan) -> dict[str, int]:
    """Return the FLOPs of F, B and W in a step on one chip, of the IPU that has the most."""
    m, chips = plan.schedule.micro_batches, parts(plan.axes)
    by_ipu = []
    for ipu in range(plan.ipus):
        own = [p.jaxprs for p, s in zip(plan.programs, plan.segments, strict=True) if s.place in (None, ipu)]
        flops = {t: sum(jaxpr_flops(jaxprs[t]) for jaxprs in own if t in jaxprs) for t in ("F", "B", "W")}
        by_ipu.append({task: m * of_task // chips for task, of_task in flops.items()})
    return max(by_ipu, key=lambda tasks: sum(tasks.values()))


def estimate(plan: Plan, kind: Kind, rows: Sequence[Row], cycles: Mapping[str, int], *, written: int) -> Paper:
    """Return the time of a step on paper.

    Args:
        plan: the plan of the step.
        kind: the chip.
        rows: what the program sends.
        cycles: of the tasks of each segment class, such as "F.0"; empty where the compiler has none.
        written: the bytes of weights and state that the update reads and writes; 0 without an update.
    """
    seconds = [_seconds(plan, i, kind, cycles) for i in range(len(plan.segments))]
    costs: list[list[float]] = [[], [], []]
    for segment, (forward, backward, weight) in zip(plan.segments, seconds, strict=True):
        # the simulator divides the cost of a concurrent stage among the IPUs
        share = (plan.ipus if segment.place is None else 1) / len(segment.stages)
        for column, value in zip(costs, (forward, backward + weight, weight), strict=True):
            column += [share * value] * len(segment.stages)
    run = plan.schedule.simulate(costs[0], costs[1], costs[2], lockstep=True)
    busiest = max(range(plan.ipus), key=run.busy.__getitem__)
    own = [times for times, s in zip(seconds, plan.segments, strict=True) if s.place in (None, busiest)]
    forward, backward, weight = (plan.schedule.micro_batches * sum(task) for task in zip(*own, strict=True))
    exposed = [row for row in rows if not row.beside_work]
    messages = sum(row.seconds or 0.0 for row in exposed if "replica" not in row.axis)
    sums = sum(row.seconds or 0.0 for row in exposed if "replica" in row.axis)
    update = 2 * written / kind.memory_speed
    paper = Paper(forward, backward, weight, run.makespan - run.busy[busiest], messages, sums, update, 0.0)
    share = sum(flops_by_task(plan).values()) / kind.flops / paper.seconds
    return dataclasses.replace(paper, share_of_peak=share)


def _seconds(plan: Plan, i: int, kind: Kind, cycles: Mapping[str, int]) -> tuple[float, float, float]:
    """Return the time of a segment's F, B (without W) and W for one micro-batch."""
    jaxprs, c = plan.programs[i].jaxprs, plan.class_of(i)
    bounds = [_bound(jaxprs.get(task), kind) / parts(plan.axes) for task in ("F", "B", "W")]
    if joint := cycles.get(f"FB.{c}"):  # F and B of the head in one guard
        longer = max(1.0, joint / kind.clock / sum(bounds))
        forward, backward, weight = (longer * bound for bound in bounds)
    else:
        known = [cycles.get(f"{task}.{c}", 0) / kind.clock for task in ("F", "B", "W")]
        forward, backward, weight = map(max, bounds, known)
    return forward, backward, weight


def _bound(jaxpr: Any, kind: Kind) -> float:
    """Return the least time of a task by the roofline."""
    if jaxpr is None:
        return 0.0
    moved = bytes_of([*jaxpr.in_avals, *jaxpr.out_avals])
    return max(jaxpr_flops(jaxpr) / kind.flops, moved / kind.memory_speed)
