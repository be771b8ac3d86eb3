"""Test what ipu-monitor says of processes: the states by poprun's rule, the speeds, the share of CPU time."""

import os
import re
import signal

import psutil
import pytest

from ipu_jax.distributed.processes.identity import own_identity
from ipu_jax.run.observe.monitor import records
from ipu_jax.run.observe.monitor.rows import Watch
from support.launched import recorded, wait_for

# Ten steps of 0.1 s, of which the last was 3 s ago; each has 2 updates of 4 examples.
STEPS = """
for k in range(10):
    ago({last} + 0.1 * (9 - k))
    beacon.begun()
    beacon.finished(1, 2, 8)
ago(0)
"""


def watch(**chosen):
    own = own_identity()
    assert own is not None
    return Watch(own, **chosen)


def row_of(**chosen):
    (row,) = watch(**chosen).look().rows
    return row


def becomes(pid, *states):
    wait_for(lambda: psutil.Process(pid).status() in states)


def test_a_process_that_steps_runs_at_its_speed_of_late(folder):
    with recorded(folder, STEPS.format(last=3)) as running:
        row = row_of()
        assert (row.pid, row.state, row.doing, row.reason) == (running.pid, "running", "stepping", None)
        assert row.step == 20
        assert row.steps_per_second == pytest.approx(20, rel=0.05)
        assert row.samples_per_second == pytest.approx(80, rel=0.05)
        assert row.last_step_seconds == pytest.approx(3, abs=1)
        assert row.command == "python -c " + row.command[len("python -c ") :]
        assert "\n" not in row.command
        assert 5e6 < row.rss_bytes < 5e8
        assert (row.device_bytes, row.busy_share) == (None, None)
        assert 0 < row.running_seconds < 60


def test_the_time_left_is_that_of_the_planned_updates_at_the_speed_of_late(folder):
    """By hand: 20 of 120 updates are made at 20 updates per second."""
    note = "record.note(planned_after=0, planned_updates={})"
    with recorded(folder, STEPS.format(last=1) + note.format(120)):
        row = row_of()
        assert (row.planned_after, row.planned_updates) == (0, 120)
        assert row.seconds_left == pytest.approx(5, rel=0.05)
    with recorded(folder, STEPS.format(last=1) + note.format(19)):
        assert row_of().seconds_left is None  # more than planned
    with recorded(folder, STEPS.format(last=1) + note.format(2**52)):
        assert row_of().seconds_left is None  # it would be millions of years, more than Python can show as a time
    with recorded(folder, note.format(120)):
        assert row_of().seconds_left is None


def test_one_that_was_stopped_is_and_goes_on(folder):
    with recorded(folder, STEPS.format(last=1)) as running:
        running.send_signal(signal.SIGSTOP)
        becomes(running.pid, "stopped")
        row = row_of()
        assert (row.state, row.step, row.steps_per_second, row.samples_per_second) == ("stopped", 20, 0, 0)
        running.send_signal(signal.SIGCONT)
        becomes(running.pid, "running", "sleeping")
        assert row_of().state == "running"


def test_one_whose_steps_have_ceased_is_stuck_by_poprun_s_rule(folder):
    with recorded(folder, STEPS.format(last=7)):
        row = row_of()
        assert (row.state, row.doing, row.steps_per_second) == ("stuck", "stepping", 0)
        said = r"finished no step for \d+ s, and may for 5 s: the larger of 5 s and 5 x the median step of 0.1 s"
        assert re.fullmatch(said, row.reason or "")


@pytest.mark.parametrize(
    ("phase", "state", "doing"),
    [
        ("Phase.BUSY, 'saving', 30", "running", "busy: saving"),
        ("Phase.BUSY, 'saving', 3", "stuck", "busy: saving"),
        ("Phase.WAITING, 'in a barrier', 60", "running", "waiting: in a barrier"),
        ("Phase.COMPILING", "running", "compiling"),
        ("Phase.ENDING", "running", "ending"),
        ("Phase.FAILED, 'ValueError: \\x1b[2J'", "stuck", "failed: ValueError: ?[2J"),
        ("Phase.SILENT", "running", "no step yet"),
    ],
)
def test_what_is_no_step_may_take_its_own_time(folder, phase, state, doing):
    with recorded(folder, f"{STEPS.format(last=20)}\nago(10)\nbeacon.enter({phase})"):
        row = row_of()
        assert (row.state, row.doing) == (state, doing)


def test_instances_wait_for_the_one_that_is_stuck(folder):
    note = "\nrecord.note(instance={}, instances=2, run='poprun-abc')"
    behind = note.format(1) + STEPS.format(last=40)
    ahead = note.format(0) + STEPS.format(last=19) + "beacon.begun()"
    with recorded(folder, ahead) as first, recorded(folder, behind) as second:
        rows = watch().look().rows
        assert [(row.pid, row.instance, row.state) for row in rows] == [
            (first.pid, 0, "waiting"),
            (second.pid, 1, "stuck"),
        ]
        assert rows[0].reason == f"for process {second.pid}"
        second.send_signal(signal.SIGSTOP)
        becomes(second.pid, "stopped")
        assert [row.state for row in watch().look().rows] == ["waiting", "stopped"]
        assert [row.state for row in watch(pids=[first.pid]).look().rows] == ["waiting"]  # judged with those not shown


def test_another_run_does_not_wait_for_it(folder):
    with recorded(folder, STEPS.format(last=20)), recorded(folder, STEPS.format(last=1)):
        assert sorted(row.state for row in watch().look().rows) == ["running", "stuck"]


def test_another_user_cannot_join_a_run(folder, monkeypatch):
    note = "\nrecord.note(instance={}, instances=2, run='poprun-abc')"
    with (
        recorded(folder, note.format(0) + STEPS.format(last=19) + "beacon.begun()"),
        recorded(folder, note.format(1) + STEPS.format(last=20)) as second,
    ):
        found = records.find(watch()._own, {})[0]
        for one in found:
            uid = one.uid + (one.identity.pid == second.pid)
            one.seen["uids"] = one.seen["uids"]._replace(effective=uid)
        monkeypatch.setattr(records, "find", lambda own, before: (found, []))
        assert [row.state for row in watch().look().rows] == ["stuck", "stuck"]  # none waits for the other


def test_only_those_of_a_user_or_with_a_number_are_shown(folder):
    with recorded(folder) as running:
        assert row_of(users=[os.getuid()], pids=[1, running.pid]).pid == running.pid
        assert watch(users=[os.getuid() + 1]).look().rows == ()
        assert watch(pids=[1]).look().rows == ()


def test_the_busy_share_is_of_the_cores_that_a_process_may_use(folder, monkeypatch):
    with recorded(folder):
        looks = watch()
        (first,) = looks.look().rows
        assert first.busy_share is None
        monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: 150.0)
        monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1, 5])
        (second,) = looks.look().rows
        assert second.busy_share == pytest.approx(0.5)


def test_one_that_computes_is_busy(folder):
    computing = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""
    with recorded(folder, computing):
        looks = watch()
        looks.look()
        wait_for(lambda: (looks.look().rows[0].busy_share or 0) > 0)
