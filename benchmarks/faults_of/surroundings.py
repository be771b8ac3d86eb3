"""Break what a run depends on: its disk, its checkpoints, its port, and the command line of one of its instances."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from faults_of.cases import resumed, says
from faults_of.moments import moment_of
from faults_of.trial import FOUND, GONE, PROGRAM, Result, Trial
from faults_of.twin import SEAL, order_of

DISK_BYTES: Final = 8 << 20
"""The bytes of the small disk: three checkpoints of 1.6 MB, and a bit more."""
_MOST_LEFT: Final = 2 << 20


class NoMountError(RuntimeError):
    """Raised if this user is not allowed to mount a small disk."""


def disk_full(trial: Trial, phase: str) -> Result | None:
    """Fill a small disk at a random moment around a save, make room again, and resume by the same command."""
    twin = trial.twin
    with small_disk(trial.checkpoints):
        moment = moment_of(phase, twin, trial.dice)
        left = trial.dice.randrange(_MOST_LEFT)
        run = trial.start()
        result = Result(f"{moment}, {left:,} bytes left")
        result.bounds = {"found": twin.interval + FOUND, "gone": twin.interval + FOUND + GONE}
        if not moment.wait_in(run, 0):
            run.end()
            return None
        others = fill(trial.checkpoints, left)
        at = time.monotonic()
        gone_at = run.gone_at(0, 60)
        if run.end() == 0:
            return None  # everything had been written
        found = [seen for i in (0, 1) if (seen := run.seen(f"instance {i} exited with status 1")) is not None]
        result.found = min(found) - at if found else None
        result.gone = None if gone_at is None else gone_at - at
        if run.process.returncode != 1:
            result.problems.append(f"poprun ended with {run.process.returncode}, not 1")
        pattern = rf"instance \d \(.*failed with SaveError: saving {trial.checkpoints}/step-\d+ failed, \[Errno 28\]"
        if not any(says(line, pattern) for line in run.errors):
            result.problems.append("poprun's report does not say that the disk is full")
        trial.after(run, result)
        others.unlink()
        trial.again(result)
        resumed(trial, result, at, gone_at)
        trial.at_the_end(result)
        return result


def torn_checkpoint(trial: Trial, phase: str) -> Result | None:
    """Stop a run by SIGTERM, damage its last checkpoint; the same command names it and restores the one before."""
    moment = moment_of(phase, trial.twin, trial.dice)
    run = trial.start()
    if not moment.wait_in(run, 0):
        run.end()
        return None
    run.process.send_signal(signal.SIGTERM)
    gone_at = run.gone_at(None, 60)
    status = run.end()
    found = sorted(filter(order_of, trial.checkpoints.glob("step-*")), key=lambda path: order_of(path) or (0, 0))
    if not found:
        return None  # there was nothing to damage
    how = tear(found[-1], trial)
    result = Result(f"{moment}, {how}")
    # after the last save the program may have left its `StopRequest`, and SIGTERM then just ends it
    is_at_its_end = any(mark.name == "closing" for mark in run.marks)
    if status != 0 and not (status == 143 and is_at_its_end):
        result.problems.append(f"poprun ended with {status} after SIGTERM, not 0")
    if gone_at is None:
        result.problems.append("processes were left after SIGTERM")
    again = trial.again(result, torn=found[-1])
    named = [line for line in again.errors if f"{found[-1]} cannot be restored" in line and "is skipped" in line]
    if len(named) != 1:
        result.problems.append(f"{len(named)} lines name the torn checkpoint")
    resumed(trial, result, gone_at or run.ended, gone_at, torn=True)
    trial.at_the_end(result, found[-1])
    return result


def newer_checkpoints(trial: Trial, phase: str) -> Result | None:
    """Give the checkpoints the format of a newer version: the same command refuses them and leaves them unchanged."""
    moment = moment_of(phase, trial.twin, trial.dice)
    run = trial.start()
    if not moment.wait_in(run, 0):
        run.end()
        return None
    run.process.send_signal(signal.SIGTERM)
    gone_at = run.gone_at(None, 60)
    run.end()
    seals = {path: path.read_bytes() for path in trial.checkpoints.glob(f"step-*[0-9]/{SEAL}")}
    if not seals:
        return None
    for path, before in seals.items():
        text = json.dumps({**json.loads(before.partition(b"\n")[2]), "format": 1000}).encode()
        path.write_bytes(b"%d\n%s" % (zlib.crc32(text), text))
    refused = trial.start()
    result = Result(str(moment))
    status = refused.end()
    if status != 1 or not any(
        says(line, r"instance \d .*: .* may be the last checkpoint, ") for line in refused.errors
    ):
        result.problems.append(f"poprun ended with {status}, and does not say that it cannot read the checkpoints")
    if {path for path in trial.checkpoints.glob(f"step-*/{SEAL}")} != seals.keys():
        result.problems.append("a checkpoint that could not be read was removed")
    for path, before in seals.items():
        path.write_bytes(before)
    trial.again(result)
    resumed(trial, result, gone_at or run.ended, gone_at)
    trial.at_the_end(result)
    return result


def two_writers(trial: Trial, phase: str) -> Result | None:
    """Start the same command again while it runs: the second says that the folder is in use, and the first goes on."""
    moment = moment_of(phase, trial.twin, trial.dice)
    slow = [sys.executable, str(PROGRAM), "--pause", "0.5"]  # it goes on while the second starts
    run = trial.start(program=slow)
    if not moment.wait_in(run, 0):
        run.end()
        return None
    second = trial.start(program=slow)
    status = second.end()
    if status == 0 and run.end() == 0:
        return None  # the first was done before the second came to its first step
    result = Result(str(moment))
    if status != 1 or not any(says(line, r"instance \d .*CheckpointError: .* is in use: ") for line in second.errors):
        result.problems.append(f"the second poprun ended with {status}, and does not say that the folder is in use")
    if status := run.end():
        result.problems.append(f"the first poprun ended with {status}")
    trial.after(run, result)
    trial.at_the_end(result)
    return result


def port_taken(trial: Trial, phase: str) -> Result | None:
    """Take the coordinator's port: a given port before poprun starts, or poprun's choice before instance 0 takes it."""
    if phase == "given":
        with listening() as port:
            run = trial.start("--coordinator-port", str(port))
            status = run.end()
            result = Result("a given port", found=time.monotonic() - run.launched, bounds={"found": FOUND})
        result.gone = result.found
        if status != 2 or len(run.errors) != 1 or f"port {port} " not in run.errors[0]:
            result.problems.append(f"poprun ended with {status} and said {run.errors}")
        trial.after(run, result)
        trial.again(result, "--coordinator-port", str(port))
    else:
        run = trial.start()
        chosen = run.wait_for_error(r"attempt 0: .* coordinator 127\.0\.0\.1:(\d+)")
        if chosen is None:
            return None
        time.sleep(trial.dice.uniform(0, 0.3))
        try:
            with listening(int(chosen[1])):
                status = run.end()
        except OSError:
            run.end()
            return None  # instance 0 took the port first
        result = Result("a port that poprun chose")
        meeting = [mark.time for mark in run.marks if mark.name == "meeting" and mark.instance == 0]
        seen = run.seen("instance 0 exited with status 1")
        result.found, result.bounds = None if seen is None else seen - meeting[0], {"found": FOUND}
        if status or not any(says(line, "attempt 1: another port") for line in run.errors):
            result.problems.append(f"poprun ended with {status}, and took no other port")
        if not any(says(line, r"instance 0 .* PortTakenError: .*port \d+ ") for line in run.errors):
            result.problems.append("poprun's report does not name the port")
        trial.after(run, result)
    trial.at_the_end(result)
    return result


def other_flags(trial: Trial, phase: str) -> Result | None:
    """Give one instance another flag: an error names it before anything is trained; then start all with equal flags."""
    victim = trial.dice.randrange(2)
    flag = trial.dice.choice(("--seed 1", f"--updates {trial.twin.updates + 1}", "--pause 0.02", "--width 128"))
    script = f'exec {sys.executable} {PROGRAM} "$@" $(test $IPU_JAX_INSTANCE = {victim} && echo {flag})'
    run = trial.start(program=["sh", "-c", script, "sh"])
    gone_at = run.gone_at(0, 60) if run.wait_for_pid(0) else None
    status = run.end()
    result = Result(f"instance {victim} has {flag}", bounds={"found": FOUND, "gone": FOUND + GONE})
    at = max((mark.time for mark in run.marks if mark.name == "meeting"), default=run.launched)
    found = [seen for i in (0, 1) if (seen := run.seen(f"instance {i} exited with status 1")) is not None]
    result.found = min(found) - at if found else None
    result.gone = None if gone_at is None else gone_at - at
    if status != 1 or not any(
        says(line, r"instance \d .*InstancesDifferError: instance 1 has flags '.*', instance 0 has '")
        for line in run.errors
    ):
        result.problems.append(f"poprun ended with {status}, and does not name the flags")
    if list(trial.checkpoints.glob("*")):
        result.problems.append("it has saved something")
    trial.after(run, result)
    trial.again(result)
    trial.at_the_end(result)
    return result


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[None]:
    """Mount a small disk in memory for the duration of a `with` block.

    Raises:
        NoMountError: it is not allowed.
    """
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(at)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
        why = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        raise NoMountError(f"a small disk cannot be mounted here, so that none can be filled: {why}; run it as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fill a disk until `left` bytes are free; return the file that takes the room."""
    path = disk / "other data"
    with path.open("wb") as file:
        while (room := shutil.disk_usage(disk).free - left) > 0:
            try:
                os.posix_fallocate(file.fileno(), file.tell(), room)
                file.seek(0, os.SEEK_END)
            except OSError:
                continue  # the training has written in between
    return path


