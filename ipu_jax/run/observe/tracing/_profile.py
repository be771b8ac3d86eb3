"""Record an XLA profile, and read from it when each device ran which operation.

On the CPU backend, XLA's thunks are events that name the device, the run, the program and the operation. A thunk that
continues in other threads ends with an event "end: <operation>", which has the number that its first event gave. The
end event may come late: the thread that ends a thunk often runs the next thunks first. Collectives block their thread,
and so end with their event.
"""

import dataclasses
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Final

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from ipu_jax.run.observe.tracing._operations import Operation, Operations, program_of, programs_in

_CLOCK: Final = "ipu_jax clock"


@dataclasses.dataclass(frozen=True)
class Event:
    """Hold when a device ran an operation, in nanoseconds of `time.monotonic_ns`; `end` may be too late."""

    operation: Operation
    start: float
    end: float


@dataclasses.dataclass
class DeviceRun:
    """Hold what one device did in one run of a program that has a scan over ticks.

    Attributes:
        device: its number among the devices of this process.
        start, end: the start of the first operation and the end of the last.
        events: the relevant operations, in the order of their starts.
    """

    device: int
    start: float = float("inf")
    end: float = 0.0
    events: list[Event] = dataclasses.field(default_factory=list)


class Profiler:
    """Record a profile between `start` and `stop`.

    Args:
        folder: where XLA writes it, until `discard`.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._into: Any = None

    def start(self) -> None:
        options = ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 2  # at level 1, operations are not events
        self._into = tempfile.TemporaryDirectory(dir=self._folder, prefix=".profile-")
        try:
            jax.profiler.start_trace(self._into.name, profiler_options=options)
        except BaseException:
            self.discard()
            raise
        _mark_clock()

    def stop(self) -> None:
        _mark_clock()
        jax.profiler.stop_trace()

    def runs(self) -> list[DeviceRun]:
        """Return what each device did in each run, in the order of their starts."""
        (path,) = Path(self._into.name).rglob("*.xplane.pb")
        profile = path.read_bytes()
        with warnings.catch_warnings():
            # jaxlib 0.12 gives this warning on Python 3.12, and aborts the process if warnings are errors
            warnings.filterwarnings("ignore", r"builtin type \w+ has no __module__", DeprecationWarning)
            return _runs(ProfileData.from_serialized_xspace(profile), programs_in(profile))

    def discard(self) -> None:
        """Remove the profile."""
        if self._into is not None:
            self._into.cleanup()


def _mark_clock() -> None:
    """Put an event with the current time into the profile, because a profile has its own clock."""
    for _ in range(3):  # the first annotation of a thread is slower
        with TraceAnnotation(_CLOCK, ns=str(time.monotonic_ns())):
            pass


def _runs(profile: Any, programs: dict[tuple[str, int], Operations]) -> list[DeviceRun]:
    ends: dict[int, float] = {}
    begun: list[tuple[int, int, Operation | None, float, float, int]] = []
    offsets: list[float] = []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name, start = event.name, event.start_ns
                if name.startswith("end: "):
                    ends[dict(event.stats)["_c"]] = start
                elif name == _CLOCK:
                    # the annotation begins after the clock was read, so the smallest difference is the best
                    offsets.append(start - int(dict(event.stats)["ns"]))
                elif not name.startswith("ThreadpoolListener"):
                    stats = dict(event.stats)
                    named = stats.get("hlo_module", ""), stats.get("program_id", -1)
                    program = program_of(*named, programs) if "hlo_op" in stats else None
                    if program is not None:
                        where = stats["run_id"], stats["device_ordinal"]
                        end = start + event.duration_ns
                        begun.append((*where, program.get(stats["hlo_op"]), start, end, stats.get("_p", -1)))
    to_clock = min(offsets, default=0.0)
    runs: dict[tuple[int, int], DeviceRun] = {}
    for run_id, device, operation, start, end, producer in begun:
        if operation is None or operation.role != "collective":
            end = max(end, ends.get(producer, 0.0))
        start, end = start - to_clock, end - to_clock
        run = runs.setdefault((run_id, device), DeviceRun(device))
        run.start, run.end = min(run.start, start), max(run.end, end)
        if operation is not None:
            run.events.append(Event(operation, start, end))
    for run in runs.values():
        run.events.sort(key=lambda event: event.start)
    return in_turn(sorted(runs.values(), key=lambda run: run.start))


def in_turn(runs: list[DeviceRun]) -> list[DeviceRun]:
    """Return the runs, changed so that none ends after the next run of its device has begun.

    A device makes one run after the other, so a later end is an end event that came late.
    """
    following: dict[int, float] = {}
    for run in reversed(runs):
        limit = following.get(run.device, float("inf"))
        run.end = min(run.end, limit)
        run.events = [dataclasses.replace(e, end=max(e.start, limit)) if e.end > limit else e for e in run.events]
        following[run.device] = run.start
    return runs
