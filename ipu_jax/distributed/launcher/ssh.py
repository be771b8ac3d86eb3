"""Run the instances of another host: poprun talks to an agent there, over the pipe of a remote shell such as ssh.

    poprun  -- {"do": "begin", ...} -->  agent      RemoteHost | python -m ipu_jax.distributed.launcher.ssh
            <-- {"event": "Exited", ...} --

Both write one line of JSON for each command or event. The clocks of two hosts have nothing in common, so a time travels
as an age, and becomes a time on the reader's clock again:

    Exited(instance=1, status=-9, at=812.25)  -- at 812.5 -->  {"event": "Exited", ..., "at": 0.25}

When the pipe from poprun ends, for whatever reason, the agent kills all its instances.

Nothing here imports jax.
"""

import base64
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from typing import Final, get_args

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.launcher.display import STOPPING, Signals
from ipu_jax.distributed.launcher.hosts import Ended, ErrorRecord, Event, LocalHost, Lost, Output
from ipu_jax.distributed.launcher.topology import Launch
from ipu_jax.distributed.processes.beacons import Mark, Phase, Reading

_KINDS: Final = {kind.__name__: kind for kind in get_args(Event)}
_TIMES: Final = ("at", "beat_at", "first_at", "finished_at", "phase_at")
CONNECTED_WITHIN: Final = 20.0
"""Seconds in which a host must answer."""
SILENT_FOR: Final = 20.0
"""Seconds of silence after which a host is lost."""
# BatchMode: do not ask for a password, since nobody would see the question
_SSH_OPTIONS: Final = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_AT_ONCE: Final = 1 << 22
_LOOK_EVERY: Final = 0.05
_ALIVE_EVERY: Final = 2.0
_MOST_WAITING: Final = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shell:
    """Hold the command that runs a line on another host, given the host and the line, and the folder to run in."""

    command: tuple[str, ...]
    folder: str

    def agent_on(self, host: str) -> list[str]:
        """Return the command that starts an agent on a host."""
        options = [word for option in _SSH_OPTIONS for word in ("-o", option)] if self.command[0] == "ssh" else []
        path = os.environ.get("PYTHONPATH")
        environment = [f"PYTHONPATH={path}"] if path else []
        agent = shlex.join(["env", *environment, sys.executable, "-m", "ipu_jax.distributed.launcher.ssh"])
        return [*self.command, *options, host, f"cd {shlex.quote(self.folder)} && exec {agent}"]


class _Connection:
    """One end of the pipes between poprun and an agent: it sends and receives lines, and never waits.

    Attributes:
        waiting: what the other side has not taken yet.
        heard_at: when it last said something; None before.
        ended, broken: whether it has ended what it says, and whether it takes nothing more.
    """

    def __init__(self, read: int, write: int):
        self._read, self._write, self._rest, self.waiting = read, write, b"", b""
        self.heard_at: float | None = None
        self.ended = self.broken = False
        for handle in (read, write):
            os.set_blocking(handle, False)

    def say(self, line: bytes) -> None:
        self.waiting += line + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self._write, self.waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            self.waiting, self.broken = b"", True

    def heard(self) -> list[bytes]:
        """Return the whole lines that have come, but for empty ones, which only say that the other side is alive."""
        data, self.ended = _read(self._read)
        if data:
            self.heard_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line for line in lines if line]