def tear(checkpoint: Path, trial: Trial) -> str:
    """Damage a checkpoint in a random way, and return how."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    file, how = trial.dice.choice(files), trial.dice.choice(("shortened", "one bit flipped", "half copied", "no seal"))
    content = file.read_bytes()
    at = trial.dice.randrange(len(content))
    if how == "shortened":
        file.write_bytes(content[:at])
    elif how == "one bit flipped":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << trial.dice.randrange(8)]) + content[at + 1 :])
    elif how == "half copied":
        for each in trial.dice.sample(files, (len(files) + 1) // 2):
            each.unlink()
    else:
        (checkpoint / SEAL).unlink()
    return f"{how}{f' in {file.relative_to(checkpoint)}' if how in ('shortened', 'one bit flipped') else ''}"


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Listen on a loopback port, as another program would."""
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", port))
        taker.listen()
        yield taker.getsockname()[1]


CASES: Final[dict[str, tuple[Callable[[Trial, str], Result | None], tuple[str, ...]]]] = {
    "disk full": (disk_full, ("step", "save")),
    "torn checkpoint": (torn_checkpoint, ("step", "save", "end")),
    "checkpoints of a newer version": (newer_checkpoints, ("step", "save", "end")),
    "two trainings in one folder": (
        two_writers,
        ("compile",),
    ),  # so that the first still runs when the second has started
    "port taken": (port_taken, ("given", "chosen")),
    "one instance with other flags": (other_flags, ("start",)),
}
