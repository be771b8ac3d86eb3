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
import json
from typing import Final

from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.compiled.program import Program
from ipu_jax.core.programs.cost import in_units
from ipu_jax.run.ahead.explain import Explanation
from ipu_jax.run.ahead.paper import KERNELS_SHARE, Kernel, Paper, in_time
from ipu_jax.run.ahead.traffic import Row

FORMAT: Final = 1
"""The version of the format of `ChipReport.json`."""
_MOST_ROWS: Final = 6  # then a report with everything has 24 lines, which is one screen
_MOST_KERNELS: Final = 3


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
        kernels: in tasks, on the IPU whose kernels have the most FLOPs, with the time that they count in `paper`: their
            FLOPs at half of the chip's peak, which is taken, not measured; none where the compiler has no cycles.
        mends: if it does not fit, what would change that, by prediction.
        explanation: where the time of a step on paper goes, if that was asked for; `str()` shows it in place of all
            else if the program fits.
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
    kernels: tuple[Kernel, ...] = ()
    mends: tuple[str, ...] = ()
    explanation: Explanation | None = None
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
            ("kernels", [_kernel_line(kernel) for kernel in self.kernels[:_MOST_KERNELS]]),
            ("sent by a chip", [] if self.memory.temporary is None else self._traffic_lines()),
            ("host", [] if self.host_loops is None else [_host_line(self.host_loops)]),
            ("a step on paper", [] if self.paper is None else _paper_lines(self.paper, bool(self.cycles))),
            ("to make it fit", list(self.mends)),
        ]
        rows = [(title if k == 0 else "", line) for title, of_part in parts for k, line in enumerate(of_part)]
        first = [self.model, f"compiled for {self.chips} x {self.chip} by {by}: nothing ran", ""]
        if self.explanation is not None and self.fits:
            return [*first, self.explanation.table()]
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
        rows = [("collective", "axis", "runs", "bytes a step", "over", "on paper", "")]
        most = _MOST_ROWS - min(len(self.kernels), _MOST_KERNELS)
        for row in self.rows[:most]:
            time = "" if row.seconds is None else in_time(row.seconds)
            beside = "beside work" if row.beside_work else "nothing hides it"
            rows.append((row.op, row.axis, str(row.runs), _bytes(row.nbytes), row.over, time, beside))
        if len(rows) == 1:
            return ["nothing"]
        lines = str(Table(rows, left=len(rows[0]))).splitlines()
        if left := self.rows[most:]:
            lines.append(f"and {len(left)} smaller, {_bytes(sum(row.nbytes for row in left))} together")
        return lines


def _kernel_line(kernel: Kernel) -> str:
    if not kernel.flops:
        return f"{kernel.name}: no FLOPs are known, counted 0"
    counted = f"{in_time(kernel.seconds)} = {in_units(kernel.flops, 'FLOP')} at {KERNELS_SHARE:.0%} of the peak"
    return f"{kernel.name}: {counted}, taken, not measured"


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
    parts = " + ".join(f"{labels.get(name, name)} {in_time(value)}" for name, value in named.items() if value)
    basis = "by the compiler's cycles" if has_cycles else "by the roofline, a lower bound that no chip reaches"
    return [f"{in_time(paper.seconds)} = {parts}", f"{share:.0%} of the chip's FLOP/s, {basis}: nothing was measured"]


def _bytes(size: float) -> str:
    return in_units(size, "B")
