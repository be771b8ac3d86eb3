"""Chips that are not there: describe them, compile for them, and read what the program needs and costs."""

from ipu_jax.core.compiled.program import Array, Collective, Instruction, Program
from ipu_jax.run.ahead.chip_report import ChipReport, Memory, Paper, Row
from ipu_jax.run.ahead.compilers import describe
from ipu_jax.run.ahead.compiling import compile_ahead, hand_over

__all__ = [
    "Array",
    "ChipReport",
    "Collective",
    "Instruction",
    "Memory",
    "Paper",
    "Program",
    "Row",
    "compile_ahead",
    "describe",
    "hand_over",
]
