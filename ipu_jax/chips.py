"""Chips that are not there: describe them, compile for them, and read what the program needs and costs."""

from ipu_jax.core.compiled.program import Array, Collective, Instruction, Program
from ipu_jax.run.ahead.chip_report import ChipReport, Memory
from ipu_jax.run.ahead.compilers import describe
from ipu_jax.run.ahead.compiling import compile_ahead, hand_over
from ipu_jax.run.ahead.explain import Advice, Explanation, StepPart
from ipu_jax.run.ahead.paper import Kernel, Paper
from ipu_jax.run.ahead.traffic import Row

__all__ = [
    "Advice",
    "Array",
    "ChipReport",
    "Collective",
    "Explanation",
    "Instruction",
    "Kernel",
    "Memory",
    "Paper",
    "Program",
    "Row",
    "StepPart",
    "compile_ahead",
    "describe",
    "hand_over",
]
