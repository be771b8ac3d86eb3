"""Compile programs for TPUs that are not there, and read what XLA made of them.

XLA's compiler for TPU is part of the wheel `libtpu`, and needs no TPU. `use_libtpu` finds it, `mesh_of` returns a mesh
of TPUs that are only described, and `Compiled` reads a program that was compiled for them. Call `use_libtpu` before
anything starts a jax backend.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

NEEDS_LIBTPU: Final = "libtpu: make aot"

# libtpu asks the cloud which TPU this is, and lets only one process in, unless these are set
_ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def libtpu_folder() -> Path | None:
    """Return the folder that contains the package `libtpu`, or None.

    It is the folder that the environment variable AOT_TPU names, or the one of `make aot`, or a folder of `sys.path`.
    """
    if named := os.environ.get("AOT_TPU"):
        folders = [Path(named)]
    else:
        spec = importlib.util.find_spec("libtpu")
        installed = [Path(spec.origin).parents[1]] if spec is not None and spec.origin else []
        folders = [Path(sys.prefix) / "aot-tpu", *installed]
    return next((folder for folder in folders if (folder / "libtpu" / "libtpu.so").exists()), None)


def use_libtpu() -> bool:
    """Make jax find libtpu and run on the CPU all the same, and return whether there is a libtpu."""
    folder = libtpu_folder()
    if folder is None:
        return False
    os.environ.update(_ENVIRONMENT)
    sys.path.insert(0, str(folder))
    jax.config.update("jax_platforms", "cpu")
    return True


def mesh_of(topology: str, ipus: int, replicas: int = 1) -> Mesh:
    """Return a mesh (replica, ipu) of the first chips of a topology such as "v5e:2x2".

    Raises:
        ValueError: the compiler does not know the topology, or it has too few chips.
    """
    try:
        devices = _devices(topology)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the compiler does not know {topology!r} ({reason}): give one such as v5e:2x2") from None
    if len(devices) < replicas * ipus:
        raise ValueError(f"{topology} has {len(devices)} chips, and {replicas * ipus} are needed")
    chosen = np.array(devices[: replicas * ipus]).reshape(replicas, ipus)
    return Mesh(chosen, ("replica", "ipu"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def _devices(topology: str) -> list[Any]:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@dataclasses.dataclass(frozen=True)
class Array:
    """The dtype, such as "bf16", and the dims of an array in a program's text."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def transposed(self) -> "Array":
        """Return the array with its dims in ascending order: the same for all arrays that are transposes of it."""
        return Array(self.dtype, tuple(sorted(self.dims)))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program's text: `ROOT %name = result op(operands), attributes`."""

    op: str
    arrays: tuple[Array, ...]
    line: str

    @property
    def cycles(self) -> int:
        """Return the compiler's estimate of its cycles, 0 where it has none."""
        return self._number(r'"estimated_cycles":"(\d+)"', 0)

    @property
    def trips(self) -> int:
        """Return how often a loop runs, 1 where the compiler does not know it, as for a guard."""
        return self._number(r'"known_trip_count":\{"n":"(\d+)"', 1)

    @property
    def called(self) -> list[str]:
        """Return the names of the computations that it calls."""
        names = re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", self.line)
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
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""

    def _number(self, pattern: str, otherwise: int) -> int:
        found = re.search(pattern, self.line)
        return int(found[1]) if found else otherwise


