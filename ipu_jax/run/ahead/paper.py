"""Estimate the time of a step on paper: nothing was measured.

        step  =  F, B and W          the devices of an IPU share its FLOPs and bytes evenly, if it has several
              +  bubble              that IPU waits, under the schedule
              +  messages            collectives between IPUs that no work hides
              +  sums                collectives between replicas that no work hides
              +  update              weights and state are read and written once

A task takes as long as its FLOPs, or as its arguments and results take to be read and written, or as the cycles that
XLA's compiler for TPU estimates, whichever is longest. The compiler counts no cycles for a kernel (Pallas). So
its FLOPs count at half of the chip's peak. This share is taken, not measured. Without cycles, as on GPUs, the time is a
lower bound, which no chip reaches. Use it to compare schedules, sizes and topologies.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from ipu_jax.base.annotations import Jaxpr
from ipu_jax.base.jaxprs import bodies_of, closed_of
from ipu_jax.core.analysis.stage_costs import flops_of, on_paper
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.programs.cost import bytes_of, equation_flops, jaxpr_flops
from ipu_jax.run.ahead.kinds import Kind
from ipu_jax.run.ahead.traffic import Row

KERNELS_SHARE: Final = 0.5
"""The share of a chip's FLOP/s at which kernels are counted: taken, not measured."""
TASKS: Final = ("F", "B", "W", "FB")


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
        return self.forward + self.backward + self.weight + self.bubble + self.messages + self.sums + self.update


@dataclasses.dataclass(frozen=True)
class TaskTime:
    """The seconds of one run of a task on a chip, by each of its bounds.

    Attributes:
        flops: its FLOPs at the chip's full speed.
        moved: its arguments and results are read and written once.
        cycles: by the compiler, without kernels; 0 where it has none.
        kernels: the FLOPs of its kernels at `KERNELS_SHARE` of the full speed; 0 without cycles.
    """

    flops: float
    moved: float
    cycles: float = 0.0
    kernels: float = 0.0

    @property
    def bound(self) -> float:
        """Return the least time by the roofline."""
        return max(self.flops, self.moved)

    @property
    def seconds(self) -> float:
        """Return the time on paper."""
        return max(self.bound, self.cycles + self.kernels)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel (Pallas): its FLOPs in a step on one chip, 0 if they are not known, and the seconds that they count."""

    name: str
    flops: int
    seconds: float


def flops_by_task(plan: Plan) -> dict[str, int]:
    """Return the FLOPs of F, B and W in a step on one chip, of the IPU that has the most."""
    flops, times, chips = [flops_of(p) for p in plan.programs], plan.schedule.micro_batches, parts(plan.axes)
    by_ipu = [
        [times * sum(flops[i][task] for i in plan.segments_of(ipu)) // chips for task in range(3)]
        for ipu in range(plan.ipus)
    ]
    return dict(zip("FBW", max(by_ipu, key=sum), strict=True))


def kernels_by_name(plan: Plan, kind: Kind) -> tuple[Kernel, ...]:
    """Return the kernels of a step on one chip, of the IPU whose kernels have the most FLOPs, the largest first."""
    found = [collections.Counter[str]() for _ in range(plan.ipus)]
    for ipu, kernels in enumerate(found):
        for i in plan.segments_of(ipu):
            for jaxpr in plan.programs[i].jaxprs.values():
                kernels.update(kernels_of(jaxpr))
    times, speed = plan.schedule.micro_batches / parts(plan.axes), KERNELS_SHARE * kind.flops
    most = max(found, key=lambda kernels: (kernels.total(), len(kernels)))
    return tuple(Kernel(name, round(times * flops), times * flops / speed) for name, flops in most.most_common())


def kernels_of(jaxpr: Jaxpr) -> dict[str, int]:
    """Return the FLOPs of each Pallas kernel in a jaxpr, as the kernel's own estimate says, or else as counted."""
    found = collections.Counter[str]()
    for eqn in closed_of(jaxpr).jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            params, given = eqn.params, eqn.params.get("cost_estimate")
            name = params.get("name") or params["jaxpr"].debug_info.func_name
            found[name] += given.flops if given else equation_flops(eqn)
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = [kernels_of(body) for body in bodies_of(eqn)]
        if eqn.primitive.name == "cond":
            inside = [max(inside, key=lambda kernels: sum(kernels.values()))]
        for kernels in inside:
            found.update({name: times * flops for name, flops in kernels.items()})
    return dict(found)


