"""Read what XLA made of a program: its instructions, loops and cycles, and what it sends between chips.

computation   a list of instructions; loops, guards, fusions and calls name the computations that they run
scan          the loop over ticks; guards are loops in it that run once or not at all
collective    an instruction that sends something; a -start and its -done may have work between them
"""

import collections
import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from ipu_jax.base.annotations import Device, Json
from ipu_jax.core.engine.labels import guard_named, plan_named
from ipu_jax.core.mesh.devices import is_described

COLLECTIVES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OVER_NETWORK: Final = {"ONE_TO_ONE": "collective-permute"}
_SCAN: Final = re.compile(r"ipu_jax\.plan\.[\w.]+/while$")
_WORK: Final = 1000  # cycles of an instruction that can hide a message
_NO_WORK: Final = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone")  # custom calls
_BITS: Final = {"pred": 8}


@dataclasses.dataclass(frozen=True)
class Array:
    """The dtype, such as "bf16", and the dims of an array in a program's text."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Return its bytes, without padding to tiles."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) if bits else _BITS.get(self.dtype, 0)) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program's text: `ROOT %name = result op(operands), attributes`.

    Attributes:
        op: what it does, such as "while".
        arrays: its results.
        line: the line itself.
    """

    op: str
    arrays: tuple[Array, ...]
    line: str

    @property
    def cycles(self) -> int:
        """Return the compiler's estimate of its cycles, 0 where it has none."""
        return int(self._found(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def trips(self) -> int:
        """Return how often a loop runs, 1 where the compiler does not know it, as for a guard."""
        return int(self._found(r'"known_trip_count":\{"n":"(\d+)"') or 1)

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that it calls."""
        one = r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
        names = re.findall(one, self.line)
        for several in re.findall(r"branch_computations=\{([^}]*)\}", self.line):
            names += re.findall(r"[\w.\-]+", several)
        return names

    @property
    def name(self) -> str:
        """Return its name in the program's text."""
        return self.line.split(" = ")[0].split()[-1].lstrip("%")

    @property
    def body(self) -> str:
        """Return the name of a loop's body."""
        (name,) = re.findall(r"body=%?([\w.\-]+)", self.line)
        return name

    @property
    def place(self) -> str:
        """Return where it comes from in the traced program, such as "jit(f)/shard_map/ipu_jax.F.0/while"."""
        return self._found(r'op_name="([^"]*)"')

    @property
    def chain(self) -> str:
        """Return the number of the chain of fusions that a collective is a piece of, "" without one."""
        return self._found(r'chain_id="(\d+)"')

    @property
    def groups(self) -> list[list[int]]:
        """Return the devices that a collective connects, by their numbers in the mesh: rings, or pairs of a permute."""
        if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", self.line):
            return [[int(n) for n in group.split(",") if n] for group in re.findall(r"\{([\d,]*)\}", found[1])]
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", self.line):
            axes = re.findall(r"'([^']+)'=(\d+)", found[1])
            return _along(
                [name for name, _ in axes], [int(size) for _, size in axes], re.findall(r"'([^']+)'", found[2])
            )
        found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.line)
        if not found:
            return []
        shape, of, turned = ([int(n) for n in part.split(",")] if part else [] for part in found.groups())
        return _numbered(of, turned or [*range(len(of))], shape[-1])

    def _found(self, pattern: str) -> str:
        found = re.search(pattern, self.line)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
        op: such as "all-reduce".
        instruction: the instruction that starts it.
        runs: how often it runs in a step. In a guard it may run less often.
        nbytes: the bytes of its result on one chip.
        beside_work: whether the chip works between its start and its end.
    """

    op: str
    instruction: Instruction
    runs: int
    nbytes: int
    beside_work: bool


class Program:
    """A compiled program, as XLA describes it.

    Args:
        compiled: what `lowered.compile()` returns.
    """

    def __init__(self, compiled: Any):
        self.memory = compiled.memory_analysis()
        self._computations, self._entry = _parse(compiled.as_text())

    @property
    def code_bytes(self) -> int:
        """Return the bytes of the program itself on one chip; 0 on GPUs, where XLA does not say."""
        return self.memory.generated_code_size_in_bytes

    @property
    def temporary_bytes(self) -> int:
        """Return the bytes on one chip that are neither arguments nor results."""
        return self.memory.temp_size_in_bytes

    @property
    def cycles(self) -> int:
        """Return the cycles of the whole program on one chip, 0 on GPUs. They don't count collectives and kernels."""
        return round(self._cycles_in(self._entry))

    @property
    def scans(self) -> list[Instruction]:
        """Return the loops over ticks: one, or up to three on GPUs; none without a pipeline."""
        return [i for i in self.instructions() if i.op == "while" and _SCAN.search(i.place)]

    @functools.cached_property
    def bodies(self) -> dict[str, int]:
        """Return the pieces of program that compute F, B or W, such as "F.0", with their cycles, 0 where unknown.

        There is one for each task of a segment class.
        """
        return {label: sum(round(self._cycles_in(guard.body)) for guard in of) for label, of in self._tasks.items()}

    @functools.cached_property
    def _tasks(self) -> dict[str, list[Instruction]]:
        """Return the guards of each task of a segment class, such as "F.0": one for each scan that has it."""
        found = collections.defaultdict[str, list[Instruction]](list)
        for guard in self.in_scans():
            label = re.search(r"ipu_jax\.((?:F|B|W|FB)\.\d+)/while$", guard.place)
            if guard.op == "while" and label:
                found[label[1]].append(guard)
        return dict(found)

    def in_task(self, label: str) -> Iterator[tuple[Instruction, float, list[Instruction]]]:
        """Yield the instructions of a task such as "F.0" that have cycles, each with its runs and what it fuses."""
        waiting = [(guard.body, 1.0) for guard in self._tasks.get(label, [])]
        while waiting:
            name, times = waiting.pop()
            for instruction in self._computations[name]:
                if instruction.op == "while":
                    waiting.append((instruction.body, times * self._trips(instruction)))
                elif instruction.cycles:
                    yield instruction, times, [*self._within(instruction.called)]

    def cycles_of(self, task: str) -> int:
        """Return the cycles of a task such as "F" on its slowest IPU; 0 without such a task."""
        return max((cycles for label, cycles in self.bodies.items() if label.split(".")[0] == task), default=0)

    def cycles_under(self, label: str) -> int:
        """Return the cycles of the instructions outside of scans whose place contains a label."""
        return sum(i.cycles for i in self.outside_scans() if label in i.place)

    def in_scans(self) -> Iterator[Instruction]:
        """Return the instructions of ticks, inside guards and fusions, too."""
        return self._within([scan.body for scan in self.scans])

    def outside_scans(self) -> Iterator[Instruction]:
        """Return the instructions before and after the scans."""
        return self._within([self._entry], but=self.scans)

    def instructions(self) -> Iterator[Instruction]:
        """Return all instructions."""
        return (i for body in self._computations.values() for i in body)

    def _between_slices(self, runs_of: dict[str, int]) -> list[Collective]:
        """Return what goes over the network between TPU slices: XLA writes it as transfers to and from the hosts."""
        found: list[Collective] = []
        for name, runs in runs_of.items():
            computation = self._computations[name]
            for at, instruction in enumerate(computation):
                kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.line)
                if instruction.op == "recv" and kind:
                    op = _OVER_NETWORK.get(kind[1], kind[1].lower().replace("_", "-"))
                    nbytes = max(array.nbytes for array in instruction.arrays)  # the others are a number and a token
                    takes = re.compile(rf"recv-done\(%?{re.escape(instruction.name)}\)")
                    end = next((k for k, i in enumerate(computation) if takes.search(i.line)), at)
                    # it takes long: a task hides it, the few operations of an update don't
                    is_hidden = any(i.op == "while" for i in computation[at + 1 : end])
                    found.append(Collective(op, instruction, runs, nbytes, is_hidden))
        return found

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Return everything that the program sends between chips."""
        return self._collectives_in(self._runs(self._entry))

    def collectives_of(self, guard: Instruction) -> list[Collective]:
        """Return what one run of a guard sends."""
        return self._collectives_in(self._runs(guard.body))

    @functools.cached_property
    def guards(self) -> list[Instruction]:
        """Return the guards of tasks and exchanges, in the order of the text."""
        return [i for i in self.in_scans() if i.op == "while" and guard_named(i.place)]

    def _collectives_in(self, runs_of: dict[str, int]) -> list[Collective]:
        found = self._between_slices(runs_of)
        for name, runs in runs_of.items():
            computation = self._computations[name]
            for at, instruction in enumerate(computation):
                op, chain = instruction.op.removesuffix("-start"), self._chains.get(instruction.chain, [])
                if op in COLLECTIVES and chain[:1] in ([], [name]):
                    beside_work = len(chain) > 2 or self._is_beside_work(computation, at)
                    found.append(Collective(op, instruction, runs, _sent(instruction), beside_work))
        return found

    @functools.cached_property
    def _chains(self) -> dict[str, list[str]]:
        """Return the fusions of each chain, the start first: XLA for TPU lets fusions do pieces of a collective.

        The first fusion starts it, the last one ends it, and those between do a piece each beside their own work.
        """
        found = collections.defaultdict[str, list[str]](list)
        for name, computation in self._computations.items():
            starts = any('"AsyncCollectiveStart"' in instruction.line for instruction in computation)
            for chain in {instruction.chain for instruction in computation} - {""}:
                found[chain].insert(0 if starts else len(found[chain]), name)
        return dict(found)

    def _is_beside_work(self, computation: Sequence[Instruction], at: int) -> bool:
        start = computation[at]
        if not start.op.endswith("-start"):
            return False
        takes = re.compile(rf"[(%\s]{re.escape(start.name)}[,)]")
        done = start.op.removesuffix("-start") + "-done"
        end = next((k for k, i in enumerate(computation) if i.op == done and takes.search(i.line)), at)
        return any(map(_is_work, computation[at + 1 : end]))

    def _runs(self, start: str) -> dict[str, int]:
        """Return how often a computation, which runs once, runs each of those that it calls.

        The plan knows how many ticks there are, and how many a guard has.
        """
        runs, waiting = collections.defaultdict[str, float](float), [(start, 1.0)]
        while waiting:
            name, times = waiting.pop()
            runs[name] += times
            for instruction in self._computations[name]:
                inside = times * self._trips(instruction) if instruction.op == "while" else times
                waiting += [(called, inside) for called in instruction.called if called in self._computations]
        return {name: max(1, round(times)) for name, times in runs.items()}

    def _within(self, names: Sequence[str], but: Sequence[Instruction] = ()) -> Iterator[Instruction]:
        """Return the instructions of computations and of all that they call, except for what `but` calls."""
        seen, left = set(names), [*names]
        while left:
            for instruction in self._computations.get(left.pop(), []):
                yield instruction
                if not any(instruction is scan for scan in but):
                    new = [called for called in instruction.called if called not in seen]
                    seen.update(new)
                    left += new

    def _cycles_in(self, name: str) -> float:
        loops = lambda i: self._trips(i) * self._cycles_in(i.body) if i.op == "while" else i.cycles
        return sum(map(loops, self._computations[name]))

    def _trips(self, loop: Instruction) -> float:
        """Return how often a loop runs, on average for a guard: 1 or less."""
        plan, guard = plan_named(loop.place), guard_named(loop.place)
        if plan is not None and guard is not None:
            ticks = plan.microbatches.get(guard)
            return 1.0 if ticks is None else float((np.asarray(ticks) >= 0).any(axis=1).mean())
        length = self._length(loop)
        return plan.ticks if plan is not None and length == 1 and _SCAN.search(loop.place) else length

    def _length(self, loop: Instruction) -> int:
        """Return how often a loop runs, 1 where that is not known. For TPUs only the loop's condition says it."""
        if loop.trips > 1:
            return loop.trips
        condition = [i.line for i in self._within(re.findall(r"condition=%?([\w.\-]+)", loop.line))]
        ends = re.findall(r" s32\[\][^ ]* constant\((\d+)\)", "\n".join(condition))
        return int(ends[0]) if len(ends) == 1 and any("direction=LT" in line for line in condition) else 1


