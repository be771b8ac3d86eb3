"""When each stage does F, B and W of which micro-batch: plain data, checked, drawn and simulated. No jax in here."""

from ipu_jax.schedules._schedule import NAMES, Schedule, Task, make

__all__ = ["NAMES", "Schedule", "Task", "make"]
