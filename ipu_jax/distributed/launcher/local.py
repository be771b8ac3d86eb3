"""Run the instances of this host: start them, read what they write, see how they are, and leave none behind.

Each has a session and a process group of its own. One that has exited stays a zombie until the end of the attempt, so
that nobody else gets its number, by which signals reach what is left of its group.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.distributed.environment import THREADS
from ipu_jax.distributed.launcher import watcher
from ipu_jax.distributed.launcher.events import (
    Beat,
    Ended,
    ErrorRecord,
    Event,
    Exited,
    NotStarted,
    Output,
    Ready,
    Refused,
    Stacks,
    Started,
    Stream,
    progress_of,
)
from ipu_jax.distributed.launcher.host import STACKS_WITHIN
from ipu_jax.distributed.launcher.launch import Launch
from ipu_jax.processes import beacons
from ipu_jax.processes.beacons import Phase

BEAT_EVERY: Final = 0.2
"""Seconds between two looks at a beacon."""
_AT_ONCE: Final = 1 << 16
_CANNOT_DIE: Final = 3.0
_TRIES: Final = 20


@dataclasses.dataclass
class _Instance:
    number: int
    process: subprocess.Popen[bytes]
    pipes: dict[int, Stream]
    exited: bool = False
    stacks_from: int = 0
    stacks_until: float = 0.0


class LocalHost:
    """This host."""

    def __init__(self, name: str):
        self.name = name
        self._instances: dict[int, _Instance] = {}
        self._run_dir: Path | None = None
        self._waiting: list[Event] = []
        self._held = False
        self._next_beat = 0.0
        self._watcher: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None

    @property
    def lost(self) -> bool:
        """Return whether nothing more can be asked of it: this host is always there."""
        return False

    def files(self) -> list[int]:
        """Return what to wait on until something may have happened."""
        return [] if self._held else [pipe for instance in self._instances.values() for pipe in instance.pipes]

    def events(self) -> list[Event]:
        """Return what has happened, without waiting."""
        events, self._waiting = self._waiting, []
        if not self._held:
            for instance in self._instances.values():
                events += self._outputs(instance)
        beats = time.monotonic() >= self._next_beat
        if beats:
            self._next_beat = time.monotonic() + BEAT_EVERY
        for instance in self._instances.values():
            if not instance.exited:
                events += self._exit(instance) or (self._beat(instance) if beats else [])
                events += self._stacks(instance)
        return events

    def prepare(self, bind: str, port: int) -> None:
        """Look for a port that is free (or whether this one is) at an address: `Ready` or `Refused` follows."""
        self._let_go_of_the_port()
        try:
            for _ in range(1 if port else _TRIES):
                found = port or free_port(bind)
                self._reserved = reservation(found) if bind else None
                if not bind or self._reserved is not None:
                    self._waiting.append(Ready(free_port(bind, found)))
                    return
            self._waiting.append(Refused(f"port {port} on {self.name} belongs to another run of poprun"))
        except OSError as error:
            self._let_go_of_the_port()
            what = f"port {port}" if port else "a port"
            self._waiting.append(Refused(f"{what} of {bind} on {self.name} cannot be used: {error.strerror}"))

    def begin(self, launch: Launch) -> None:
        """Start the instances: a `Started` or `NotStarted` follows for each."""
        try:
            self._run_dir = Path(tempfile.mkdtemp(prefix="poprun-"))
        except OSError as error:
            reason = f"no run folder can be made in {tempfile.gettempdir()} ({error.strerror}): set TMPDIR to another"
            self._waiting += [NotStarted(place.instance, 1, reason) for place in launch.places[:1]]
            return
        self._tell("folder", str(self._run_dir))
        for place, cores in zip(launch.places, launch.shares(), strict=True):
            place = dataclasses.replace(place, run_dir=self._run_dir)
            environment = launch.variables(place, len(cores))
            bound = tuple(cores) if launch.binds() else ()
            try:
                process = _started(launch.command, environment, bound)
            except OSError as error:
                status = 127 if isinstance(error, FileNotFoundError) else 126
                self._waiting.append(NotStarted(place.instance, status, f"{launch.command[0]}: {error.strerror}"))
                return
            self._tell("group", process.pid)
            assert process.stdout is not None
            assert process.stderr is not None
            pipes: dict[int, Stream] = {process.stdout.fileno(): "stdout", process.stderr.fileno(): "stderr"}
            for pipe in pipes:
                os.set_blocking(pipe, False)
            self._instances[place.instance] = _Instance(place.instance, process, pipes)
            self._waiting.append(Started(place.instance, process.pid, environment[THREADS], bound))

    def send(self, number: int, instances: Iterable[int] | None = None) -> None:
        """Send a signal to the process groups of some instances, or of all."""
        for instance in self._instances if instances is None else instances:
            if instance in self._instances:
                with contextlib.suppress(OSError):
                    os.killpg(self._instances[instance].process.pid, number)

    def ask_stacks(self, instance: int) -> None:
        """Ask an instance for its Python stacks: `Stacks` follows."""
        found, path = self._instances[instance], self._path("stacks", instance)
        pid = self._pid_of(found)
        if found.exited or not path.exists() or letter_of(pid) in "TtZ":
            self._waiting.append(Stacks(instance, ""))
            return
        found.stacks_from = path.stat().st_size
        found.stacks_until = time.monotonic() + STACKS_WITHIN
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)

    def hold(self, on: bool) -> None:
        """Leave what the instances write in their pipes, or read it again."""
        self._held = on

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt, after a time in which it may end by itself: `Ended` follows."""
        if self._run_dir is None:
            self._waiting.append(Ended())
            return
        groups = [instance.process.pid for instance in self._instances.values()]
        self._wait_for_strays(groups, patience)
        left = watcher.kill(str(self._run_dir), groups, _CANNOT_DIE)
        for instance in self._instances.values():
            self._waiting += self._outputs(instance, most=1 << 24)
            for pipe in list(instance.pipes):  # a process that cannot die may hold it
                self._waiting.append(self._close(instance, pipe))
            if not instance.exited:
                self._waiting += self._exit(instance)
            with contextlib.suppress(subprocess.TimeoutExpired):
                instance.process.wait(timeout=0.1)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self._tell("done", str(self._run_dir))
        self._instances, self._run_dir = {}, None
        self._waiting.append(Ended(tuple(sorted(left))))

    def close(self) -> None:
        """Let go of the host, at once, after a last `end`."""
        if self._run_dir is not None:
            self.end(patience=0)
        self._let_go_of_the_port()
        if self._watcher is not None:
            self._tell("bye")
            self._watcher.communicate()

    def _let_go_of_the_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _wait_for_strays(self, groups: list[int], patience: float) -> None:
        """Let processes that the instances have left behind end: some tidy up when they find that they are alone."""
        begun, told = time.monotonic(), False
        while time.monotonic() < begun + patience and (left := watcher.members(str(self._run_dir), groups)):
            if not told and time.monotonic() > begun + patience / 2:
                told = True
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)

    def _path(self, name: str, instance: int | str) -> Path:
        assert self._run_dir is not None
        return self._run_dir / f"{name}.{instance}"

    def _pid_of(self, instance: _Instance) -> int:
        """Return the process that steps, which may be a child of the one that was started."""
        reading = beacons.read(self._path("beacon", instance.number))
        return instance.process.pid if reading is None else reading.pid

    def _outputs(self, instance: _Instance, most: int = _AT_ONCE) -> list[Event]:
        events: list[Event] = []
        for pipe, stream in list(instance.pipes.items()):
            for _ in range(max(1, most // _AT_ONCE)):
                try:
                    data = os.read(pipe, _AT_ONCE)
                except BlockingIOError:
                    break
                if not data:
                    events.append(self._close(instance, pipe))
                    break
                events.append(Output(instance.number, stream, data))
        return events

    def _close(self, instance: _Instance, pipe: int) -> Event:
        stream = instance.pipes.pop(pipe)
        file = instance.process.stdout if stream == "stdout" else instance.process.stderr
        assert file is not None
        file.close()
        return Output(instance.number, stream, b"")

    def _exit(self, instance: _Instance) -> list[Event]:
        found = os.waitid(os.P_PID, instance.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return []
        instance.exited = True
        status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        error = None if status == 0 else self._error(instance)
        return [
            *self._beat(instance),
            *self._outputs(instance),
            Exited(instance.number, status, time.monotonic(), error),
        ]

    def _beat(self, instance: _Instance) -> list[Event]:
        reading = beacons.read(self._path("beacon", instance.number))
        pid = instance.process.pid if reading is None else reading.pid
        letter = letter_of(pid)
        if pid != instance.process.pid and letter_of(instance.process.pid) == "T":
            pid, letter = instance.process.pid, "T"
        error = self._error(instance) if reading is not None and reading.phase is Phase.FAILED else None
        return [Beat(instance.number, pid, letter, None if reading is None else progress_of(reading), error)]

    def _error(self, instance: _Instance) -> ErrorRecord | None:
        try:
            record = json.loads(self._path("error", f"{instance.number}.json").read_bytes())
            return ErrorRecord(
                at=record["monotonic_ns"] / 1e9,
                type=str(record["type"]),
                message=str(record["message"]),
                finished=int(record.get("finished") or 0),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _stacks(self, instance: _Instance) -> list[Event]:
        if not instance.stacks_until:
            return []
        with contextlib.suppress(OSError):
            text = self._path("stacks", instance.number).read_bytes()[instance.stacks_from :].decode(errors="replace")
            # a dump is written in pieces, and nothing says where it ends
            until = instance.stacks_until - (0.7 * STACKS_WITHIN if text else 0)
            if time.monotonic() < until:
                return []
            instance.stacks_until = 0.0
            return [Stacks(instance.number, text)]
        instance.stacks_until = 0.0
        return [Stacks(instance.number, "")]

    def _tell(self, *words: str | int) -> None:
        if self._watcher is None:
            command = [sys.executable, "-I", "-S", watcher.__file__]
            self._watcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # if we are an instance of another poprun, its end must not take the watcher before it has done its work
                env={name: value for name, value in os.environ.items() if name != watcher.VARIABLE},
                cwd="/",
                start_new_session=True,
            )
        assert self._watcher.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._watcher.stdin.write(f"{json.dumps(words)}\n".encode())
            self._watcher.stdin.flush()


def _started(command: Sequence[str], environment: dict[str, str], cores: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start an instance in a session of its own. It inherits the cores of this thread, which has its own back then."""
    before = os.sched_getaffinity(0) if cores else set[int]()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def letter_of(pid: int) -> str:
    """Return the letter of a process's state as Linux shows it, such as "T"; "?" if it cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "?"
    return stat.rpartition(b")")[2].split()[0].decode()


def reservation(port: int) -> socket.socket | None:
    """Return what keeps other popruns of this host from the same port until it is closed; None if one has it already.

    The port itself stays free for the instances: seconds pass until instance 0 listens on it, and another moment
    between its meeting and jax's service. It is a name of the kernel that goes with its process. Where the system has
    none of these, nothing is kept.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            name.bind(f"\0poprun {port}")
    except OSError:
        name.close()
        return None
    return name


def free_port(bind: str, port: int = 0) -> int:
    """Return a port that is free now at an address, or `port` if it is free.

    Raises:
        OSError: it is taken, or the address is none of this host.
    """
    wildcard = bind in ("", "*", "[::]", "::")
    family = socket.AF_INET6 if ":" in bind and not wildcard else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a run that has ended is free
        trial.bind(("" if wildcard else bind.strip("[]"), port))
        return trial.getsockname()[1]
