"""Show on one screen what a program needs and costs on chips that are not there.

TrainStep(Pipeline of 6 stages on 4 IPUs, 4 micro-batches per update, max_gradient_norm=1.0)
compiled for 4 x TPU v5 lite by jax 0.10.2, libtpu 0.0.42.1: nothing ran

memory of a chip  8.4 MB = arguments 1.4 MB + temporary 5.1 MB + results in buffers of their own 1.0 kB + program 1.9 MB
                  fits into the 16.9 GB of one
                  results reuse the buffers of 1.4 MB of the arguments
work of a chip    step: F 272.7 MFLOP, B 545.0 MFLOP
...
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from jax.sharding import Mesh

from ipu_jax.base.annotations import Device, Jaxpr
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.analysis.stage_costs import flops_of, on_paper
from ipu_jax.core.compiled.guards import connected
from ipu_jax.core.compiled.program import Collective, Program
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.mesh.device_order import hops
from ipu_jax.core.programs.cost import bytes_of, in_units, jaxpr_flops
from ipu_jax.run.ahead.kinds import Kind

FORMAT: Final = 1
"""The version of the format of `ChipReport.json`."""
_MOST_ROWS: Final = 6  # then a report with everything has 24 lines, which is one screen


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
    """Return the time of a step on paper, on the IPU that works the most.

        step  =  F, B and W          the devices of an IPU share its FLOPs and bytes evenly, if it has several
              +  bubble              that IPU waits, under the schedule
              +  messages            collectives between IPUs that no work hides
              +  sums                collectives between replicas that no work hides
              +  update              weights and state are read and written once

    A task takes as long as its FLOPs, or as its arguments and results take to be read and written, or as the cycles
    that XLA's compiler for TPU estimates, whichever is longest. Without cycles this is a lower bound, which no chip
    reaches. Use it to compare schedules, sizes and topologies.

    Args:
        plan: the plan of the step.
        kind: the chip.
        rows: what the program sends.
        cycles: of the tasks of each segment class, such as "F.0"; empty where the compiler has none.
        written: the bytes of weights and state that the update reads and writes; 0 without an update.
    """
    seconds = [_task_seconds(plan, i, kind, cycles) for i in range(len(plan.segments))]
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


def _task_seconds(plan: Plan, i: int, kind: Kind, cycles: Mapping[str, int]) -> tuple[float, float, float]:
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


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes of a program on one chip.

    Attributes:
        arguments: weights, state and batch.
        results: what the program returns, the results in reused buffers of arguments included.
        reused: the part of the results that takes the buffers of arguments.
        temporary, program: what else it needs while it runs, and its code; None if it was too large to be compiled.
        needed: all of it together. If it was too large, at least so much, as the compiler says.
        available: what the chip has for a program; None if its kind is not known.
        host: what rests in the host's memory, and in none of the others.
    """

    arguments: int
    results: int
    reused: int
    temporary: int | None
    program: int | None
    needed: int
    available: int | None
    host: int = 0

    @property
    def missing(self) -> int:
        """Return the bytes that it needs and the chip does not have, 0 if it fits."""
        return 0 if self.available is None else max(0, self.needed - self.available)


