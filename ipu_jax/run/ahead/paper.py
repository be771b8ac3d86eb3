"""Estimate the time of a step on paper: the tasks in the order of the schedule, and what the compiled program sends.

    step  =  F, B and W of the IPU that works the most
          +  bubble                                         that IPU waits, under the schedule
          +  messages                                       collectives between IPUs that no work hides
          +  sums                                           collectives between replicas that no work hides
          +  update                                         weights and state are read and written once

The devices of an IPU share its FLOPs and bytes evenly, if it has several.

A task takes as long as its FLOPs, or as its arguments and results take to be read and written, or as the cycles that
XLA's compiler for TPU estimates, whichever is longest. Without cycles this is a lower bound, which no chip reaches. Use
it to compare schedules, sizes and topologies.

What is sent says over which axis of the mesh, how many bytes, over how many links:

    permute y       ipu       19 x 8.4 MB    1 hop    beside work
    all-reduce      replica    1 x 25.2 MB   1 hop    exposed
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from ipu_jax.base.annotations import Device, Jaxpr
from ipu_jax.core.analysis.stage_costs import flops_of, on_paper
from ipu_jax.core.compiled.guards import connected
from ipu_jax.core.compiled.program import Collective, Program
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.mesh.device_order import hops
from ipu_jax.core.programs.cost import bytes_of, jaxpr_flops
from ipu_jax.run.ahead.kinds import Kind


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that are alike.

    Attributes:
        op: such as "all-reduce", with the message of a permute: "permute y".
        axis: of the mesh, "ipu" or "replica"; both for a collective over all chips.
        runs: how often one of them runs in a step, at most.
        nbytes: the bytes on one chip in a step, all runs together.
        hops: the most links between neighbours in its order; None if it goes over the network between slices or hosts.
        beside_work: whether the chip works while the message travels.
        seconds: how long they take on paper, over one link each; None if the kind of the chip is not known.
    """

    op: str
    axis: str
    runs: int
    nbytes: int
    hops: int | None
    beside_work: bool
    seconds: float | None


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


def flops_by_task(plan: Plan) -> dict[str, int]:
    """Return the FLOPs of F, B and W in a step on one chip, of the IPU that has the most."""
    flops, times, chips = [flops_of(p) for p in plan.programs], plan.schedule.micro_batches, parts(plan.axes)
    by_ipu = [
        [times * sum(flops[i][task] for i in plan.segments_of(ipu)) // chips for task in range(3)]
        for ipu in range(plan.ipus)
    ]
    return dict(zip("FBW", max(by_ipu, key=sum), strict=True))


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


def _bound(jaxpr: Jaxpr, kind: Kind) -> float:
    """Return the least time of a task by the roofline."""
    if jaxpr is None:
        return 0.0
    moved = bytes_of([*jaxpr.in_avals, *jaxpr.out_avals])
    return max(jaxpr_flops(jaxpr) / kind.flops, moved / kind.memory_speed)


def rows_of(program: Program, mesh: Mesh, kind: Kind | None) -> list[Row]:
    """Return what a program sends, like collectives together, those that take the most time first."""
    found: dict[Device, list[tuple[Collective, int | None]]] = {}
    for collective, groups, axis in connected(program.collectives, mesh):
        if collective.nbytes:
            distance = _hops_of(groups, mesh)
            key = (_name_of(collective), axis, distance, collective.beside_work, len(groups[0]))
            found.setdefault(key, []).append((collective, distance))
    rows = []
    for (name, axis, distance, beside, members), alike in found.items():
        nbytes = sum(collective.runs * collective.nbytes for collective, _ in alike)
        seconds = None
        if kind is not None:
            speed = kind.network if distance is None else kind.link / max(distance, 1)
            seconds = _share_sent(alike[0][0].op, members) * nbytes / speed
        rows.append(Row(name, axis, sum(c.runs for c, _ in alike), nbytes, distance, beside, seconds))
    return sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.nbytes))


def _share_sent(op: str, members: int) -> float:
    """Return the bytes that a chip sends in a ring, divided by the bytes of the result."""
    around = (members - 1) / members
    if op == "reduce-scatter":
        return members - 1
    return {"all-reduce": 2 * around, "collective-permute": 1.0}.get(op, around)


def _name_of(collective: Collective) -> str:
    message = re.search(r"ipu_jax\.(y|dx)\.\d+", collective.instruction.place)
    op = collective.op.removeprefix("collective-")
    return f"{op} {message[1]}" if message and op == "permute" else op


def _hops_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> int | None:
    devices = mesh.devices.reshape(-1)
    most = 1
    for group in groups:
        for one, other in itertools.pairwise(devices[number] for number in group):
            if _domain_of(one) != _domain_of(other):
                return None
            most = max(most, hops(one, other))
    return most


def _domain_of(device: Device) -> Device:
    """Return the slice of a TPU or the host of a GPU, in which fast links connect all devices."""
    return device.process_index if device.platform == "gpu" else getattr(device, "slice_index", None)
