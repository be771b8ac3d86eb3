"""Record an XLA profile, and read from it when each device ran which operation.

On the CPU backend, XLA's thunks are events that name the device, the run, the program and the operation. A thunk that
continues in other threads ends with an event "end: <operation>", which has the number that its first event gave. The
end event may come late: the thread that ends a thunk often runs the next thunks first. Collectives block their thread,
and so end with their event.

A profile (an `XSpace` of xprof) contains each program as an `HloProto`. Both are protocol buffers. Only a few of their
fields matter here, so they are read by hand, without a library that every user would have to install.

    XSpace.planes=1 -> XPlane(name=2, event_metadata=4) -> XEventMetadata(name=2, stats=5) -> XStat.bytes=6 -> HloProto
    HloProto.hlo_module=1 -> HloModuleProto.computations=3 -> HloComputationProto(id=5, instructions=2)
    HloInstructionProto(name=1, opcode=2, metadata=7 -> OpMetadata.op_name=2, called_computation_ids=38)
"""

import dataclasses
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from ipu_jax.core.engine import labels
from ipu_jax.core.engine.labels import UPDATE, Guard, PlanNames

Role = Literal["scan", "guard", "inner", "collective", "update", "outside"]

_COLLECTIVES: Final = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
_SCAN = re.compile(r"ipu_jax\.plan\.[0-9a-f]+\.[0-9a-f]+/while$")


@dataclasses.dataclass(frozen=True)
class Operation:
    """Describe an operation of a program.

    Attributes:
        role: "scan", the loop over ticks; "guard", the loop of a guard; "inner", an operation in a guard's body;
            "collective", anywhere; "update", an operation of the weight update; "outside", any other outside the scan.
        name: the opcode, for a collective and for an operation outside the scan.
        plan: the plan of a scan.
        guard: kind and number, for a guard and for an operation in its body.
        in_update: whether a collective belongs to the weight update.
        is_opaque: whether the loop of a guard is one kernel, so that the profile shows no operations of its body.
    """

    role: Role
    name: str = ""
    plan: PlanNames | None = None
    guard: Guard | None = None
    in_update: bool = False
    is_opaque: bool = False


Operations = dict[str, Operation]


def programs_in(profile: bytes) -> dict[tuple[str, int], Operations]:
    """Return the programs of a profile that have a scan over ticks, by their names and numbers in it."""
    programs: dict[tuple[str, int], Operations] = {}
    for field, plane in _fields(profile):
        if field != 1 or _first(plane, 2) != b"/host:metadata":
            continue
        for field_of_plane, entry in _fields(plane):
            metadata = _first(entry, 2) if field_of_plane == 4 else None
            if not isinstance(metadata, bytes):
                continue
            named = re.fullmatch(r"(.*)\((\d+)\)", (_first(metadata, 2) or b"").decode())
            for field_of_metadata, stat in _fields(metadata):
                proto = _first(stat, 6) if field_of_metadata == 5 else None
                if named and proto and b"ipu_jax.plan." in proto:
                    programs[named[1], int(named[2])] = _operations(proto)
    return programs


def program_of(name: str, number: int, programs: dict[tuple[str, int], Operations]) -> Operations | None:
    """Return the program of an event; None if there is none, or if several programs match."""
    if (name, number) in programs:
        return programs[name, number]
    # if a program comes from a cache of executables, its events have another number than the program
    alike = [program for (own, _), program in programs.items() if own == name]
    return alike[0] if len(alike) == 1 else None


def _operations(proto: bytes) -> Operations:
    computations = [part for field, part in _fields(_first(proto, 1) or b"") if field == 3]
    found: Operations = {}
    bodies: dict[int, Guard] = {}  # by the number of the computation
    instructions: list[tuple[int, str, str, str, list[int], Guard | None]] = []
    loops_in: dict[int, Guard] = {}  # by the number of the computation that contains the loop
    calls: dict[int, set[int]] = {}
    scans: set[int] = set()  # their computations
    for computation in computations:
        number = _first(computation, 5)
        for field, instruction in _fields(computation):
            if field != 2:
                continue
            name, opcode, op_name, called = _instruction(instruction)
            calls.setdefault(number, set()).update(called)
            guard = labels.guard_named(op_name) if opcode == "while" else None
            instructions.append((number, name, opcode, op_name, called, guard))
            if guard is not None:
                bodies[called[0]] = guard  # the body comes first, then the condition
                loops_in[number] = guard
            elif opcode == "while" and _SCAN.search(op_name):
                scans |= {*called}
    inside = _reached(scans, calls)
    for number, name, opcode, op_name, called, own in instructions:
        guard, in_update = bodies.get(number), UPDATE in op_name
        if own is not None:
            found[name] = Operation("guard", guard=own)
        elif opcode == "call" and called[0] in loops_in:  # XLA makes one kernel of a loop with little to do
            found[name] = Operation("guard", guard=loops_in[called[0]], is_opaque=True)
        elif opcode == "while" and _SCAN.search(op_name):
            found[name] = Operation("scan", plan=labels.plan_named(op_name))
        elif opcode.removesuffix("-start") in _COLLECTIVES:
            found[name] = Operation("collective", opcode, guard=guard, in_update=in_update)
        elif guard is not None:
            found[name] = Operation("inner", guard=guard)
        elif number not in inside:
            found[name] = Operation("update" if in_update else "outside", opcode, in_update=in_update)
    return found


def _reached(first: set[int], calls: dict[int, set[int]]) -> set[int]:
    """Return these computations and all that they call."""
    found, left = {*first}, [*first]
    while left:
        new = calls.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def _instruction(proto: bytes) -> tuple[str, str, str, list[int]]:
    """Return an instruction's name, opcode, name in jax, and the numbers of the computations that it calls."""
    name, opcode, op_name = b"", b"", b""
    called: list[int] = []
    for field, value in _fields(proto):
        if field == 1:
            name = value
        elif field == 2:
            opcode = value
        elif field == 7:
            op_name = _first(value, 2) or b""
        elif field == 38:
            called += [value] if isinstance(value, int) else _varints(value)
    return name.decode(), opcode.decode(), op_name.decode(), called


# the wire format of protocol buffers


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field. The value is an int, or bytes if it has a length or a fixed size."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(message, at)
            value = message[at : at + size]
            at += size
        yield key >> 3, value


def _first(message: Any, number: int) -> Any:
    """Return the value of the first field with a number, or None."""
    return next((value for field, value in _fields(message) if field == number), None)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _varints(packed: bytes) -> list[int]:
    found, at = list[int](), 0
    while at < len(packed):
        value, at = _varint(packed, at)
        found.append(value)
    return found


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
