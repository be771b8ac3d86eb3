"""Test that whatever an instance writes into its run folder spoils only the report about itself."""

import contextlib
import json
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ipu_jax.distributed.environment import InstancePlace
from ipu_jax.distributed.launcher.hosts import Beat, ErrorRecord, LocalHost, Stacks
from ipu_jax.distributed.launcher.topology import Launch
from ipu_jax.distributed.processes.beacons import Phase
from support.launched import poprun, program, wait_for

# by hand, after the layout of version 3
NUMBERS = """pid beat begun finished first last aside updates samples mark_ns mark_updates mark_samples joint_begun
joint_made held phase phase_ns"""
DEEP = "[" * 200_000
GOOD = {"monotonic_ns": 7_000_000_000, "type": "E", "message": "no"}
PATIENT = "trap '' USR1; echo; exec sleep 600"


def beacon(pid: int, limit: float = float("inf"), **values: int) -> bytes:
    """Return the bytes of a beacon in the phase FAILED, in which the record of an error is looked for."""
    given = {"pid": pid, "phase": int(Phase.FAILED), "phase_ns": 1, **values}
    numbers = [given.get(name, 0) for name in NUMBERS.split()]
    return struct.pack("<4sI17qd128s", b"IPUB", 3, *numbers, limit, b"") + bytes(4096)


class Instance:
    """An instance that sleeps, and what poprun sees of it."""

    def __init__(self, host: LocalHost, folder: Path):
        self.host, self.folder = host, folder
        (started,) = host._instances.values()
        self.pid = started.process.pid

    def plant(self, name: str, content: str | bytes | Callable[[Path], object]) -> None:
        path = self.folder / "0" / name
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def seen(self) -> Beat:
        self.host._next_beat = 0.0
        (beat,) = [event for event in self.host.events() if isinstance(event, Beat)]
        return beat

    def stacks(self) -> Stacks:
        self.host.ask_stacks(0)
        return self.answer()

    def answer(self) -> Stacks:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for event in self.host.events():
                if isinstance(event, Stacks):
                    return event
            time.sleep(0.01)
        raise AssertionError("no stacks came")


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = InstancePlace(0, 1, 0, 1, 1, coordinator="127.0.0.1:1", bind="127.0.0.1:1")
    with contextlib.closing(LocalHost("localhost")) as host:
        host.begin(Launch(("bash", "-c", PATIENT), (place,), {}))
        (folder,) = tmp_path.glob("poprun-*")
        while not host._instances[0].process.stdout.read(1):  # pyright: ignore[reportOptionalMemberAccess]
            time.sleep(0.01)  # until it ignores the signal
        (folder / "0").mkdir(0o700)
        yield Instance(host, folder)
    assert not folder.exists()


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_a_good_record_is_read(instance: Instance):
    instance.plant("beacon", beacon(instance.pid, begun=2, finished=1))
    instance.plant("error.json", json.dumps(GOOD))
    seen = instance.seen()
    assert seen.progress is not None
    assert (seen.pid, seen.progress.begun) == (instance.pid, 2)
    assert seen.letter in "RS"
    assert seen.error == ErrorRecord(7.0, "E", "no")


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        json.dumps(GOOD | {"monotonic_ns": 10**400}),
        '{"monotonic_ns": NaN, "type": "E", "message": "no"}',
        json.dumps(GOOD | {"monotonic_ns": {}}),
        "[]",
        b"\xff",
        json.dumps(GOOD).ljust(1 << 21),
        os.mkfifo,
        os.mkdir,
        zeros,
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value[:30]),
)
def test_a_bad_record_of_an_error_is_none(instance: Instance, content: Any):
    instance.plant("beacon", beacon(instance.pid))
    instance.plant("error.json", content)
    assert instance.seen().error is None


@pytest.mark.parametrize(
    "content",
    [
        os.mkfifo,
        os.mkdir,
        zeros,
        b"IPUB",
        beacon(1, limit=float("nan")),
        beacon(1, begun=-5),
        beacon(1, last=2**63 - 1),  # in the future
        beacon(1, phase_ns=-(2**63)),
        beacon(1, phase=99),
    ],
)
def test_a_bad_beacon_is_none(instance: Instance, content: Any):
    instance.plant("beacon", content)
    seen = instance.seen()
    assert (seen.progress, seen.pid) == (None, instance.pid)
    assert seen.letter in "RS"
    assert instance.stacks() == Stacks(0, "", ())


