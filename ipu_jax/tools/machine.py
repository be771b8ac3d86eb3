"""Refuse inputs that the machine's memory cannot hold, before they are made."""

import contextlib
import os
from pathlib import Path

_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def check_memory(needed: float, sizes: str, *, there: float | None = None) -> None:
    """Check that arrays of `needed` bytes fit in the memory of this machine, or of its container.

    Args:
        needed: the least number of bytes in memory at once.
        sizes: the flags and values that determine it, as in "--rows 5 and --cols 7".
        there: the bytes of memory; None asks the system.

    Raises:
        ValueError: the arrays do not fit.

    >>> check_memory(3e13, "--rows 2000000000", there=16e9)
    Traceback (most recent call last):
    ...
    ValueError: --rows 2000000000 need 30,000 GB or more, and this machine has 16 GB of memory: give smaller ones
    """
    there = _memory() if there is None else there
    if needed > there:
        raise ValueError(
            f"{sizes} need {needed / 1e9:,.0f} GB or more, and this machine has {there / 1e9:,.0f} GB of memory: "
            "give smaller ones"
        )


def _memory() -> float:
    memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        memory = min(memory, float(_OF_CONTAINER.read_text()))
    return memory
