"""Schedules: the tick in which each stage runs F, B and W of each micro-batch, as plain data without jax."""

from ipu_jax.schedules._families import SCHEDULES, canonical_name
from ipu_jax.schedules._schedule import Schedule, Task, make_schedule
from ipu_jax.schedules._timetable import PHASES

__all__ = ["PHASES", "SCHEDULES", "Schedule", "Task", "canonical_name", "make_schedule"]