@pytest.mark.parametrize("whose", ["a stranger", "our group", "everybody", "too large", "another instance"])
def test_a_beacon_cannot_name_a_process_that_its_instance_has_not_started(instance: Instance, whose: str):
    # the end of this process is seen as the end of the test: a signal to group 0 would reach it
    usual = {"IPU_JAX_RUN_DIR": str(instance.folder), "IPU_JAX_INSTANCE": "1"} if whose == "another instance" else {}
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **usual}) as victim:
        try:
            named = {"our group": 0, "everybody": -1, "too large": 2**40}.get(whose, victim.pid)
            instance.plant("beacon", beacon(named))
            instance.plant("stacks", "")
            assert instance.seen().pid == instance.pid
            assert instance.stacks().text == ""
            assert victim.poll() is None
        finally:
            victim.kill()


def test_a_child_of_the_instance_in_another_group_is_named(instance: Instance):
    mine = {"IPU_JAX_RUN_DIR": str(instance.folder), "IPU_JAX_INSTANCE": "0"}
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, **mine}, start_new_session=True)
    instance.plant("beacon", beacon(child.pid))
    wait_for(lambda: instance.seen().pid == child.pid)  # its environment appears a moment after its start
    instance.plant("stacks", "")
    instance.host.ask_stacks(0)
    assert child.wait(60) == -10  # SIGUSR1 has reached it


@pytest.mark.parametrize("content", [os.mkfifo, zeros])
def test_stacks_in_no_regular_file_are_none(instance: Instance, content: Any):
    instance.plant("beacon", beacon(instance.pid))
    instance.plant("stacks", content)
    assert instance.stacks() == Stacks(0, "", ())


def test_endless_stacks_are_cut(instance: Instance):
    instance.plant("beacon", beacon(instance.pid))
    instance.plant("stacks", "old")
    instance.host.ask_stacks(0)
    instance.plant("stacks", "old" + "x\n" * (1 << 21))
    found = instance.answer()
    assert found.text[:4] == "x\nx\n"
    assert len(found.text) == 1 << 20


SLOTS = struct.pack("<IIIiQ", 1, 0, 0, 3, 5) * 100


@pytest.mark.parametrize(
    ("slots", "tasks"),
    [
        (os.mkfifo, "{}"),
        (zeros, "{}"),
        (SLOTS, DEEP),
        (SLOTS, os.mkfifo),
        (SLOTS, "[]"),
        (SLOTS, '{"role": 1, "tasks": 7}'),
        (SLOTS, '{"role": 1, "tasks": [7]}'),
        (SLOTS, '{"role": 1, "tasks": {}}'),
        (SLOTS, '{"role": 1}'),
    ],
)
def test_a_bad_flight_record_has_no_lines(instance: Instance, slots: Any, tasks: Any):
    instance.plant("ticks", slots)
    instance.plant("tasks.1.json", tasks)
    assert instance.stacks() == Stacks(0, "", ())


@pytest.mark.fast("no beacon")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (f"(run_dir / '0' / 'error.json').write_text({DEEP[:3]!r} * 100_000); sys.exit(3)", "exited with status 3"),
        ("write_error(ValueError('\\x1b[2J\\ud800')); sys.exit(3)", "failed with ValueError: ? (exit status 3)"),
        (
            "os.remove(run_dir / '0' / 'beacon'); os.mkfifo(run_dir / '0' / 'beacon'); os.kill(os.getpid(), 9)",
            "by SIGKILL",
        ),
    ],
    ids=["deep JSON", "commands", "no beacon"],
)
def test_a_run_ends_as_usual(tmp_path: Path, spoil: str, said: str):
    body = f"""
    if me == 0:
        {spoil}
    time.sleep(600)
    """
    ran = poprun("--num-instances", "2", "--num-replicas", "2", *program(tmp_path, body))
    assert ran.status == (3 if "3" in said else 137)
    (line,) = ran.err.splitlines()
    assert "poprun: instance 0 (host localhost" in line
    assert said in line
