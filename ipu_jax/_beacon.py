"""Write down the progress of an instance where its launcher can read it, even while the instance is frozen.

A *beacon* is a file of fixed size that the instance maps into its memory. Steps write to it, not a thread, which would
go on while the steps are stuck. A write costs no system call. Times are of CLOCK_MONOTONIC, which all processes of a
host share.

    instance    begun(), finished(), phase(...)  -->  <run folder>/beacon.3  -->  read(path)    poprun

Without a launcher, that is without `IPU_JAX_RUN_DIR` in the environment, every call does nothing.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import enum
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUN_DIR: Final = "IPU_JAX_RUN_DIR"
INSTANCE: Final = "IPU_JAX_INSTANCE"

_LAYOUT: Final = struct.Struct("<4sIqqqqqqqqqd128s")
_MAGIC: Final = b"IPUB"
_VERSION: Final = 2
_SIZE: Final = 4096


class Phase(enum.IntEnum):
    """Name what an instance does. Only in `STEPPING` is a time without a finished step a sign that it is stuck.

    `BUSY` is with something else that takes its time, such as saving, and others may wait for it. `WAITING` is for
    other instances, outside a step; they are what may be stuck. The label says with what, or where.
    """

    SILENT = 8  # its program has told of no step so far, and may never do so
    STARTING = 1  # from the dispatch of its first step until that has finished
    COMPILING = 2
    STEPPING = 3
    BUSY = 4
    ENDING = 5  # its program has ended; it waits for the others
    FAILED = 6  # its program has raised an exception; the label says which
    WAITING = 7


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold what a beacon says.

    Attributes:
        pid: the process that writes it.
        beat_ns: when it was last written to.
        begun: steps that were given to the devices so far.
        finished: steps that the devices have finished, as far as the instance has noticed.
        first_ns: when the first of them was; 0 before it. It may have included the compilation.
        finished_ns: when `finished` last grew; 0 before the first.
        aside_ns: how long it had been in other phases than stepping by then.
        phase: what the instance does.
        phase_ns: since when.
        limit: seconds that the phase may take; infinite if the instance does not say.
        label: a few words on the phase.
    """

    pid: int
    beat_ns: int
    begun: int
    finished: int
    first_ns: int
    finished_ns: int
    aside_ns: int
    phase: Phase
    phase_ns: int
    limit: float
    label: str


class Beacon:
    """Writes the beacon of this process.

    Args:
        path: a file that does not exist yet.

    Raises:
        FileExistsError: another process writes this beacon.
    """

    def __init__(self, path: Path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(handle, _SIZE)
            self._memory = mmap.mmap(handle, _SIZE)
        finally:
            os.close(handle)
        self.pid = os.getpid()
        self._begun = self._finished = self._first_ns = self._finished_ns = 0
        self._aside_ns = self._finished_aside_ns = 0
        self._phase, self._phase_ns, self._limit, self._label = Phase.SILENT, time.monotonic_ns(), float("inf"), ""
        self._write()

    def begun(self, steps: int = 1) -> None:
        """Count steps that were given to the devices."""
        if self._phase is Phase.SILENT:
            self.enter(Phase.STARTING)
        self._begun += steps
        self._write()

    def finished(self, steps: int = 1) -> None:
        """Count steps that the devices have finished."""
        self._finished += steps
        self._finished_ns = time.monotonic_ns()
        self._first_ns = self._first_ns or self._finished_ns
        self._finished_aside_ns = self._aside_until(self._finished_ns)
        if self._phase in (Phase.SILENT, Phase.STARTING, Phase.COMPILING):
            self.enter(Phase.STEPPING)
        else:
            self._write()

    def enter(self, phase: Phase, label: str = "", limit: float = float("inf")) -> None:
        """Begin another phase."""
        now = time.monotonic_ns()
        self._aside_ns = self._aside_until(now)
        self._phase, self._phase_ns, self._label, self._limit = phase, now, label, limit
        self._write()

    @contextlib.contextmanager
    def during(self, phase: Phase, label: str = "", limit: float = float("inf")) -> Iterator[None]:
        """Be in another phase for the time of a `with` block, and return to the one before."""
        before = self._phase, self._label, self._limit
        self.enter(phase, label, limit)
        try:
            yield
        finally:
            if self._phase is phase:  # unless an exception that nobody caught ended it
                self.enter(*before)

    @property
    def phase(self) -> Phase:
        """Return the current phase."""
        return self._phase

    @property
    def steps(self) -> tuple[int, int]:
        """Return how many steps were begun and finished."""
        return self._begun, self._finished

    def _aside_until(self, now: int) -> int:
        """Return how long it has been in other phases than stepping."""
        return self._aside_ns + (0 if self._phase is Phase.STEPPING else now - self._phase_ns)

    def _write(self) -> None:
        _LAYOUT.pack_into(
            self._memory,
            0,
            _MAGIC,
            _VERSION,
            self.pid,
            time.monotonic_ns(),
            self._begun,
            self._finished,
            self._first_ns,
            self._finished_ns,
            self._finished_aside_ns,
            int(self._phase),
            self._phase_ns,
            self._limit,
            self._label.encode(errors="replace")[:127],
        )


def read(path: Path) -> Reading | None:
    """Return what a beacon says, or None if there is none yet, or it was being written and cannot be read."""
    found = _bytes_of(path)
    for _ in range(3):  # the writer is not locked out; two equal readings in a row are a whole one
        before, found = found, _bytes_of(path)
        if before == found:
            break
    if found is None:
        return None
    magic, version, *numbers, limit, label = _LAYOUT.unpack(found)
    pid, beat, begun, finished, first, last, aside, phase, phase_ns = numbers
    if magic != _MAGIC or version != _VERSION or phase not in set(Phase):
        return None
    text = label.rstrip(b"\0").decode(errors="replace")
    return Reading(pid, beat, begun, finished, first, last, aside, Phase(phase), phase_ns, limit, text)


def path_of(run_dir: Path, instance: int) -> Path:
    """Return the file of an instance's beacon in the folder of a run's attempt."""
    return run_dir / f"beacon.{instance}"


_current: Beacon | None = None
_looked = False


def current() -> Beacon | None:
    """Return the beacon of this process; None without a launcher, or if another process of the instance writes it.

    The first process of an instance that asks gets it. A process that it forks does not.
    """
    global _current, _looked
    if not _looked:
        _looked = True
        run_dir, instance = os.environ.get(RUN_DIR), os.environ.get(INSTANCE)
        if run_dir and instance is not None:
            # the folder may be gone when a process outlives its launcher
            with contextlib.suppress(OSError, ValueError):
                _current = Beacon(path_of(Path(run_dir), int(instance)))
    if _current is not None and _current.pid != os.getpid():
        _current = None
    return _current


@contextlib.contextmanager
def during(phase: Phase, label: str, limit: float) -> Iterator[None]:
    """Be in another phase for the time of a `with` block, or of a function that this decorates.

    A phase other than stepping and starting goes on: only the outermost block counts.
    """
    beacon = current()
    if beacon is None or beacon.phase not in _INTERRUPTED:
        yield
    else:
        with beacon.during(phase, label, limit):
            yield


_INTERRUPTED: Final = (Phase.STARTING, Phase.COMPILING, Phase.STEPPING, Phase.SILENT)

LONG: Final = 600.0
"""Seconds that a piece of the library's own work on the host may take, such as placing weights."""


def _bytes_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(_LAYOUT.size)
    except OSError:
        return None
    return content if len(content) == _LAYOUT.size else None