class RemoteHost:
    """A host that is reached through a remote shell. It has the methods of `LocalHost`.

    Attributes:
        lost: whether the host is lost, and takes no more requests.
    """

    def __init__(self, name: str, shell: Shell):
        self.name, self.lost = name, False
        self._process = subprocess.Popen(
            shell.agent_on(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal must not end it before it has done its work
        )
        self._files = [file for file in (self._process.stdin, self._process.stdout, self._process.stderr) if file]
        write, self._out, self._err = (file.fileno() for file in self._files)
        os.set_blocking(self._err, False)
        self._agent, self._said = _Connection(self._out, write), b""
        self._begun = self._asked_at = time.monotonic()

    def files(self) -> list[int]:
        """Return the file descriptors to wait on for events."""
        return [] if self.lost else [self._out]

    def events(self) -> list[Event]:
        """Return what has happened since the last call, without waiting."""
        if self.lost:
            return []
        asked, self._asked_at = self._asked_at, time.monotonic()
        if self._asked_at - asked > 2:  # we were suspended: what the host has said meanwhile is about to be read
            self._begun = self._asked_at
        self._agent.flush()
        lines, events, now = self._agent.heard(), list[Event](), time.monotonic()
        self._said = (self._said + _read(self._err)[0])[-4096:]
        for line in lines:
            try:
                events.append(event_of(line, now))
            except ValueError:
                self._said += line + b"\n"  # from the login scripts
        heard_at = self._agent.heard_at
        silent = now - max(self._begun, heard_at or 0) > (CONNECTED_WITHIN if heard_at is None else SILENT_FOR)
        if self._agent.ended or silent:
            self.lost = True
            if not any(isinstance(event, Ended) for event in events):
                events.append(Lost(self._reason(silent and not self._agent.ended)))
        return events

    def prepare(self, bind: str, port: int, patience: float) -> None:
        """Ask for a port, as on this host: `Prepared` follows as an event."""
        self._ask("prepare", bind=bind, port=port, patience=patience)

    def begin(self, launch: Launch) -> None:
        """Start the instances."""
        self._ask("begin", launch=launch.to_json())

    def send(self, number: int) -> None:
        """Send a signal."""
        self._ask("send", number=int(number))

    def ask_stacks(self, instance: int) -> None:
        """Ask an instance what it does."""
        self._ask("ask_stacks", instance=instance)

    def hold(self, on: bool) -> None:
        """Stop reading, or resume."""
        self._ask("hold", on=on)

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt."""
        self._ask("end", patience=patience)

    def close(self) -> None:
        """Disconnect from the host: at the end of its pipe, the agent kills what is left and exits."""
        self._agent.flush()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.lost = True

    def _ask(self, what: str, **values: Json) -> None:
        if not self.lost:
            self._agent.say(json.dumps({"do": what, **values}).encode())

    def _reason(self, silent: bool) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        said = " ".join((self._said + _read(self._err)[0]).decode(errors="replace").split())
        knows = self._agent.heard_at is not None
        if silent:
            what = f"said nothing for {SILENT_FOR:g} s" if knows else f"did not answer within {CONNECTED_WITHIN:g} s"
        else:
            what = "the connection was closed" if knows else "cannot be reached"
        return f"{what}: {said[-500:]}" if said else what


Host = LocalHost | RemoteHost
"""A host of instances, this one or another."""


def _read(handle: int) -> tuple[bytes, bool]:
    """Return the bytes that can be read without waiting, and whether the stream has ended."""
    data = b""
    try:
        while len(data) < _AT_ONCE:
            piece = os.read(handle, 1 << 16)
            if not piece:
                return data, True
            data += piece
    except BlockingIOError:
        pass
    except OSError:
        return data, True
    return data, False


class Agent:
    """Does what `poprun` asks for on a host."""

    def __init__(self) -> None:
        self._host, self._poprun = LocalHost(""), _Connection(0, 1)
        self._held, self._alive_at = False, 0.0

    def run(self) -> None:
        """Serve until the pipe from poprun ends, or a signal arrives."""
        signals = Signals()
        while not (self._poprun.ended or self._poprun.broken):
            if set(STOPPING) & set(signals.wait([0, *self._host.files()], _LOOK_EVERY)):
                break
            for line in self._poprun.heard():
                self._do(json.loads(line))
            for event in self._host.events():
                self._say(line_of(event, time.monotonic()))
            if time.monotonic() >= self._alive_at:
                self._say(b"")
            self._poprun.flush()
            # if poprun does not read, the instances have to wait, so that nothing here grows without bound
            self._host.hold(self._held or len(self._poprun.waiting) > _MOST_WAITING)
        self._host.close()

    def _do(self, command: dict[str, Json]) -> None:
        match command:
            case {"do": "prepare", "bind": bind, "port": port, "patience": patience}:
                self._say(line_of(self._host.prepare(bind, port, patience), time.monotonic()))
            case {"do": "begin", "launch": values}:
                own = {**os.environ, **values["environment"]}
                self._host.begin(Launch.from_json({**values, "environment": own}))
            case {"do": "hold", "on": on}:
                self._held = on
            case {"do": "send" | "ask_stacks" | "end" as what, **values}:
                getattr(self._host, what)(**values)
            case _:
                raise ValueError(f"{command!r} is not a command of an agent: is poprun of the same version there?")

    def _say(self, line: bytes) -> None:
        self._alive_at = time.monotonic() + _ALIVE_EVERY
        self._poprun.say(line)


def line_of(event: Event, now: float) -> bytes:
    """Return the line that carries an event to another host."""
    values = _ages(dataclasses.asdict(event), now)
    if isinstance(event, Output):
        values["data"] = base64.b64encode(event.data).decode()
    return json.dumps({"event": type(event).__name__, **values}).encode()


def event_of(line: bytes, now: float) -> Event:
    """Return the event in a line, with times on the clock that now reads `now`.

    Raises:
        ValueError: the line is not an event.

    >>> from ipu_jax.distributed.launcher.hosts import Exited
    >>> event_of(line_of(Exited(1, -9, at=812.25), now=812.5), now=100.0)
    Exited(instance=1, status=-9, at=99.75, error=None)
    """
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        values = _ages(values, now)  # the age of an age is the time again
        if kind is Output:
            values["data"] = base64.b64decode(values["data"])
        for name in ("cores", "left", "flight", "ticks"):
            if name in values:
                values[name] = tuple(values[name])
        if read := values.get("progress"):
            values["progress"] = Reading(**{**read, "phase": Phase(read["phase"]), "mark": Mark(**read["mark"])})
        if values.get("error"):
            values["error"] = ErrorRecord(**values["error"])
        return kind(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{line[:80]!r} is not an event: {error}") from error


def _ages(values: dict[str, Json], now: float) -> dict[str, Json]:
    return {
        name: _ages(value, now) if isinstance(value, dict) else now - value if name in _TIMES else value
        for name, value in values.items()
    }


if __name__ == "__main__":
    Agent().run()
    sys.exit(0)