@dataclasses.dataclass(frozen=True, repr=False)
class ChipReport(Shown):
    """The report of `compile_ahead`; `str()` shows it on one screen.

    Attributes:
        model: a line about the model.
        chips, chip: how many there are, and their kind as jax names it.
        versions: of jax, and of XLA's compiler for the chips.
        mesh: the sizes of its axes.
        memory: of one chip.
        flops: of a step, by task (F, B, W), on the IPU that has the most; empty without a pipeline.
        cycles: of one run of a task, and of the update, as XLA's compiler for TPU estimates them, without collectives,
            kernels and some copies; empty on GPUs.
        rows: what the program sends; those that take the most time first.
        host_loops: on GPUs, the loops of a tick that are not in CUDA graphs, so that the host drives them; None
            elsewhere.
        paper: the time of a step on paper; None without a pipeline, or if the kind of the chip is not known.
        mends: if it does not fit, what would change that, by prediction.
        program: the compiled program; None if it was too large.
    """

    model: str
    chips: int
    chip: str
    versions: dict[str, str]
    mesh: dict[str, int]
    memory: Memory
    flops: dict[str, int]
    cycles: dict[str, int]
    rows: tuple[Row, ...]
    host_loops: int | None
    paper: Paper | None
    mends: tuple[str, ...] = ()
    program: Program | None = None

    @property
    def fits(self) -> bool:
        """Return whether the program fits into the memory of a chip, as far as that is known."""
        return not self.memory.missing

    def json(self) -> str:
        """Return the report as one line of JSON, without the program; times are seconds, sizes bytes."""
        fields = dataclasses.asdict(dataclasses.replace(self, program=None))
        del fields["program"]
        fields["memory"]["missing"] = self.memory.missing
        if self.paper is not None:
            fields["paper"]["seconds"] = self.paper.seconds
        return json.dumps({"format": FORMAT, **fields})

    def _shown(self) -> list[str | Table]:
        by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [
            ("memory of a chip", self._memory_lines()),
            ("work of a chip", self._work_lines()),
            ("sent by a chip", [] if self.memory.temporary is None else self._traffic_lines()),
            ("host", [] if self.host_loops is None else [_host_line(self.host_loops)]),
            ("a step on paper", [] if self.paper is None else _paper_lines(self.paper, bool(self.cycles))),
            ("to make it fit", list(self.mends)),
        ]
        rows = [(title if k == 0 else "", line) for title, of_part in parts for k, line in enumerate(of_part)]
        first = [self.model, f"compiled for {self.chips} x {self.chip} by {by}: nothing ran", ""]
        return [*first, Table(rows, left=2, has_head=False)]

    def _memory_lines(self) -> list[str]:
        memory = self.memory
        first = f"{_bytes(memory.needed)}"
        if memory.temporary is None:
            first = f"at least {first}, of which arguments {_bytes(memory.arguments)}; it is too large to be compiled"
        else:
            elsewhere = max(0, memory.results - memory.reused)
            first += f" = arguments {_bytes(memory.arguments)} + temporary {_bytes(memory.temporary)}"
            first += f" + results in buffers of their own {_bytes(elsewhere)}"
            first += f" + program {_bytes(memory.program or 0)}" if memory.program else ""
        lines = [first]
        if memory.available is not None:
            verdict = f"{_bytes(memory.missing)} too much for" if memory.missing else "fits into"
            is_gpu = self.host_loops is not None
            of_one = "that jax takes of one (XLA_PYTHON_CLIENT_MEM_FRACTION)" if is_gpu else "of one"
            lines.append(f"{verdict} the {_bytes(memory.available)} {of_one}")
        if memory.temporary is not None:
            reused = f"the buffers of {_bytes(memory.reused)}" if memory.reused else "no buffer"
            lines.append(f"results reuse {reused} of the arguments")
        if memory.host:
            lines.append(f"{_bytes(memory.host)} more in the host's memory: a step on paper has no time for its copies")
        return lines

    def _work_lines(self) -> list[str]:
        lines = []
        if self.flops:
            lines.append("step: " + ", ".join(f"{task} {in_units(n, 'FLOP')}" for task, n in self.flops.items() if n))
        if self.cycles:
            each = ", ".join(f"{task} {cycles:,}" for task, cycles in self.cycles.items() if cycles)
            lines.append(f"cycles, without collectives and kernels: {each}")
        return lines

    def _traffic_lines(self) -> list[str]:
        rows = [("collective", "axis", "runs", "bytes a step", "hops", "on paper", "")]
        for row in self.rows[:_MOST_ROWS]:
            over = "network" if row.hops is None else str(row.hops)
            time = "" if row.seconds is None else _seconds(row.seconds)
            beside = "beside work" if row.beside_work else "nothing hides it"
            rows.append((row.op, row.axis, str(row.runs), _bytes(row.nbytes), over, time, beside))
        if len(rows) == 1:
            return ["nothing"]
        lines = str(Table(rows, left=len(rows[0]))).splitlines()
        if left := self.rows[_MOST_ROWS:]:
            lines.append(f"and {len(left)} smaller, {_bytes(sum(row.nbytes for row in left))} together")
        return lines


def _host_line(loops: int) -> str:
    if not loops:
        return "drives no loop in a tick: guards are in CUDA graphs"
    return (
        f"drives {loops} loop{'s' * (loops > 1)} in a tick: guards that contain a collective or a loop, and such loops"
    )


def _paper_lines(paper: Paper, has_cycles: bool) -> list[str]:
    named = {field.name: getattr(paper, field.name) for field in dataclasses.fields(paper)}
    labels = {"forward": "F", "backward": "B", "weight": "W"}
    share = named.pop("share_of_peak")
    parts = " + ".join(f"{labels.get(name, name)} {_seconds(value)}" for name, value in named.items() if value)
    basis = "by the compiler's cycles" if has_cycles else "by the roofline, a lower bound that no chip reaches"
    return [f"{_seconds(paper.seconds)} = {parts}", f"{share:.0%} of the chip's FLOP/s, {basis}: nothing was measured"]


def _bytes(size: float) -> str:
    return in_units(size, "B")


def _seconds(value: float) -> str:
    """Return seconds with a unit.

    >>> _seconds(0.0412), _seconds(3.2e-6), _seconds(0.4121)
    ('41.2 ms', '3.2 us', '412 ms')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            break
    return f"{value * factor:.{int(value * factor < 100)}f} {unit}"
