"""Write down the progress of an instance where its launcher can read it, even while the instance is frozen.

A *beacon* is a file of fixed size that the instance maps into its memory. The steps write to it, rather than a thread,
which would go on while the steps are stuck. A write costs no system call. Times are from CLOCK_MONOTONIC, which all
processes of a host share.

    process    begun(), finished(), enter(...)  -->  beacon, in its record (`record.py`)  -->  poprun, ipu-monitor

Nothing here imports jax.
"""

import contextlib
import dataclasses
import enum
import errno
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ipu_jax.base import opening

_LAYOUT: Final = struct.Struct("<4sI17qd128s")
_NUMBERS: Final = (
    *("pid", "beat_at", "begun", "finished", "first_at", "finished_at", "aside", "updates", "samples"),
    *("mark_at", "mark_updates", "mark_samples", "joint_begun", "joint_made", "device_bytes", "phase", "phase_at"),
)
"""The numbers of the layout, in its order; times are in nanoseconds."""
_TIMES: Final = ("beat_at", "first_at", "finished_at", "aside", "mark_at", "phase_at")
_MAGIC: Final = b"IPUB"
_VERSION: Final = 3
_SIZE: Final = 4096  # bytes that are mapped
_MARK_EVERY_NS: Final = 5_000_000_000


class Phase(enum.IntEnum):
    """Name what an instance is doing. Only in `STEPPING` can time without a finished step mean that it is stuck.

    `BUSY` is other work that takes time, such as saving; other instances may wait for it. `WAITING` is a wait for other
    instances, outside a step; those may be stuck. The label names the work, or the place.
    """

    SILENT = 8  # its program has reported no step so far, and may never do so
    STARTING = 1  # from the dispatch of its first step until the step has finished
    COMPILING = 2
    STEPPING = 3
    BUSY = 4
    ENDING = 5  # its program has ended; it waits for the others
    FAILED = 6  # its program has raised an exception; the label says which
    WAITING = 7


