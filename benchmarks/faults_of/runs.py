"""Start poprun, follow its output while it runs, and find the processes of a run that are left.

run = Started(command, folder)
saving = run.wait_for(lambda mark: mark.name == "saving")     from the program's printed marks
...                                                           something is broken here
run.end(); run.status, run.marks, run.errors
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

ROOT: Final = Path(__file__).parents[2]
POPRUN: Final = [sys.executable, "-m", "ipu_jax.distributed.poprun"]
_MARK: Final = re.compile(r"mark=(\w+) instance=(\d+) attempt=(\d+) t=([\d.]+) value=(.*)")
_VARIABLE: Final = "FAULTS_RUN"
_LONGEST: Final = 180.0

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place that an instance of the program has reached, with the time on the monotonic clock and a value."""

    name: str
    instance: int
    attempt: int
    time: float
    value: str

    @property
    def step(self) -> int:
        """Return the number of the mark's step."""
        return int(self.value.partition(":")[0])


class Started:
    """A poprun process that runs, or has run.

    Args:
        command: poprun's words, with the program.
        folder: for poprun's files; its output is kept there, too, as `NAME.stdout` and `NAME.stderr`.
        name: the name of this run in that folder.
        variables: environment variables.

    Attributes:
        launched: when poprun was started, on the monotonic clock.
        marks: the marks that the program has printed so far.
        errors: the lines of poprun's stderr so far.
        instances_started: when the instances of the first attempt were started; infinity before that.
        ended: when `end` noticed that poprun had ended.
    """

    def __init__(self, command: Sequence[str], folder: Path, name: str, variables: Mapping[str, str] | None = None):
        self.folder, self.marks, self.errors, self.lines = folder, list[Mark](), list[str](), list[str]()
        self.id, self._news = uuid.uuid4().hex, threading.Condition()
        self._temporary = folder / f"{name}.tmp"
        self._temporary.mkdir()
        inherited = {key: value for key, value in os.environ.items() if key not in ("PJRT_NPROC", "COLUMNS", "FAULT")}
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self._temporary), "JAX_PLATFORMS": "cpu", _VARIABLE: self.id}
        self.launched = time.monotonic()
        self.process = subprocess.Popen(
            [*POPRUN, *command],
            env={**inherited, **own, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.instances_started = self.ended = float("inf")
        self._readers = [
            threading.Thread(target=self._read, args=(stream, folder / f"{name}.{kind}", take), daemon=True)
            for kind, stream, take in (
                ("stdout", self.process.stdout, self._take_output),
                ("stderr", self.process.stderr, self._take_error),
            )
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, wanted: Callable[[Mark], bool], seconds: float = _LONGEST) -> Mark | None:
        """Return the first wanted mark; None if the run ends without one."""
        return self._first(lambda: next((mark for mark in list(self.marks) if wanted(mark)), None), seconds)

    def wait_for_error(self, pattern: str, seconds: float = _LONGEST) -> re.Match[str] | None:
        """Return the first match of a pattern in a line of stderr; None if the run ends without one."""
        return self._first(
            lambda: next((found for line in list(self.errors) if (found := re.search(pattern, line))), None), seconds
        )

    def wait_for_pid(self, instance: int) -> int | None:
        """Return the process number of an instance of the first attempt."""
        found = self.wait_for_error(rf"attempt 0: instance {instance} pid (\d+) ")
        return None if found is None else int(found[1])

    def end(self, seconds: float = _LONGEST) -> int:
        """Wait for poprun's end, and return its exit status; kill it if it takes too long."""
        try:
            self.process.wait(seconds)
            self.ended = min(self.ended, time.monotonic())
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.errors.append(f"faults: poprun had not ended after {seconds:g} s, and was killed")
        for reader in self._readers:
            reader.join(10)
        return self.process.wait()

    def seen(self, what: str) -> float | None:
        """Return when poprun saw something, such as "instance 1 is stuck", on the monotonic clock."""
        times = [re.search(rf"{what}.*, (?:seen )?at ([\d.]+) s of the monotonic clock", line) for line in self.errors]
        return next((float(found[1]) for found in times if found), None)

    def processes(self, attempt: int | None = None) -> set[int]:
        """Return the living processes of this run, or of the instances of one of its attempts."""
        wanted, found = {f"{_VARIABLE}={self.id}".encode()}, set[int]()
        if attempt is not None:
            wanted.add(f"IPU_JAX_ATTEMPT={attempt}".encode())
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    letter = (path / "stat").read_bytes().rpartition(b")")[2].split()[0]
                    if letter not in (b"Z", b"X"):
                        found.add(int(path.name))
            except OSError:
                continue
        return found

    def gone_at(self, attempt: int | None, seconds: float) -> float | None:
        """Return when no process was left, on the monotonic clock; None if some are left after `seconds`."""
        until = time.monotonic() + seconds
        while self.processes(attempt):
            if time.monotonic() > until:
                return None
            time.sleep(0.05)
        return time.monotonic()

    def left_over(self) -> list[str]:
        """Return the run folders that poprun has left behind. Beacons, its only shared memory, are files in them."""
        until = time.monotonic() + 3
        while (found := sorted(path.name for path in self._temporary.glob("poprun-*"))) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def kill_all(self) -> None:
        """Kill the processes that are left of the run."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def _first(self, look: Callable[[], Found | None], seconds: float) -> Found | None:
        until = time.monotonic() + seconds
        with self._news:
            while True:
                ended = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
                found = look()
                if found is not None or ended or time.monotonic() > until:
                    return found
                self._news.wait(0.05)

    def _read(self, stream: IO[str], path: Path, take: Callable[[str], object]) -> None:
        with stream, path.open("w") as copy:
            for line in stream:
                copy.write(line)
                copy.flush()
                take(line.rstrip("\n"))
                with self._news:
                    self._news.notify_all()

    def _take_error(self, line: str) -> None:
        self.errors.append(line)
        if " instance 0 pid " in line:
            self.instances_started = min(self.instances_started, time.monotonic())

    def _take_output(self, line: str) -> None:
        self.lines.append(line)
        if found := _MARK.search(line):
            self.marks.append(Mark(found[1], int(found[2]), int(found[3]), float(found[4]), found[5]))
