"""Switches for tests: they change how a program is traced, so set them before its first call."""

from collections.abc import Callable

IDLE_FILL = 0.0
"""The initial value of channels and stash. Tests set it to NaN, so that any use of a bubble's value shows."""

WATCH: Callable[..., None] | None = None
"""Called on the host whenever an IPU runs a task: `WATCH(kind, stage=, microbatch=, tick=, ipu=, replica=)`, where
`stage` is the first stage of the task's segment. Tests count the executed tasks with it."""
