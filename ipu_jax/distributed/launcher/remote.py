"""Talk to the agent on another host, over the pipe of a remote shell such as ssh.

    poprun  -- {"do": "begin", ...} -->  agent
            <-- {"event": "Exited", ...} --

Nothing here imports jax.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.launcher.events import Ended, Event, Lost, Note, event_of
from ipu_jax.distributed.launcher.launch import Launch
from ipu_jax.distributed.launcher.local import LocalHost

CONNECTED_WITHIN: Final = 20.0
"""Seconds in which a host must answer."""
SILENT_FOR: Final = 20.0
"""Seconds of silence after which a host is lost."""
# BatchMode: do not ask for a password, since nobody would see the question
_SSH_OPTIONS: Final = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_AT_ONCE: Final = 1 << 16
_ALIVE: Final = Note("")


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
        agent = shlex.join(["env", *environment, sys.executable, "-m", "ipu_jax.distributed.launcher.agent"])
        return [*self.command, *options, host, f"cd {shlex.quote(self.folder)} && exec {agent}"]


class RemoteHost:
    """A host that is reached through a remote shell.

    Attributes:
        lost: whether the host is lost, and takes no more requests.
    """

    def __init__(self, name: str, shell: Shell):
        self.name = name
        self._process = subprocess.Popen(
            shell.agent_on(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal must not end it before it has done its work
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        for file in (self._in, self._out, self._err):
            os.set_blocking(file.fileno(), False)
        self._to_send = self._rest = self._said = b""
        self._heard_at, self._heard = time.monotonic(), False
        self._asked_at = time.monotonic()
        self.lost = False

    def files(self) -> list[int]:
        """Return the file descriptors to wait on for events."""
        return [] if self.lost else [self._out.fileno()]

    def events(self) -> list[Event]:
        """Return what has happened since the last call, without waiting."""
        if self.lost:
            return []
        asked, self._asked_at = self._asked_at, time.monotonic()
        if self._asked_at - asked > 2:  # we were suspended: what the host has said meanwhile is about to be read
            self._heard_at = self._asked_at
        self._flush()
        data, ended = _read(self._out.fileno())
        said, _ = _read(self._err.fileno())
        self._said = (self._said + said)[-4096:]
        now = time.monotonic()
        if data:
            self._heard_at, self._heard = now, True
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Event] = []
        for line in filter(None, lines):
            try:
                events.append(event_of(line, now))
            except ValueError:
                self._said += line + b"\n"  # from the login scripts
        silent = now - self._heard_at > (SILENT_FOR if self._heard else CONNECTED_WITHIN)
        if ended or silent:
            self.lost = True
            if not any(isinstance(event, Ended) for event in events):
                events.append(Lost(self._reason(silent and not ended)))
        return [event for event in events if event != _ALIVE]

    def prepare(self, bind: str, port: int) -> None:
        """Find a free port at an address, or check that the given one is free: `Ready` or `Refused` follows."""
        self._ask("prepare", bind=bind, port=port)

    def begin(self, launch: Launch) -> None:
        """Start the instances: a `Started` or `NotStarted` follows for each."""
        self._ask("begin", launch=launch.to_json())

    def send(self, number: int, instances: Iterable[int] | None = None) -> None:
        """Send a signal to the process groups of some instances, or of all."""
        self._ask("send", number=int(number), instances=None if instances is None else list(instances))

    def ask_stacks(self, instance: int) -> None:
        """Ask an instance for its Python stacks: `Stacks` follows."""
        self._ask("ask_stacks", instance=instance)

    def hold(self, on: bool) -> None:
        """Stop reading what the instances write to their pipes, or resume."""
        self._ask("hold", on=on)

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt, after `patience` seconds to end on its own: `Ended` follows."""
        self._ask("end", patience=patience)

    def close(self) -> None:
        """Disconnect from the host: at the end of its pipe, the agent kills what is left and exits."""
        with contextlib.suppress(OSError):
            self._flush()
        for file in (self._in, self._out, self._err):
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
            self._to_send += json.dumps({"do": what, **values}).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._to_send:
                self._to_send = self._to_send[os.write(self._in.fileno(), self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, and its output says so
            self._to_send = b""

    def _reason(self, silent: bool) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        said = " ".join((self._said + _read(self._err.fileno())[0]).decode(errors="replace").split())
        if silent:
            what = (
                f"said nothing for {SILENT_FOR:g} s" if self._heard else f"did not answer within {CONNECTED_WITHIN:g} s"
            )
        else:
            what = "the connection was closed" if self._heard else "cannot be reached"
        return f"{what}: {said[-500:]}" if said else what


Host = LocalHost | RemoteHost
"""A host of instances, this one or another."""


def _read(handle: int) -> tuple[bytes, bool]:
    """Return the bytes that can be read without waiting, and whether the stream has ended."""
    data = b""
    try:
        while len(data) < 1 << 22:
            piece = os.read(handle, _AT_ONCE)
            if not piece:
                return data, True
            data += piece
    except BlockingIOError:
        pass
    return data, False
