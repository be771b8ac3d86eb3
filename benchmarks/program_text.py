"""Find in a compiled pipeline what figures and tests count: rings, sums, permutes and constants."""

import re
from collections.abc import Iterable

from ipu_jax.chips import Array, Instruction, Program


def rings(program: Program) -> set[Array]:
    """Return the buffers that a scan carries and whose rows it writes: the stash, and small sums of gradients."""
    written = {i.arrays[0] for i in program.in_scans() if i.op == "dynamic-update-slice"}
    return written & {array for scan in program.scans for array in scan.arrays}


def copied_rings(program: Program) -> list[Array]:
    """Return an array for each instruction in a scan that copies a whole ring into another layout.

    A copy-start is not one: it moves a ring between memories, while the chip computes.
    """
    shapes = {_transposed(ring) for ring in rings(program)}
    copies = (i.arrays[0] for i in program.in_scans() if i.op in ("copy", "transpose"))
    return [array for array in copies if _transposed(array) in shapes]


def permutes_beside_work(program: Program) -> list[bool]:
    """Return, for each permute, whether the chip works while its message is under way."""
    return [found.beside_work for found in program.collectives if found.op == "collective-permute"]


def sums_in_scans(program: Program) -> list[Array]:
    """Return the results of the all-reduces that run in ticks."""
    return _sums(program.in_scans())


def sums_outside_scans(program: Program) -> list[Array]:
    """Return the results of the all-reduces before and after the scans."""
    return _sums(program.outside_scans())


def integer_constants(program: Program) -> list[Array]:
    """Return the program's constant arrays of integers."""
    constants = (i.arrays[0] for i in program.instructions() if i.op == "constant")
    return [array for array in constants if array.dtype == "s32" and array.dims]


def kernels(text: str) -> int:
    """Return how many kernels a program for CPUs has: XLA compiles equal fusions once."""
    bodies = dict(re.findall(r"^%(\S+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    fused = {name for name in re.findall(r" fusion\([^\n]* calls=%([\w.-]+)", text)}
    return len({_unnamed(bodies[name]) for name in fused})


def _unnamed(body: str) -> str:
    """Return a computation with numbers in place of names, without what its instructions say beside their work."""
    names: dict[str, str] = {}
    number = lambda found: names.setdefault(found[0], f"%{len(names)}")
    return re.sub(r"%[\w.-]+", number, re.sub(r", (metadata=\{[^}]*\}|backend_config=\{.*)", "", body))


def _sums(instructions: Iterable[Instruction]) -> list[Array]:
    return [
        array
        for i in instructions
        if i.op in ("all-reduce", "all-reduce-start", "reduce-scatter")
        for array in i.arrays
    ]


def _transposed(array: Array) -> Array:
    """Return the array with its dims in ascending order: the same for all arrays that are transposes of it."""
    return Array(array.dtype, tuple(sorted(array.dims)))