def estimate(plan: Plan, kind: Kind, rows: Sequence[Row], cycles: Mapping[str, int], *, written: int) -> Paper:
    """Return the time of a step on paper, on the IPU that works the most.

    Args:
        plan: the plan of the step.
        kind: the chip.
        rows: what the program sends.
        cycles: of the tasks of each segment class, such as "F.0"; empty where the compiler has none.
        written: the bytes of weights and state that the update reads and writes; 0 without an update.
    """
    times = task_times(plan, kind, cycles)
    seconds = [*map(seconds_of, times)]
    run = on_paper(plan, seconds)
    busiest = max(range(plan.ipus), key=run.busy.__getitem__)
    own = [seconds[i] for i in plan.segments_of(busiest)]
    forward, backward, weight = (plan.schedule.micro_batches * sum(task) for task in zip(*own, strict=True))
    exposed = [row for row in rows if not row.beside_work]
    messages = sum(row.seconds or 0.0 for row in exposed if "replica" not in row.axis)
    sums = sum(row.seconds or 0.0 for row in exposed if "replica" in row.axis)
    update = 2 * written / kind.memory_speed
    paper = Paper(forward, backward, weight, run.makespan - run.busy[busiest], messages, sums, update, 0.0)
    share = sum(flops_by_task(plan).values()) / kind.flops / paper.seconds
    return dataclasses.replace(paper, share_of_peak=share)


def task_times(plan: Plan, kind: Kind, cycles: Mapping[str, int]) -> list[dict[str, TaskTime]]:
    """Return the times of F, B and W of each segment for one micro-batch; "FB", too, if one guard has F and B."""
    found: list[dict[str, TaskTime]] = []
    for i, program in enumerate(plan.programs):
        c, parts_of = plan.class_of(i), {task: [task] for task in "FBW"}
        parts_of |= {"FB": ["F", "B"]} if cycles.get(f"FB.{c}") else {}
        times: dict[str, TaskTime] = {}
        for task, letters in parts_of.items():
            jaxprs = [program.jaxprs[letter] for letter in letters if letter in program.jaxprs]
            flops = sum(map(jaxpr_flops, jaxprs)) / kind.flops
            moved = sum(bytes_of([*jaxpr.in_avals, *jaxpr.out_avals]) for jaxpr in jaxprs) / kind.memory_speed
            kernels = sum(sum(kernels_of(jaxpr).values()) for jaxpr in jaxprs) / (KERNELS_SHARE * kind.flops)
            chips, counted = parts(plan.axes), cycles.get(f"{task}.{c}", 0) / kind.clock
            times[task] = TaskTime(
                flops / chips, moved / chips, counted, kernels / chips if any(cycles.values()) else 0.0
            )
        found.append(times)
    return found


def running(times: Mapping[str, TaskTime]) -> list[str]:
    """Return the tasks that run: "FB" in place of "F" and "B" where one guard has both."""
    return [task for task in times if task not in ("F", "B") or "FB" not in times]


def seconds_of(times: Mapping[str, TaskTime]) -> tuple[float, float, float]:
    """Return the time of F, B (without W) and W. F and B in one guard share its time like their bounds."""
    forward, backward, weight = (times[task] for task in "FBW")
    if "FB" not in times:
        return forward.seconds, backward.seconds, weight.seconds
    longer = times["FB"].seconds / (forward.bound + backward.bound)
    return longer * forward.bound, longer * backward.bound, weight.seconds


def in_time(value: float) -> str:
    """Return seconds with a unit.

    >>> in_time(0.0412), in_time(3.2e-6), in_time(0.4121)
    ('41.2 ms', '3.2 us', '412 ms')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            break
    return f"{value * factor:.{int(value * factor < 100)}f} {unit}"