def compiled_for(device: Device, lowered: Any, options: dict[str, Json] | None = None) -> Any:
    """Return the compiled program of a lowered one.

    For a device that is only described it stays out of jax's cache of compiled programs: without the device it cannot
    be read again.

    Args:
        device: any device of the program.
        lowered: what `jit(...).lower(...)` returns.
        options: for XLA.
    """
    with _nothing_kept() if is_described(device) else contextlib.nullcontext():
        return lowered.compile(compiler_options=options)


@contextlib.contextmanager
def _nothing_kept() -> Iterator[None]:
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def host_loops(thunks: str, outer: int = 0) -> int:
    """Return how many loops in a GPU's ticks are outside CUDA graphs, from XLA's sequence of thunks.

    The host drives each of them: it reads the predicate of a guard in each tick.

    Args:
        thunks: the sequence, as XLA writes it.
        outer: the loops around the scan over ticks, such as one over the updates of a call.

    >>> host_loops('''
    ... 012: kWhile         [source | sink]
    ...   body:
    ...     000: kCommandBuffer [source       | next=038 (1)]
    ...         022: kWhile [source | sink]
    ...     031: kWhile         [source       | next=1 (1)]
    ... ''')
    1
    """
    found, around = 0, list[tuple[int, str]]()  # the loops and graphs around this line, by their indentation
    for spaces, kind in re.findall(r"^( *)\d+: (k\w+)", thunks, re.MULTILINE):
        around = [(indent, other) for indent, other in around if indent < len(spaces)]
        kinds = [other for _, other in around]
        found += kind == "kWhile" and "kCommandBuffer" not in kinds and len(kinds) > outer
        if kind in ("kWhile", "kCommandBuffer"):
            around.append((len(spaces), kind))
    return found


