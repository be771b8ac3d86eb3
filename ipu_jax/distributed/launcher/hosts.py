"""Run the instances of this host: start them, read their output, check their state, and leave none behind.

    host.begin(launch)     run folder, watcher, one process group per instance
    host.events()          what has happened since the last call; never waits
    host.send(SIGTERM)     to the process groups
    host.end(0.5)          nothing is left: no process, no folder

Nothing here makes decisions. A host does what the supervisor asks for, and reports what happens (`events`). An agent
does the same for a supervisor on another host (`ssh`), so there is only one way to supervise.

Each instance has its own session and process group. After its exit it stays a zombie until the end of the attempt, so
that its number is not reused: signals to that number reach what is left of its group. (macOS before Python 3.13 cannot
see an exit without collecting the process.)

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from ipu_jax.base import opening
from ipu_jax.distributed.environment import THREADS
from ipu_jax.distributed.launcher import watcher
from ipu_jax.distributed.launcher.topology import Launch
from ipu_jax.distributed.processes import beacons, flight, record
from ipu_jax.distributed.processes.beacons import Phase, Reading

Stream = Literal["stdout", "stderr"]

FULL: Final = 1 << 15
"""Bytes of an `Output` at which its pipe may have been full: pipes hold 65,536, or half of that if writes are small."""


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """The exception that ended an instance's program, as the instance recorded it."""

    at: float
    type: str
    message: str


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
    """Describe what an instance was doing, as requested: its Python stacks, and its flight recorder's lines.

    Both are empty if it could not give them. `ticks` are as in `flight.Seen`.
    """

    instance: int
    text: str
    flight: tuple[str, ...]
    ticks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A host can start instances, and jax's coordinator can use this port there; not if there is a reason."""

    port: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """No process of the attempt is left on a host, except `left`, which cannot be killed. Its run folder is gone."""

    left: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lost:
    """The connection to a host is gone, and with it whatever ran there."""

    reason: str


Event = Started | NotStarted | Output | Beat | Exited | Stacks | Prepared | Ended | Lost