@dataclasses.dataclass(frozen=True)
class Mark:
    """Hold the work done up to a time: weight updates, and the examples in them."""

    at: float = 0.0
    updates: int = 0
    samples: int = 0


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold the content of a beacon. Times are seconds on its host's monotonic clock.

    Attributes:
        begun: steps that were given to the devices so far.
        finished: steps that the devices have finished, as far as the instance has noticed.
        finished_at: when `finished` last grew; 0 before the first.
        phase: what the instance is doing.
        phase_at: when the phase began.
        limit: seconds that the phase may take; infinite if the instance does not say.
        label: a few words about the phase.
        first_at: when the first step finished; 0 before it. The step may have included the compilation.
        aside: the seconds spent in phases other than stepping by then.
        joint_begun: the number of steps and meetings that this instance has begun and every instance must make once.
        joint_made: for how many of these this instance has done its part.
        pid: the process that writes it.
        beat_at: when the beacon was last written.
        updates, samples: weight updates, and the examples in them, in all finished steps. A step is a device call,
            which can make several updates.
        mark: the work done some seconds (5 to 10, or one step) before the last finished step, but not before the first.
            The recent speed is the work since then, divided by the time since then.
        device_bytes: memory in use on the devices of this process, if they report it; else 0.
    """

    begun: int
    finished: int
    finished_at: float
    phase: Phase
    phase_at: float
    limit: float
    label: str
    first_at: float = 0.0
    aside: float = 0.0
    joint_begun: int = 0
    joint_made: int = 0
    pid: int = 0
    beat_at: float = 0.0
    updates: int = 0
    samples: int = 0
    mark: Mark = Mark()
    device_bytes: int = 0


class Beacon:
    """Writes the beacon of this process.

    Args:
        path: a file that does not exist yet.
        launched: whether a launcher reads it.

    Attributes:
        pid, launched: the number of this process, and whether a launcher reads this.
        phase: what the process is doing.
        updates: the number of weight updates in all finished steps.
        device_bytes: how much device memory is in use, written from the next write on.

    Raises:
        FileExistsError: another process writes this beacon.
    """

    def __init__(self, path: Path, launched: bool = True):
        handle = opening.created(path)
        try:
            self._memory = mapped(handle)
        finally:
            os.close(handle)
        self.pid, self.launched = os.getpid(), launched
        self._begun = self._finished = self._first_ns = self._finished_ns = 0
        self.updates = self._samples = self.device_bytes = self._joint_begun = self._joint_made = 0
        self._older = self._newer = (0, 0, 0)  # ns, updates, samples
        self._aside_ns = self._finished_aside_ns = 0
        self.phase, self._phase_ns = Phase.SILENT, time.monotonic_ns()
        self.enter(Phase.SILENT)

    def begun(self, steps: int = 1, *, joint: bool = False) -> None:
        """Count steps that were given to the devices. Joint steps need all instances, and `dispatched` follows."""
        if self.phase is Phase.SILENT:
            self.enter(Phase.STARTING)
        self._begun += steps
        self._joint_begun += joint * steps
        if self.launched:  # without a launcher, nobody reads `begun` before the next step has finished
            self._write()

    def dispatched(self) -> None:
        """Count a joint step as made: the devices of this instance do their part, whatever happens to its program."""
        self._joint_made += 1
        self._write()

    @contextlib.contextmanager
    def jointly(self) -> Iterator[None]:
        """Count a `with` block as something that all instances must do, once each, unless it raises."""
        self._joint_begun += 1
        self._write()
        try:
            yield
        except BaseException:
            self._joint_begun -= 1
            raise
        self._joint_made += 1
        self._write()

    def finished(self, steps: int = 1, updates: int | None = None, samples: int = 0) -> None:
        """Count steps that the devices have finished, with their weight updates (by default one each) and examples."""
        now = time.monotonic_ns()
        self._finished += steps
        self.updates += steps if updates is None else updates
        self._samples += samples
        self._finished_ns = now
        if not self._first_ns:  # it may include compilation: speeds are measured from its end
            self._first_ns = now
            self._older = self._newer = (now, self.updates, self._samples)
        elif now - self._newer[0] > _MARK_EVERY_NS:
            self._older, self._newer = self._newer, (now, self.updates, self._samples)
        self._finished_aside_ns = self._aside_until(now)
        if self.phase is not Phase.STEPPING and self.phase in (Phase.SILENT, Phase.STARTING, Phase.COMPILING):
            self.enter(Phase.STEPPING)
        else:
            self._write(now)

    def enter(self, phase: Phase, label: str = "", limit: float = float("inf")) -> None:
        """Begin another phase."""
        now = time.monotonic_ns()
        self._aside_ns = self._aside_until(now)
        self.phase, self._phase_ns, self._label, self._limit = phase, now, label, limit
        self._encoded = label.encode(errors="replace")[:127]
        self._write()

    @contextlib.contextmanager
    def during(self, phase: Phase, label: str = "", limit: float = float("inf")) -> Iterator[None]:
        """Enter another phase for the duration of a `with` block, and return to the previous one."""
        before = self.phase, self._label, self._limit
        self.enter(phase, label, limit)
        try:
            yield
        finally:
            if self.phase is phase:  # unless an uncaught exception ended it
                self.enter(*before)

    def _aside_until(self, now: int) -> int:
        """Return the time spent in phases other than stepping."""
        return self._aside_ns + (0 if self.phase is Phase.STEPPING else now - self._phase_ns)

    def _write(self, now: int = 0) -> None:
        content = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.pid,
            now or time.monotonic_ns(),
            self._begun,
            self._finished,
            self._first_ns,
            self._finished_ns,
            self._finished_aside_ns,
            self.updates,
            self._samples,
            *self._older,
            self._joint_begun,
            self._joint_made,
            self.device_bytes,
            self.phase,
            self._phase_ns,
            self._limit,
            self._encoded,
        )
        self._memory[: len(content)] = content


def mapped(handle: int, size: int = _SIZE) -> mmap.mmap:
    """Map an open file into memory, by default at the size of a beacon, and return the memory. New bytes are 0.

    Raises:
        OSError: there is no room for it. Without this check, the first write to the memory would end the process.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:  # macOS
        end = os.fstat(handle).st_size
        missing = max(0, size - end)
        if os.pwrite(handle, bytes(missing), end) < missing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return mmap.mmap(handle, size)


def read(path: Path) -> Reading | None:
    """Return the content of a beacon; None if there is none yet, or if no process writes what is there."""

    def content() -> bytes:
        with opening.reading(path) as file:
            return file.read(_LAYOUT.size)

    with contextlib.suppress(OSError):
        found = parsed(whole(content))
        return found if found is not None and _is_plausible(found) else None
    return None


def _is_plausible(found: Reading) -> bool:
    """Return whether a process can have written this; anything else would enter the judgement of other instances."""
    counts = found.pid, found.begun, found.finished, found.joint_begun, found.joint_made, found.updates, found.samples
    times = found.beat_at, found.first_at, found.finished_at, found.mark.at, found.phase_at
    return min(*counts, *times) >= 0 and max(times) <= time.monotonic_ns() / 1e9 and not math.isnan(found.limit)


def whole(content: Callable[[], bytes]) -> bytes:
    """Return content that was not being written: `content`, which reads it again, has returned it twice in a row.

    The writer is not locked out. After four different readings, the last one is returned.
    """
    found = content()
    for _ in range(3):
        before, found = found, content()
        if before == found:
            break
    return found


def parsed(found: bytes) -> Reading | None:
    """Return the reading of the bytes of a beacon, or None if no beacon has these bytes."""
    if len(found) < _LAYOUT.size:
        return None
    magic, version, *numbers, limit, label = _LAYOUT.unpack_from(found)
    values: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
    if magic != _MAGIC or version != _VERSION or values["phase"] not in set(Phase):
        return None
    values |= {name: values[name] / 1e9 for name in _TIMES}
    values["phase"], values["label"] = Phase(values["phase"]), label.rstrip(b"\0").decode(errors="replace")
    mark = Mark(*(values.pop(name) for name in ("mark_at", "mark_updates", "mark_samples")))
    return Reading(**values, limit=limit, mark=mark)
