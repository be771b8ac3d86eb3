"""Count or measure the costs of F, B and W of each stage, for the search for a schedule.

Counted costs are FLOPs, and the same on every instance. Measured costs are seconds on the available IPUs, and differ a
little from run to run. All instances get the costs of the slowest instance.

    segment  mlp + norm (IPU 0)      F 300   B, W split 200 + 300   B whole 480      a stage has half of each
    segment  head (2 IPUs)           F 100   B whole 200    per IPU                  the stage has twice as much
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base import status
from ipu_jax.base.annotations import Jaxpr, Value
from ipu_jax.base.checks import check_count
from ipu_jax.base.keys import is_key, with_keys, without_keys
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import over_ipus
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.instances import gathered, put
from ipu_jax.core.programs.cost import bytes_of, jaxpr_flops
from ipu_jax.core.programs.segment import Segment
from ipu_jax.core.programs.segment_program import SegmentProgram
from ipu_jax.core.schedules import Simulation, StageCosts, Unit

_WHOLE = PartitionSpec()
_SECONDS = 10.0  # after this time a task is not repeated
# The time of a byte from a chip to its neighbour, in either unit of costs; on a CPU messages take no time of their own.
# From public figures, bfloat16 FLOP/s over bytes/s one way: TPU v5e 1.97e14 / 4.5e10 and v5p 4.59e14 / 9e10, a link of
# ICI (jax-ml.github.io/scaling-book); H100 9.9e14 / 4.5e11, NVLink (NVIDIA's data sheet). No chip reaches its FLOP/s.
_PER_BYTE: dict[tuple[str, Unit | None], float] = {
    ("tpu", "FLOPs"): 4000.0,
    ("gpu", "FLOPs"): 2000.0,
    ("tpu", "seconds"): 1 / 4.5e10,
    ("gpu", "seconds"): 1 / 4.5e11,
}
# Splitting the backward pass takes time: B writes values that W reads. In the time of a byte of its memory a chip does
# about this many FLOPs: TPU v5e 1.97e14 / 8.2e11, v5p 4.59e14 / 2.8e12, H100 9.9e14 / 3.35e12 (the same sources).
_PER_BYTE_OF_MEMORY = {"tpu": 240.0, "gpu": 300.0}


class TaskCosts(NamedTuple):
    """The cost of one segment's tasks on one IPU for one micro-batch, as in `StageCosts`."""

    forward: float
    backward: float
    weight: float
    whole_backward: float


@dataclasses.dataclass(frozen=True)
class TracedStages:
    """The segments of a model with their programs, B split from W on local segments.

    Attributes:
        segments, programs: per segment, its stages, and its traced F, B and W.
        ipus: the IPUs of a replica.
        platform: of the IPUs.
    """

    segments: tuple[Segment, ...]
    programs: tuple[SegmentProgram, ...]
    ipus: int
    platform: str

    def counted(self) -> StageCosts:
        """Return the FLOPs and the bytes of each stage.

        On chips B and W also cost the time in which the weight residuals go to memory or come from it, as FLOPs.

        A segment's cost is divided evenly among its stages. If no task of a segment has any FLOPs, its F and its B each
        cost the number of bytes of its message, or 1 if the message is empty.
        """
        counted: list[TaskCosts] = []
        for program in self.programs:
            cost = TaskCosts(*map(float, (*flops_of(program), jaxpr_flops(program.whole_backward))))
            moved = float(bytes_of(program.y) or 1)
            cost = cost if any(cost) else TaskCosts(moved, moved, 0.0, moved)
            split = bytes_of(program.weight_residuals) * _PER_BYTE_OF_MEMORY.get(self.platform, 0.0)
            counted.append(cost._replace(backward=cost.backward + split, weight=cost.weight + split))
        return self._per_stage(counted, "FLOPs")

    def measured(self, mesh: Mesh, repeats: int) -> StageCosts:
        """Return the seconds and bytes of each stage. A task's time is the median of some runs after one to compile.

        A local segment runs on its IPU and a concurrent segment on all IPUs, on every replica at once. Segments that
        compute the same function are measured once. Floating arguments are between 0.5 and 1, others are 0.

        Args:
            mesh: the mesh of replicas and IPUs.
            repeats: the most runs of each task. After 10 seconds a task is not repeated.
        """
        measured: list[TaskCosts] = []
        for i, (segment, program) in enumerate(zip(self.segments, self.programs, strict=True)):
            same = [k for k in range(i) if _costs_the_same(self.segments[k], self.programs[k], segment, program)]
            if same:
                measured.append(measured[same[0]])
                continue
            status.say(f"measuring stages, part {i + 1} of {len(self.segments)}")
            tasks = *map(program.jaxprs.get, "FBW"), program.whole_backward
            measured.append(TaskCosts(*(_seconds(jaxpr, segment.place, mesh, repeats) for jaxpr in tasks)))
        return self._per_stage(measured, "seconds")

    def _per_stage(self, costs: Sequence[TaskCosts], unit: Unit) -> StageCosts:
        sizes = [
            (bytes_of(program.stash) if segment.stashes else 0, bytes_of(program.weight_residuals))
            for segment, program in zip(self.segments, self.programs, strict=True)
        ]
        stash, residuals = per_stage(self.segments, sizes, sharers=1)  # of bytes, each IPU holds all
        forward, backward, weight, whole = per_stage(self.segments, costs, self.ipus)
        return StageCosts(forward, backward, weight, whole, stash, residuals, unit)