STACKS_WITHIN: Final = 1.0
"""Seconds that an instance has to write its stacks."""
BEAT_EVERY: Final = 0.2
"""Seconds between two reads of a beacon."""
_AT_ONCE: Final = 1 << 16
_MOST_BYTES: Final = 1 << 20  # of a file that an instance writes
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

    lost = False  # it is always there

    def __init__(self, name: str):
        self.name = name
        self._instances: dict[int, _Instance] = {}
        self._run_dir: Path | None = None
        self._waiting: list[Event] = []
        self._held = False
        self._next_beat = 0.0
        self._watcher: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None
        self._found: set[int] = set()

    def files(self) -> list[int]:
        """Return the file descriptors to wait on for events."""
        return [] if self._held else [pipe for instance in self._instances.values() for pipe in instance.pipes]

    def events(self) -> list[Event]:
        """Return what has happened since the last call, without waiting."""
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

    def prepare(self, bind: str, port: int, patience: float) -> Prepared:
        """Find a free port at an address, or wait for at most `patience` seconds until the given one is free.

        A port is found only once: what an instance of an earlier attempt still sends must not reach a later one.
        """
        until = time.monotonic() + patience
        while (found := self._prepared(bind, port)).reason and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _prepared(self, bind: str, port: int) -> Prepared:
        self._let_go_of_the_port()
        try:
            for _ in range(1 if port else _TRIES):
                found = port or free_port(bind)
                if not port and found in self._found:
                    continue
                self._found.add(found)
                self._reserved = reservation(found) if bind else None
                if not bind or self._reserved is not None:
                    return Prepared(free_port(bind, found))
            return Prepared(0, f"port {port or 0} on {self.name} belongs to another run of poprun")
        except OSError as error:
            self._let_go_of_the_port()
            what = f"port {port}" if port else "a port"
            return Prepared(0, f"{what} of {bind} on {self.name} cannot be used: {error.strerror}")

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

    def send(self, number: int) -> None:
        """Send a signal to the process groups of all instances."""
        for instance in self._instances.values():
            with contextlib.suppress(OSError):
                os.killpg(instance.process.pid, number)

    def ask_stacks(self, instance: int) -> None:
        """Ask an instance for its Python stacks: `Stacks` follows."""
        found = self._instances[instance]
        reading, pid = self._look(found)
        try:
            # the signal would end a process that does not write its stacks
            if found.exited or reading is None or reading.pid != pid or letter_of(pid) in "TtZ":
                raise OSError("it cannot write them")
            with opening.reading(self._record(instance) / "stacks") as file:
                found.stacks_from = file.seek(0, os.SEEK_END)
            os.kill(pid, signal.SIGUSR1)
            found.stacks_until = time.monotonic() + STACKS_WITHIN
        except OSError:
            self._waiting.append(self._described(instance, ""))

    def hold(self, on: bool) -> None:
        """Stop reading what the instances write to their pipes, or resume."""
        self._held = on

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt, after `patience` seconds to end on its own: `Ended` follows."""
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
        """Release the host at once, after a last `end`."""
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
        """Let processes that the instances have left behind end: some clean up when they find themselves alone."""
        begun, told = time.monotonic(), False
        while time.monotonic() < begun + patience and (left := watcher.members(str(self._run_dir), groups)):
            if not told and time.monotonic() > begun + patience / 2:
                told = True
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)

    def _record(self, instance: int) -> Path:
        assert self._run_dir is not None
        return self._run_dir / str(instance)

    def _look(self, instance: _Instance) -> tuple[Reading | None, int]:
        """Return the beacon, and the process that runs steps, which may be a child of the started process.

        The program may have written any number into its beacon: other processes do not count.
        """
        reading, pid = beacons.read(self._record(instance.number) / "beacon"), instance.process.pid
        its = (f"{record.RUN_DIR}={self._run_dir}", f"{record.INSTANCE}={instance.number}")
        return reading, reading.pid if reading is not None and watcher.belongs(reading.pid, {pid}, *its) else pid

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
        status = _status(instance.process)
        if status is None:
            return []
        instance.exited = True
        error = None if status == 0 else self._error(instance)
        return [
            *self._beat(instance),
            *self._outputs(instance),
            Exited(instance.number, status, time.monotonic(), error),
        ]

    def _beat(self, instance: _Instance) -> list[Event]:
        reading, pid = self._look(instance)
        letter = letter_of(pid)
        if pid != instance.process.pid and letter_of(instance.process.pid) == "T":
            pid, letter = instance.process.pid, "T"
        error = self._error(instance) if reading is not None and reading.phase is Phase.FAILED else None
        return [Beat(instance.number, pid, letter, reading, error)]

    def _error(self, instance: _Instance) -> ErrorRecord | None:
        try:
            found = json.loads(opening.content(self._record(instance.number) / "error.json", _MOST_BYTES))
            return ErrorRecord(int(found["monotonic_ns"]) / 1e9, str(found["type"]), str(found["message"]))
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return None  # there is none, or the program has written it

    def _stacks(self, instance: _Instance) -> list[Event]:
        if not instance.stacks_until:
            return []
        text = ""
        with contextlib.suppress(OSError), opening.reading(self._record(instance.number) / "stacks") as file:
            file.seek(instance.stacks_from)
            text = file.read(_MOST_BYTES).decode(errors="replace")
            # a dump is written in pieces, and nothing marks its end
            if time.monotonic() < instance.stacks_until - (0.7 * STACKS_WITHIN if text else 0):
                return []
        instance.stacks_until = 0.0
        return [self._described(instance.number, text)]

    def _described(self, instance: int, stacks: str) -> Stacks:
        seen = flight.read(self._record(instance))
        return Stacks(instance, stacks, seen.lines, seen.ticks)

    def _tell(self, *words: str | int) -> None:
        if self._watcher is None:
            command = [sys.executable, "-I", "-S", watcher.__file__]
            self._watcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # if we are an instance of another poprun, its end must not kill the watcher before its work is done
                env={name: value for name, value in os.environ.items() if name != watcher.VARIABLE},
                cwd="/",
                start_new_session=True,
            )
        assert self._watcher.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._watcher.stdin.write(f"{json.dumps(words)}\n".encode())
            self._watcher.stdin.flush()


def _started(command: Sequence[str], environment: dict[str, str], cores: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start an instance in its own session. It inherits this thread's cores, which are then set back."""
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


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return how an instance has exited, without collecting it where the system can; None if it has not exited."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found and (found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def letter_of(pid: int) -> str:
    """Return the letter of a process's state as Linux shows it, such as "T"; "?" if it is unknown, as on macOS."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "?"
    return stat.rpartition(b")")[2].split()[0].decode()


def reservation(port: int) -> socket.socket | None:
    """Return a reservation that keeps other popruns on this host off a port until it is closed; None if one has it.

    The port itself stays free for the instances: seconds pass until instance 0 listens on it, and another moment
    between its meeting and jax's service. The reservation is a name in the kernel that goes away with its process.
    Where the system has no such names, nothing is reserved.
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
        OSError: the port is taken, or the address does not belong to this host.
    """
    wildcard = bind in ("", "*", "[::]", "::")
    family = socket.AF_INET6 if ":" in bind and not wildcard else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of an ended run is free
        trial.bind(("" if wildcard else bind.strip("[]"), port))
        return trial.getsockname()[1]
