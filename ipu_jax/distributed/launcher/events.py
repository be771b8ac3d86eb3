"""Define what happens to the instances of a host, in the same way for this host and for others.

A host's side makes events, and the supervisor reads them. Between hosts they travel as lines of JSON. The clocks of two
hosts have nothing in common, so a time travels as an age, and becomes a time on the reader's clock again.

    Exited(instance=1, status=-9, at=812.25)  -- at 812.5 -->  {"event": "Exited", ..., "at": 0.25}

Nothing here imports jax.
"""

import base64
import dataclasses
import json
from typing import Final, Literal, get_args

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.processes.beacons import Mark, Phase, Reading

Stream = Literal["stdout", "stderr"]

FULL: Final = 1 << 15
"""Bytes of an `Output` at which its pipe may have been full: pipes hold 65,536, or half of that if writes are small."""


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """The exception that ended an instance's program, as the instance recorded it."""

    at: float
    type: str
    message: str
    finished: int


@dataclasses.dataclass(frozen=True)
class Started:
    """An instance was started. `cores` are the cores that it is bound to, if any."""

    instance: int
    pid: int
    threads: str
    cores: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NotStarted:
    """An instance could not be started. `status` is the exit status that a shell would have."""

    instance: int
    status: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Output:
    """An instance has written something; empty data is the end of its stream."""

    instance: int
    stream: Stream
    data: bytes


@dataclasses.dataclass(frozen=True)
class Beat:
    """Describe the state of an instance: the letter of its process's state in /proc, and its beacon, if it has one."""

    instance: int
    pid: int
    letter: str
    progress: Reading | None
    error: ErrorRecord | None = None


@dataclasses.dataclass(frozen=True)
class Exited:
    """An instance has exited with `status`, or by signal `-status`."""

    instance: int
    status: int
    at: float
    error: ErrorRecord | None = None


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The Python stacks of an instance, as requested; empty if it could not give them."""

    instance: int
    text: str


@dataclasses.dataclass(frozen=True)
class Ready:
    """A host can start instances. If the coordinator runs there, it can use this port."""

    port: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """A host cannot do what was requested."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """No process of the attempt is left on a host, except `left`, which cannot be killed. Its run folder is gone."""

    left: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lost:
    """The connection to a host is gone, and with it whatever ran there."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Note:
    """A line for the user."""

    text: str


Event = Started | NotStarted | Output | Beat | Exited | Stacks | Ready | Refused | Ended | Lost | Note
_KINDS: Final = {kind.__name__: kind for kind in get_args(Event)}
_TIMES: Final = ("at", "beat_at", "first_at", "finished_at", "phase_at")


def line_of(event: Event, now: float) -> bytes:
    """Return the line that carries an event to another host."""
    values = _ages(dataclasses.asdict(event), now)
    if isinstance(event, Output):
        values["data"] = base64.b64encode(event.data).decode()
    return json.dumps({"event": type(event).__name__, **values}).encode() + b"\n"


def event_of(line: bytes, now: float) -> Event:
    """Return the event in a line, with times on the clock that now reads `now`.

    Raises:
        ValueError: the line is not an event.

    >>> event_of(line_of(Exited(1, -9, at=812.25), now=812.5), now=100.0)
    Exited(instance=1, status=-9, at=99.75, error=None)
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        values = _ages(values, now)  # the age of an age is the time again
        if kind is Output:
            values["data"] = base64.b64decode(values["data"])
        for name in ("cores", "left"):
            if name in values:
                values[name] = tuple(values[name])
        if read := values.get("progress"):
            values["progress"] = Reading(**{**read, "phase": Phase(read["phase"]), "mark": Mark(**read["mark"])})
        if values.get("error"):
            values["error"] = ErrorRecord(**values["error"])
        return kind(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{line[:80]!r} is no event: {error}") from error


def _ages(values: dict[str, Json], now: float) -> dict[str, Json]:
    return {
        name: _ages(value, now) if isinstance(value, dict) else now - value if name in _TIMES else value
        for name, value in values.items()
    }
