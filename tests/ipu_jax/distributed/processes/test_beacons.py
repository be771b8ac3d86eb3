"""Test the beacon that an instance's steps write and its launcher reads."""

import os
import struct
import time

import jax
import jax.numpy as jnp
import pytest

from ipu_jax.base import facts
from ipu_jax.core.mesh import in_flight
from ipu_jax.distributed.processes import listener, record
from ipu_jax.distributed.processes.beacons import Beacon, Phase, read
from ipu_jax.distributed.processes.listener import OWN
from ipu_jax.steps import InFlight


def seen(path):
    found = read(path)
    assert found is not None
    return found


def test_a_beacon_says_what_was_written(tmp_path):
    before = time.monotonic()
    beacon = Beacon(tmp_path / "one")
    assert beacon.phase is Phase.SILENT
    beacon.begun(3)
    assert beacon.phase is Phase.STARTING
    beacon.finished(2)
    found = seen(tmp_path / "one")
    assert (found.pid, found.begun, found.finished, found.phase) == (os.getpid(), 3, 2, Phase.STEPPING)
    assert before <= found.phase_at <= found.beat_at <= time.monotonic()
    assert found.finished_at >= before
    assert found.limit == float("inf")
    with pytest.raises(FileExistsError):  # a second process gets no beacon
        Beacon(tmp_path / "one")


def test_a_phase_has_a_label_and_a_limit_and_ends_unless_it_has_failed(tmp_path):
    beacon = Beacon(tmp_path / "one")
    beacon.finished()
    with beacon.during(Phase.BUSY, "saving é" + 200 * "x", 30):
        found = seen(tmp_path / "one")
        assert (found.phase, found.limit) == (Phase.BUSY, 30)
        assert found.label.startswith("saving é")
        beacon.finished()  # of a step that was still in flight
        assert beacon.phase is Phase.BUSY
    assert beacon.phase is Phase.STEPPING
    with beacon.during(Phase.BUSY):
        beacon.enter(Phase.FAILED, "ValueError")
    assert beacon.phase is Phase.FAILED


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<4sI", b"XXXX", 1) + bytes(4000)])
def test_what_is_no_beacon_is_not_read(tmp_path, content):
    (tmp_path / "one").write_bytes(content)
    assert read(tmp_path / "one") is None
    assert read(tmp_path / "none") is None


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.setenv(record.RUN_DIR, str(tmp_path))
    monkeypatch.setenv(record.INSTANCE, "3")
    monkeypatch.setattr(record, "_looked", False)
    monkeypatch.setattr(record, "_record", None)
    OWN.forget()
    in_flight._outstanding.clear()
    return tmp_path / "3" / "beacon"


def test_the_first_process_of_an_instance_that_asks_writes_its_beacon(launched):
    beacon = record.current()
    assert beacon is not None
    assert record.current() is beacon
    assert read(launched) is not None


def test_another_process_of_the_instance_writes_none(launched):
    launched.parent.mkdir()
    assert record.current() is None


def test_only_the_outermost_piece_of_work_counts(launched):
    record.current()
    with record.during(Phase.BUSY, "saving", 60):
        with record.during(Phase.WAITING, "in a barrier", 5):
            assert seen(launched).phase is Phase.BUSY
        assert seen(launched).phase is Phase.BUSY
    assert seen(launched).phase is Phase.SILENT


@pytest.mark.parametrize("waiting", [False, True])
def test_work_that_is_said_is_a_phase_until_it_ends(launched, waiting):
    with facts.during("placing weights", 7.5, waiting=waiting):
        found = seen(launched)
        assert (found.phase, found.label) == (Phase.WAITING if waiting else Phase.BUSY, "placing weights")
        assert found.limit == 7.5
    assert seen(launched).phase is Phase.SILENT


def test_a_step_of_all_instances_is_made_once_it_is_dispatched(launched, monkeypatch):
    """Arrays of one process are never on all instances, so the question is answered here."""
    monkeypatch.setattr(listener, "_is_on_all_instances", lambda leaf: leaf.size == 3)
    counts = lambda: (seen(launched).begun, seen(launched).joint_begun, seen(launched).joint_made)
    window, alone = InFlight(), InFlight()
    window.begin(jnp.ones(3))
    assert counts() == (1, 1, 0)  # a dispatch that waits for others is seen
    window.admit(jnp.ones(1))
    assert counts() == (1, 1, 1)
    alone.begin(jnp.ones(2))
    alone.admit(jnp.ones(1))
    window.begin(jnp.ones(2))  # a window that was joint once stays so
    assert counts() == (3, 2, 1)


def test_a_step_inside_jit_is_not_dispatched(launched):
    window = InFlight()

    def own_loop(x):
        window.begin(x)
        y = x + 1
        window.admit(y)
        return y

    jax.jit(own_loop)(jnp.float32(1))
    assert record.current() is not None
    # a loop of the user's own, which may tell nothing
    assert (seen(launched).phase, seen(launched).begun) == (Phase.SILENT, 0)


def test_steps_are_counted_when_they_begin_and_when_they_have_finished(launched, monkeypatch):
    ready: set[int] = set()
    steps = [jnp.float32(number) for number in range(5)]
    kind = type(steps[0])
    monkeypatch.setattr(kind, "is_ready", lambda self: int(self) in ready)
    monkeypatch.setattr(kind, "block_until_ready", lambda self: ready.add(int(self)))
    window = InFlight(limit=2)

    def counts_after(number: int) -> tuple[int, int]:
        window.admit(steps[number])
        return seen(launched).begun, seen(launched).finished

    assert [counts_after(0), counts_after(1)] == [(1, 0), (2, 0)]
    assert counts_after(2) == (3, 1)  # the window waited for step 0
    ready.add(1)
    assert counts_after(3) == (4, 2)
    ready |= {2, 3}
    assert counts_after(4) == (5, 4)
    assert window.outstanding == 2


def test_a_beacon_says_how_long_it_has_done_something_else_until_its_last_step(tmp_path):
    beacon = Beacon(tmp_path / "one")
    beacon.begun()
    beacon.finished()
    first = seen(tmp_path / "one")
    with beacon.during(Phase.BUSY, "reading a batch"):
        time.sleep(0.05)
    between = seen(tmp_path / "one")
    time.sleep(0.05)
    beacon.finished()
    with beacon.during(Phase.BUSY, "saving"):
        last = seen(tmp_path / "one")
    assert between.aside == first.aside  # no step has finished since
    assert 0.05 <= last.aside - first.aside < last.finished_at - first.finished_at - 0.04
