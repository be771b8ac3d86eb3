"""Run poprun as a user does, and processes that ipu-monitor sees, with small programs that do not need jax."""

import contextlib
import dataclasses
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAIN_POPRUN = [sys.executable, "-W", "error", "-m", "ipu_jax.distributed.poprun"]
# Handle signals that the tests' own process may ignore, because it was started by nohup or in the background.
# `preexec_fn` is not used: it would fork this process, in which jax may run.
HEED_SIGNALS = "import os, signal, sys; [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)]; "
HEEDING = [sys.executable, "-S", "-c", f"{HEED_SIGNALS}os.execv(sys.argv[1], sys.argv[1:])"]
POPRUN = [*HEEDING, *PLAIN_POPRUN]
# The beginning of the tests' programs. `meet(n)` waits until all instances have called it; `step(n)` meets, too.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ipu_jax.distributed.processes import beacons, record
me, run_dir = int(os.environ["IPU_JAX_INSTANCE"]), Path(os.environ["IPU_JAX_RUN_DIR"])
instances, attempt = int(os.environ["IPU_JAX_INSTANCES"]), int(os.environ["IPU_JAX_ATTEMPT"])
beacon = record.current()
def meet(n):
    (run_dir / f"met.{n}.{me}").touch()
    while not all((run_dir / f"met.{n}.{i}").exists() for i in range(instances)):
        time.sleep(0.005)
def step(n, seconds=0.05):
    beacon.begun(); meet(n); time.sleep(seconds); beacon.finished()
def write_error(error, **values):
    found = {"monotonic_ns": time.monotonic_ns(), "pid": os.getpid(), "type": type(error).__name__,
              "message": str(error), "traceback": "", "begun": 0, "finished": 0, **values}
    (run_dir / str(me) / "error.json").write_text(json.dumps(found))
"""

# After `ago(seconds)`, records are written as if that many seconds ago.
RECORD = """
import os, sys, time
from ipu_jax.distributed.processes import beacons, record
from ipu_jax.distributed.processes.beacons import Phase
beacon = record.begin()
now = time.monotonic_ns
def ago(seconds):
    beacons.time.monotonic_ns = lambda: now() - int(seconds * 1e9)
def ready():
    print("ready", flush=True)
    time.sleep(60)
"""


@dataclasses.dataclass
class Ran:
    """How poprun ended, its output, how long it took, and when it ended, on the monotonic clock."""

    status: int
    out: str
    err: str
    seconds: float
    ended: float

    def seen(self, what: str) -> float:
        """Return when poprun saw something, on the monotonic clock, as printed by -v."""
        found = re.search(rf"{what}, (?:seen )?at ([\d.]+) s of the monotonic clock", self.err)
        assert found, self.err
        return float(found[1])

    def stamp(self, name: str) -> float:
        """Return a time that a program printed as `name=...`."""
        found = re.search(rf"{name}=([\d.]+)", self.out)
        assert found, self.out
        return float(found[1])


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "COLUMNS")}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def program(folder: Path, body: str) -> list[str]:
    """Return the command of a program that an instance runs."""
    path = folder / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return [sys.executable, str(path)]


def poprun(*words: str, timeout: float = 120, cwd: Path | None = None, **variables: str) -> Ran:
    """Run poprun to its end."""
    before = time.monotonic()
    done = subprocess.run(
        [*POPRUN, *words],
        env=environment(**variables),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout,
        cwd=cwd,
    )
    now = time.monotonic()
    return Ran(done.returncode, done.stdout, done.stderr, now - before, now)


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start poprun."""
    return subprocess.Popen(
        [*POPRUN, *words],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_a_terminal(
    *words: str,
    interrupted_after: bytes = b"nothing of that kind",
    look: Callable[[bytes], object] = bytes,
    **variables: str,
) -> tuple[int, str]:
    """Run poprun on a terminal of its own, press Ctrl-C after a text, and return its status and what was shown.

    Whenever more is shown, `look` gets all of it.
    """
    controller, terminal = pty.openpty()
    own = f"{HEED_SIGNALS}import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{own}os.execv(sys.argv[1], sys.argv[1:])", *PLAIN_POPRUN, *words],
        env=environment(TERM="xterm", **variables),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown, is_interrupted = b"", False
    with contextlib.suppress(OSError):  # the terminal has no process left
        while data := os.read(controller, 4096):
            shown += data
            look(shown)
            if interrupted_after in shown and not is_interrupted:
                is_interrupted = os.write(controller, b"\x03") == 1
    os.close(controller)
    return process.wait(timeout=60), shown.decode().replace("\r\n", "\n")


def marked(mark: str) -> set[int]:
    """Return the living processes whose environment has POPRUN_TEST=mark, except poprun's own processes."""
    wanted, found = f"POPRUN_TEST={mark}".encode(), set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().split(b"\0")
            letter = (path / "stat").read_bytes().rpartition(b")")[2].split()[0]
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if (
            wanted in words
            and letter != b"Z"
            and b"ipu_jax.distributed" not in command
            and b"launcher/watcher" not in command
        ):
            found.add(int(path.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)


def gone_within(mark: str, seconds: float = 60) -> None:
    """Wait until no process with a mark is left."""
    wait_for(lambda: not marked(mark), seconds)


@contextlib.contextmanager
def recorded(folder: Path, body: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that begins a record and then runs `body`; yield the process when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD + textwrap.dedent(body) + "\nready()", "some", "words"],
        env=environment(IPU_JAX_MONITOR=str(folder), **variables),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