def _is_work(instruction: Instruction) -> bool:
    if instruction.op == "custom-call":
        return not any(f'"{target}"' in instruction.line for target in _NO_WORK)
    return instruction.op == "while" or instruction.cycles >= _WORK


def _sent(instruction: Instruction) -> int:
    """Return the bytes of a collective's result."""
    arrays = [array for array in instruction.arrays if array.dtype != "u32" or array.dims]
    # a -start returns its operands, too; an all-reduce-start does so only as a tuple of tuples
    if instruction.op.endswith("-start") and (instruction.op != "all-reduce-start" or " = ((" in instruction.line):
        arrays = arrays[len(arrays) // 2 :]
    return sum(array.nbytes for array in arrays)


def _along(names: Sequence[str], sizes: Sequence[int], axes: Sequence[str]) -> list[list[int]]:
    """Return the groups that XLA writes as the axes of a mesh along which a collective goes."""
    inside = [k for k, name in enumerate(names) if name in axes]
    order = [*(k for k in range(len(names)) if k not in inside), *inside]
    return _numbered(sizes, order, math.prod(sizes[k] for k in inside))


def _numbered(of: Sequence[int], turned: Sequence[int], size: int) -> list[list[int]]:
    """Return the groups that XLA writes as [groups, size]<=[of]T(turned)."""
    strides = [math.prod(of[k + 1 :]) for k in range(len(of))]
    flat = [0]
    for dim in turned:
        flat = [start + strides[dim] * k for start in flat for k in range(of[dim])]
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation, and the name of the computation that runs first."""
    computations: dict[str, list[Instruction]] = {}
    inside: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", line):
            arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", found[1])
            made = (Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in arrays)
            inside.append(Instruction(found[2], tuple(made), line))
    return computations, entry
