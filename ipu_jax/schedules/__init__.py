"""When each stage does F, B and W of which micro-batch: plain data, checked, drawn and simulated. No jax in here."""

from ipu_jax.schedules._schedule import SCHEDULES, Schedule, Task, make_schedule
from ipu_jax.schedules._timetable import PHASES

__all__ = ["PHASES", "SCHEDULES", "Schedule", "Task", "make_schedule"]
