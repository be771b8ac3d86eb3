"""Schedules: which IPU runs which task in which tick. Nothing here imports jax."""

from ipu_jax.core.schedules import (
    SCHEDULES,
    FoundSchedule,
    Schedule,
    StageCosts,
    Task,
    canonical_name,
    find_schedule,
    make_schedule,
)

__all__ = [
    "SCHEDULES",
    "FoundSchedule",
    "Schedule",
    "StageCosts",
    "Task",
    "canonical_name",
    "find_schedule",
    "make_schedule",
]
