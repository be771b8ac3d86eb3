"""When each stage does F, B and W of which micro-batch: plain data, checked, drawn and simulated. No jax in here."""

from ipu_jax.schedules._schedule import SCHEDULES, Schedule, Task, make_schedule

__all__ = ["SCHEDULES", "Schedule", "Task", "make_schedule"]