def flops_of(program: SegmentProgram) -> tuple[int, ...]:
    """Return the FLOPs of F, B and W; B includes W where it is not split."""
    return tuple(jaxpr_flops(program.jaxprs[task]) if task in program.jaxprs else 0 for task in "FBW")


def per_stage(segments: Sequence[Segment], costs: Sequence[Sequence[float]], sharers: int) -> list[list[float]]:
    """Return columns of costs per stage, from rows of costs per segment on one IPU.

    A segment's cost is divided evenly among its stages. A concurrent stage has the cost on all its `sharers`.
    """
    rows: list[list[float]] = []
    for segment, row in zip(segments, costs, strict=True):
        count, ipus = len(segment.stages), sharers if segment.place is None else 1
        rows += [[cost * ipus / count for cost in row]] * count
    return [[*column] for column in zip(*rows, strict=True)]


def on_paper(plan: Plan, costs: Sequence[Sequence[float]], transfer: float = 0.0) -> Simulation:
    """Return a step in which F, B and W of each segment cost this much, and all IPUs wait at each exchange."""
    wholes = [(forward, backward + weight, weight) for forward, backward, weight in costs]
    forward, backward, weight = per_stage(plan.segments, wholes, plan.ipus)
    return plan.schedule.simulate(forward, backward, weight, transfer, lockstep=True)


def transfer_time(traced: TracedStages | Plan, unit: Unit | None) -> float:
    """Return how long the largest message from one IPU to another takes, in a unit of costs; 0 if that is not known."""
    places = [segment.place for segment in traced.segments]
    crosses = [here != there and None not in (here, there) for here, there in itertools.pairwise(places)]
    largest = max((bytes_of(program.y) for program in itertools.compress(traced.programs, crosses)), default=0)
    return largest * _PER_BYTE.get((traced.platform, unit), 0.0)


def check_measurable(arguments: Any, measured: bool, repeats: int) -> None:
    """Raise `ValueError` if `repeats` is not a count, or if costs are to be measured with traced arguments."""
    check_count("repeats", repeats)
    if measured and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
        raise ValueError("measured=True runs programs, but the arguments are tracers: call it outside of jax.jit")


def _costs_the_same(one: Segment, of_one: SegmentProgram, other: Segment, of_other: SegmentProgram) -> bool:
    alike = (one.place is None) == (other.place is None) and one.stashes == other.stashes
    return alike and of_one.computes_the_same(of_other)


def _seconds(jaxpr: Jaxpr, place: int | None, mesh: Mesh, repeats: int) -> float:
    """Return the median seconds of a task on one IPU of each replica, or on all IPUs (None)."""
    if jaxpr is None or not jaxpr.jaxpr.eqns:
        return 0.0
    random = np.random.default_rng(0)
    args = [put(_argument(aval, random), NamedSharding(mesh, _WHOLE)) for aval in jaxpr.in_avals]
    task = core.jaxpr_as_fun(jaxpr)

    def on_ipu(*args: Value) -> list[Value]:
        if place is None:
            return task(*args)
        idle = lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
        # the whole mesh takes part, because the traced program names it
        return lax.cond(lax.axis_index(IPU_AXIS) == place, task, idle, *args)

    program = jax.jit(over_ipus(on_ipu, mesh, in_specs=_WHOLE, out_specs=_WHOLE))
    jax.block_until_ready(program(*args))
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < _SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        # a task is as slow as the slowest instance; and all instances must stop after the same run
        seconds.append(float(gathered(mesh, [time.perf_counter() - start]).max()))
    return statistics.median(seconds)


def _argument(aval: Value, random: np.random.Generator) -> Value:
    if is_key(aval):
        data = jax.eval_shape(without_keys, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return with_keys(jnp.zeros(data.shape, data.dtype), aval)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return random.uniform(0.5, 1.0, aval.shape).astype(aval.dtype)
    return np.zeros(aval.shape, aval.dtype)
