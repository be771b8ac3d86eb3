"""Record the tick in which each IPU of this process is, so that the launcher can say where a run hangs.

    IPU_JAX_FLIGHT_RECORDER=1     ticks           per replica and IPU: program, tick, and since when
                                  tasks.1.json    the tasks of program 1 per IPU and tick, in words

The first file is mapped into memory, like a beacon: no write is a system call. Without a launcher, nothing is recorded.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import mmap
import os
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ipu_jax.base import opening
from ipu_jax.distributed.processes import beacons, record
from ipu_jax.distributed.processes.record import OwnRecord

RECORD: Final = "IPU_JAX_FLIGHT_RECORDER"

_SLOT: Final = struct.Struct("<IIIiQ")  # program (0: no tick so far), replica, IPU, tick, ns
_PAGE: Final = 4096
_MOST: Final = 1 << 24
_MOST_PROGRAMS: Final = 16  # at the same time, in one instance

Report = Callable[[int, int, int], None]


class Recorder:
    """Writes the ticks of the programs of this process.

    Args:
        own: the record of this process.
    """

    def __init__(self, own: OwnRecord):
        self._own, self._file = own, opening.created(own.folder / "ticks")
        self._slots: dict[tuple[int, int], int] = {}
        self._memory: mmap.mmap | None = None
        self._reports: dict[tuple[str, int], Report] = {}

    def report(self, program: str, role: str, replicas: int, tasks: Callable[[], list[list[str]]]) -> Report:
        """Return the function that a program calls at each tick; the arguments are as in `Listener.ticks`."""
        if (program, replicas) in self._reports:
            return self._reports[program, replicas]
        number, of_ipus = len(self._reports) + 1, tasks()
        self._own.write(f"tasks.{number}.json", {"role": role, "tasks": of_ipus})
        for place in itertools.product(range(replicas), range(len(of_ipus))):
            self._slots.setdefault(place, len(self._slots) * _SLOT.size)
        size = -(-len(self._slots) * _SLOT.size // _PAGE) * _PAGE
        if self._memory is None or len(self._memory) < size:
            self._memory = beacons.mapped(self._file, size)
        memory, slots = self._memory, self._slots

        def report(replica: int, ipu: int, tick: int) -> None:
            _SLOT.pack_into(memory, slots[replica, ipu], number, replica, ipu, tick, time.monotonic_ns())

        return self._reports.setdefault((program, replicas), report)


_recorder_of = functools.cache(Recorder)


def report_of(program: str, role: str, replicas: int, tasks: Callable[[], list[list[str]]]) -> Report | None:
    """Return what records the ticks of a program, as `Listener.ticks` does.

    It is None unless a recorder is asked for, and a launcher reads the record of this process; or for lack of room.
    """
    own = record.for_launcher() if os.environ.get(RECORD) == "1" else None
    try:
        return None if own is None else _recorder_of(own).report(program, role, replicas, tasks)
    except OSError as error:
        warnings.warn(f"the flight recorder does not record: {error}", stacklevel=2)
        return None


@dataclasses.dataclass(frozen=True)
class Seen:
    """Say what the IPUs of an instance do.

    Attributes:
        lines: a line for each IPU that has reported a tick, in the order of replicas and IPUs.
        ticks: the lowest tick in which one of them has a task, and the highest of all; empty if none has a task.
    """

    lines: tuple[str, ...] = ()
    ticks: tuple[int, ...] = ()


def read(folder: Path) -> Seen:
    """Return what the IPUs of an instance do; of files that no recorder has written, nothing.

    A tick is named by its number, as in `Schedule.tasks`: the first of 40 is "tick 0 of 40".

    Args:
        folder: the record of the instance.
    """
    now = time.monotonic_ns()
    lines, working, ticks, programs = list[str](), list[int](), list[int](), dict[int, dict[str, Any]]()
    found = b""
    with contextlib.suppress(OSError):
        found = beacons.whole(lambda: opening.content(folder / "ticks", _MOST))
    slots = _SLOT.iter_unpack(found[: len(found) // _SLOT.size * _SLOT.size])
    for number, replica, ipu, tick, since in sorted(slots, key=lambda slot: slot[1:3]):
        # on a full disk the file of a program is missing, and the instance's program may have written anything
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            if number:
                if number not in programs and len(programs) < _MOST_PROGRAMS:
                    programs[number] = {}  # is read once, also if it cannot be
                    programs[number] = json.loads(opening.content(folder / f"tasks.{number}.json", _MOST))
                tasks = programs[number]["tasks"][ipu]
                doing = _doing(programs[number]["role"], tasks, tick)
                lines.append(f"IPU {ipu} of replica {replica}: {doing}, for {max(now - since, 0) / 1e9:.1f} s")
                ticks.append(tick)
                working += [tick] * bool(0 <= tick < len(tasks) and tasks[tick])
    return Seen(tuple(lines), (min(working), max(ticks)) if working else ())


def _doing(role: str, tasks: list[str], tick: int) -> str:
    if tick >= len(tasks):
        return f"after all {len(tasks)} ticks of {role}: collectives, the update, or nothing"
    return f"{tasks[tick]}, tick {tick} of {len(tasks)}" if tasks[tick] else f"idle in tick {tick} of {len(tasks)}"
