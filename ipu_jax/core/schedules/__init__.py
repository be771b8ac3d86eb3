"""Schedules: the tick in which each stage runs F, B and W of each micro-batch, as plain data without jax."""

from ipu_jax.core.schedules._auto import Candidate, FoundSchedule, find_schedule, make_schedule
from ipu_jax.core.schedules._costs import StageCosts, Unit
from ipu_jax.core.schedules._families import SCHEDULES, canonical_name
from ipu_jax.core.schedules._schedule import Schedule, Task
from ipu_jax.core.schedules._simulate import Simulation

__all__ = [
    "SCHEDULES",
    "Candidate",
    "FoundSchedule",
    "Schedule",
    "Simulation",
    "StageCosts",
    "Task",
    "Unit",
    "canonical_name",
    "find_schedule",
    "make_schedule",
]