class Compiled:
    """A compiled pipeline, or a part of one, as XLA's text describes it."""

    def __init__(self, compiled: Any):
        memory = compiled.memory_analysis()
        self.code_bytes: int = memory.generated_code_size_in_bytes
        self.temporary_bytes: int = memory.temp_size_in_bytes
        self._computations, self._entry = _parse(compiled.as_text())

    @property
    def cycles(self) -> int:
        """Return the cycles of the whole program."""
        return self._cycles_in(self._entry)

    def cycles_of(self, task: str) -> int:
        """Return the cycles of a task such as "F" on the IPU where they are the most, 0 if there is no such task."""
        found: dict[str, int] = {}
        for guard in self.scan():
            label = re.search(rf"ipu_jax\.({task}\.\d+)/while$", guard.place)
            if guard.op == "while" and label:
                found[label[1]] = found.get(label[1], 0) + self._cycles_in(guard.body)
        return max(found.values(), default=0)

    @property
    def bodies(self) -> set[str]:
        """Return the pieces of program that compute F, B or W, such as "F.0": one for each task of a segment class."""
        found = (re.search(r"ipu_jax\.((?:F|B|W|FB)\.\d+)/while$", i.place) for i in self.scan() if i.op == "while")
        return {label[1] for label in found if label}

    @property
    def permutes(self) -> dict[str, bool]:
        """Return the names of all permutes, and whether the chip works between the start of one and its end."""
        found: dict[str, bool] = {}
        for computation in self._computations.values():
            for at, start in enumerate(computation):
                if start.op == "collective-permute-start":
                    takes = re.compile(rf"%?{re.escape(start.name)}\b")
                    ends = (
                        k for k, i in enumerate(computation) if i.op.endswith("-permute-done") and takes.search(i.line)
                    )
                    between = computation[at + 1 : next(ends)]
                    found[start.name] = any(i.op in ("while", "custom-call") or i.cycles >= 1000 for i in between)
        return found

    @property
    def rings(self) -> set[Array]:
        """Return the buffers that the scan carries and whose rows it writes: the stash, and small sums of gradients."""
        written = {i.arrays[0] for i in self.scan() if i.op == "dynamic-update-slice"}
        return written & set(self._loop.arrays)

    @property
    def copied_rings(self) -> list[Array]:
        """Return an array for each instruction in the scan that copies a whole ring into another layout.

        A copy-start is not one: it moves a ring between memories, while the chip computes.
        """
        rings = {ring.transposed for ring in self.rings}
        copies = (i for i in self.scan() if i.op in ("copy", "transpose"))
        return [i.arrays[0] for i in copies if i.arrays[0].transposed in rings]

    @property
    def integer_constants(self) -> list[Array]:
        """Return the program's constant arrays of integers."""
        constants = (i.arrays[0] for body in self._computations.values() for i in body if i.op == "constant")
        return [array for array in constants if array.dtype == "s32" and array.dims]

    def sums_in_scan(self) -> list[Array]:
        """Return the results of the all-reduces that run in ticks."""
        return [array for i in self.scan() if _is_sum(i) for array in i.arrays]

    def sums_after_scan(self) -> list[Array]:
        """Return the results of the all-reduces before and after the scan."""
        return [array for i in self._within(self._entry, but=self._loop) if _is_sum(i) for array in i.arrays]

    def scan(self) -> Iterator[Instruction]:
        """Return the instructions of a tick, inside guards and fusions, too."""
        return self._within(self._loop.body)

    @functools.cached_property
    def _loop(self) -> Instruction:
        """The loop over ticks."""
        everything = (i for body in self._computations.values() for i in body)
        (loop,) = (i for i in everything if i.op == "while" and re.search(r"ipu_jax\.plan\.[\w.]+/while$", i.place))
        return loop

    def _within(self, name: str, but: Instruction | None = None) -> Iterator[Instruction]:
        """Return the instructions of a computation and of all that it calls, except for what `but` calls."""
        seen, left = {name}, [name]
        while left:
            for instruction in self._computations.get(left.pop(), []):
                yield instruction
                if instruction is not but:
                    new = [called for called in instruction.called if called not in seen]
                    seen.update(new)
                    left += new

    def _cycles_in(self, name: str) -> int:
        loops = lambda i: i.trips * self._cycles_in(i.body) if i.op == "while" else i.cycles  # noqa: E731
        return sum(map(loops, self._computations[name]))


def _is_sum(instruction: Instruction) -> bool:
    return instruction.op in ("all-reduce", "all-reduce-start", "reduce-scatter")


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
            inside.append(Instruction(found[2], tuple(_arrays(found[1])), line))
    return computations, entry


def _arrays(result: str) -> Iterable[Array]:
    for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", result):
        yield Array(dtype, tuple(int(n) for n in dims.split(",") if n))
