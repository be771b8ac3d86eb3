"""Schedules: the tick in which each stage runs F, B and W of each micro-batch, as plain data without jax."""

from ipu_jax.schedules._schedule import SCHEDULES, Schedule, Task, make_schedule
from ipu_jax.schedules._timetable import PHASES

__all__ = ["PHASES", "SCHEDULES", "Schedule", "Task", "make_schedule"]
