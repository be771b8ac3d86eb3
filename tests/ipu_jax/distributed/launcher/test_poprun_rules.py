"""Test the rules of supervision with times that are given: who is stuck, who failed first, whether to start again."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.distributed.launcher import hosts
from ipu_jax.distributed.launcher.attempts import FRUITLESS, LONG, History, Outcome
from ipu_jax.distributed.launcher.culprits import EarlyEnd, Judge, failure_of, first
from ipu_jax.distributed.launcher.hosts import Beat, Ended, ErrorRecord, Exited, Output, Prepared, Stacks, Started
from ipu_jax.distributed.launcher.ssh import event_of, line_of
from ipu_jax.distributed.processes.beacons import Mark, Phase, Reading


def progress(begun, finished, finished_at, phase=Phase.STEPPING, phase_at=0.0, limit=math.inf, **others):
    return Reading(begun, finished, finished_at, phase, phase_at, limit, "", **others)


def judge_of(instances, stall=None, compiling=1800.0, starting=60.0):
    judge = Judge(stall, compiling, starting)
    for i in range(instances):
        judge.started(i, 0.0)
    return judge


def beat(judge, instance, now, letter="S", **values):
    judge.beat(Beat(instance, 100 + instance, letter, progress(**values)), now)


def stepped(judge, instances, steps, duration):
    """Let all instances finish steps; return when the last one has ended."""
    for n in range(1, steps + 1):
        for i in range(instances):
            beat(judge, i, n * duration, begun=n, finished=n, finished_at=n * duration, phase_at=duration)
    return steps * duration


def stuck_at(judge, now):
    found = judge.stuck(now)
    assert found is not None
    return found


@given(st.floats(0.01, 30), st.integers(2, 20))
def test_the_limit_is_five_median_steps_and_at_least_five_seconds(duration, steps):
    judge = judge_of(2)
    end = stepped(judge, 2, steps, duration)
    limit = max(5, 5 * duration)
    assert judge.stuck(end + 0.99 * limit) is None
    stuck = stuck_at(judge, end + 1.01 * limit)
    assert stuck.limit == pytest.approx(limit)
    assert stuck.seconds == pytest.approx(1.01 * limit)


def test_steps_that_were_seen_at_once_have_a_duration_from_the_second_on():
    judge = judge_of(1)
    beat(judge, 0, 20.5, begun=31, finished=31, first_at=20.0, finished_at=20.3, phase_at=20.0)
    assert judge.median_step() == pytest.approx(0.01)
    stuck = stuck_at(judge, 25.4)
    assert stuck.limit == 5


def test_who_waits_in_a_barrier_is_not_stuck_and_excuses_nobody():
    judge = judge_of(2)
    stepped(judge, 2, 10, 0.1)
    for now in (1.0, 4.0, 6.1):
        beat(judge, 0, now, begun=10, finished=10, finished_at=1.0, phase=Phase.WAITING, phase_at=1.0, limit=310.0)
        beat(judge, 1, now, begun=10, finished=10, finished_at=1.0, phase_at=0.1)
    stuck = stuck_at(judge, 6.1)
    assert (stuck.instance, stuck.limit) == (1, 5)
    beat(judge, 1, 300, begun=11, finished=11, finished_at=300.0, phase_at=0.1)
    assert judge.stuck(300.0) is None
    beat(judge, 1, 312, begun=12, finished=12, finished_at=312.0, phase_at=0.1)
    late = stuck_at(judge, 312.0)  # its own error should have ended it
    assert (late.instance, late.doing) == (0, "waited")


def test_who_is_waited_for_before_the_first_step_is_named():
    judge = judge_of(2)
    for now in (50, 109):
        beat(judge, 0, now, begun=0, finished=0, finished_at=0.0, phase=Phase.WAITING, phase_at=1.0, limit=110.0)
        beat(judge, 1, now, begun=0, finished=0, finished_at=0.0, phase=Phase.SILENT, phase_at=0.5)
        assert judge.stuck(now) is None
    stuck = stuck_at(judge, 112)
    assert (stuck.instance, stuck.limit) == (1, 110)
    assert stuck.doing.startswith("has not reached its first step; another one waited")


def test_one_long_step_does_not_move_the_median():
    judge = judge_of(1)
    end = stepped(judge, 1, 50, 1.0)
    beat(judge, 0, end + 20, begun=51, finished=51, finished_at=end + 20, phase_at=1.0)
    assert judge.median_step() == pytest.approx(1.0)


def test_a_time_in_which_it_did_something_else_is_no_step():
    judge = judge_of(1)
    end = stepped(judge, 1, 3, 1.0)
    # saving took 100 s; the phase has ended since, and began anew
    for finished, at in ((4, 101), (5, 202), (6, 303), (7, 404)):
        beat(judge, 0, end + at, begun=finished, finished=finished, finished_at=end + at, aside=0.99 * at)
    assert judge.median_step() == pytest.approx(1.0)


def test_steps_that_each_read_a_batch_first_are_measured():
    judge = judge_of(1)
    for n in range(1, 40):  # the phase began anew in each step, for a moment
        at: Any = {"finished_at": 30 + 0.5 * n, "phase_at": 30.01 + 0.5 * n, "aside": 30 + 0.01 * n}
        beat(judge, 0, 30.02 + 0.5 * n, begun=n, finished=n, **at)
    assert judge.median_step() == pytest.approx(0.5)
    stuck = stuck_at(judge, 30 + 0.5 * 39 + 5.2)
    assert "the median step" in stuck.rule


def test_the_first_step_compiles_and_bounds_the_second():
    judge = judge_of(1)
    beat(judge, 0, 40, begun=1, finished=1, finished_at=40, phase_at=40)
    assert judge.stuck(40 + 199) is None
    stuck = stuck_at(judge, 40 + 201)
    assert "the first step" in stuck.rule


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.COMPILING, Phase.BUSY])
def test_others_may_wait_for_one_that_does_something_else(phase):
    judge = judge_of(2)
    end = stepped(judge, 2, 5, 0.1)
    for now in range(1, 100):
        beat(judge, 0, end + now, begun=5, finished=5, finished_at=end, phase=phase, phase_at=end + 0.5)
        beat(judge, 1, end + now, begun=6, finished=5, finished_at=end, phase_at=0.1)
        assert judge.stuck(end + now) is None
    # from its end on, the steps have their usual time
    beat(judge, 0, end + 99.5, begun=5, finished=5, finished_at=end, phase_at=end + 99.5)
    assert judge.stuck(end + 103) is None
    stuck = stuck_at(judge, end + 105)
    assert stuck.instance == 0


@given(
    begun=st.lists(st.integers(11, 14), min_size=2, max_size=6),
    stopped=st.sets(st.integers(0, 5)),
    ended=st.sets(st.integers(0, 5)),
)
def test_the_culprit_is_stopped_or_has_begun_the_fewest_steps(begun, stopped, ended):
    judge = judge_of(len(begun))
    end = stepped(judge, len(begun), 10, 0.1)
    for i, steps in enumerate(begun):
        phase = Phase.ENDING if i in ended else Phase.STEPPING
        letter = "T" if i in stopped else "S"
        beat(judge, i, end + 1, letter, begun=steps, finished=10, finished_at=end, phase=phase, phase_at=0.1)
    stuck = judge.stuck(end + 5.5)
    alive = [i for i in range(len(begun)) if i not in ended or i in stopped]
    stepping = [i for i in range(len(begun)) if i not in ended]
    if not stepping:
        assert stuck is None  # those that are stopped are found a little later
        return
    assert stuck is not None
    of_kind = [i for i in alive if i in stopped] or stepping
    assert stuck.instance in of_kind
    assert begun[stuck.instance] == min(begun[i] for i in of_kind)
    assert stuck.letter == ("T" if stuck.instance in stopped else "S")


def test_of_two_that_have_begun_as_much_the_longer_silent_one_is_it():
    judge = judge_of(2)
    end = stepped(judge, 2, 10, 0.1)
    beat(judge, 0, end + 1, begun=11, finished=11, finished_at=end + 0.3, phase_at=0.1)
    beat(judge, 1, end + 1, begun=11, finished=10, finished_at=end, phase_at=0.1)
    stuck = stuck_at(judge, end + 6)
    assert stuck.instance == 1


def test_steps_of_others_do_not_wait_for_one_without_a_beacon():
    judge = judge_of(3)
    end = stepped(judge, 2, 10, 0.1)
    judge.beat(Beat(2, 102, "S", None), end)
    beat(judge, 0, end + 1, begun=11, finished=10, finished_at=end, phase_at=0.1)
    stuck = stuck_at(judge, end + 6)
    assert stuck.instance == 1


ALONE = "waits in a place, which no other instance has begun, while the others wait for it in step 21"
TOGETHER = "waits in a place while the others wait for it in step 21"
ODD = "is in step 21, which no other instance has begun, while another one waits in a place"
# by hand: popdist.init and 20 steps are 21 common things; the next one is the 22nd
WAITS, STEPS = (Phase.WAITING, 20, 22, 21), (Phase.STEPPING, 21, 22, 22)


@pytest.mark.parametrize(
    ("instances", "named", "doing"),
    [
        ([STEPS, WAITS], 1, ALONE),
        ([WAITS, STEPS], 0, ALONE),
        ([STEPS, STEPS, WAITS, STEPS], 2, ALONE),
        ([STEPS, WAITS, STEPS, WAITS], 1, TOGETHER),
        ([WAITS, WAITS, STEPS, WAITS], 2, ODD),
        ([(Phase.STEPPING, 22, 23, 23), WAITS], 1, ALONE),  # it is a step ahead, and has not waited for it yet
        ([STEPS, (Phase.WAITING, 20, 21, 21)], 1, TOGETHER),  # such as for the others' parts of a save
        ([(Phase.STEPPING, 21, 23, 23), WAITS], 1, TOGETHER),  # it is late to leave an exchange
        # these owe the one that waits something: they have not come to its exchange, or are in a step of their own
        ([(Phase.STEPPING, 20, 21, 21), WAITS], 0, "finished no step"),
        ([(Phase.STEPPING, 20, 22, 22), WAITS], 0, "finished no step"),  # it has left the exchange, and does nothing
        ([(Phase.STEPPING, 21, 1, 1), (Phase.WAITING, 20, 2, 1)], 0, "finished no step"),
        ([STEPS, (Phase.STEPPING, 20, 21, 21), WAITS], 1, "finished no step"),
        ([STEPS, (Phase.ENDING, 20, 22, 22)], 0, "finished no step"),
    ],
)
def test_who_waits_where_no_other_one_comes_is_named(instances, named, doing):
    judge = judge_of(len(instances))
    end = stepped(judge, len(instances), 20, 0.1)
    for i, (phase, begun, joint_begun, joint_made) in enumerate(instances):
        at: Any = {"finished": 20, "finished_at": end, "phase": phase, "phase_at": end, "limit": 300.0}
        reading = progress(begun=begun, joint_begun=joint_begun, joint_made=joint_made, **at)
        judge.beat(Beat(i, 100 + i, "S", dataclasses.replace(reading, label="in a place")), end + 0.1)
    assert judge.stuck(end + 4.9) is None
    stuck = stuck_at(judge, end + 5.1)
    assert (stuck.instance, stuck.pid) == (named, 100 + named)
    question = " (do all instances make the same number of updates, saves and exchanges?)"
    assert stuck.doing == (doing if doing == "finished no step" else doing + question)
    assert stuck.seconds == pytest.approx(5.1)


def test_a_stopped_one_is_named_before_one_that_waits():
    judge = judge_of(2)
    end = stepped(judge, 2, 20, 0.1)
    waits: Any = {"finished": 20, "finished_at": end, "phase": Phase.WAITING, "phase_at": end, "limit": 300.0}
    beat(judge, 1, end, begun=20, joint_begun=22, joint_made=21, **waits)
    at: Any = {"begun": 21, "finished": 20, "finished_at": end, "phase_at": end, "joint_begun": 22, "joint_made": 22}
    beat(judge, 0, end + 1, "T", **at)
    assert stuck_at(judge, end + 5.1).instance == 0


@pytest.mark.parametrize(
    ("begun", "letters", "ticks", "named"),
    [
        ((11, 11, 11), "SSS", {0: (7, 7), 1: (3, 9), 2: (4, 4)}, 1),
        ((11, 12, 11), "SSS", {0: (7, 7), 1: (3, 3)}, 1),  # one is a step ahead
        ((11, 11, 11), "SSS", {0: (3, 4), 1: (3, 3)}, 1),  # an IPU of the other one has gone on
        ((11, 11, 11), "SSS", {0: (3, 3), 1: (3, 3)}, 0),
        ((11, 11, 11), "SSS", {}, 0),
        ((11, 11, 10), "SSS", {0: (7, 7), 1: (3, 3)}, 2),  # it has not begun the step, in which the others wait
        ((11, 11, 11), "STS", {0: (3, 3), 1: (7, 7)}, 1),
    ],
)
def test_the_task_in_the_lowest_tick_is_what_the_others_wait_for(begun, letters, ticks, named):
    judge = judge_of(3)
    end = stepped(judge, 3, 10, 0.1)
    for i in range(3):
        later = end + 0.01 * i  # without ticks, the first one is named: it is silent for longer
        beat(judge, i, end + 0.1, letters[i], begun=begun[i], finished=10, finished_at=later, phase_at=0.1)
    stuck = judge.by_ticks(stuck_at(judge, end + 5.1), ticks)
    assert (stuck.instance, stuck.pid) == (named, 100 + named)


def test_what_is_no_step_has_its_own_limit_and_is_not_judged_by_ticks():
    judge = judge_of(2)
    end = stepped(judge, 2, 10, 0.1)
    at = progress(11, 10, end, Phase.BUSY, end, limit=9.0)
    judge.beat(Beat(0, 100, "S", dataclasses.replace(at, label="saving")), end)
    beat(judge, 1, end, begun=11, finished=10, finished_at=end, phase_at=0.1)
    stuck = stuck_at(judge, end + 9.1)
    assert judge.by_ticks(stuck, {0: (2, 2), 1: (1, 1)}) == stuck
    assert (stuck.instance, stuck.doing, stuck.limit, stuck.rule) == (0, "was busy with saving", 9, "its own limit")


def test_who_ends_or_tells_of_no_steps_or_has_no_beacon_may_run_for_ever():
    judge = judge_of(3)
    beat(judge, 0, 10, begun=9, finished=9, finished_at=1, phase=Phase.ENDING, phase_at=1)
    judge.beat(Beat(1, 101, "S", None), 10)
    beat(judge, 2, 1e6, begun=0, finished=0, finished_at=0.0, phase=Phase.SILENT, phase_at=1.0)
    assert judge.stuck(1e6) is None


@pytest.mark.parametrize("how", ["is ending", "has exited"])
def test_who_works_on_when_all_others_have_ended_is_not_stuck(how):
    judge = judge_of(2)
    end = stepped(judge, 2, 10, 0.1)
    beat(judge, 0, end + 0.1, begun=10, finished=10, finished_at=end, phase=Phase.ENDING, phase_at=end + 0.1)
    if how == "has exited":
        judge.exited(0, 1, 0.0)
    beat(judge, 1, end + 3000, begun=10, finished=9, finished_at=end, phase_at=0.1)
    assert judge.stuck(end + 3000) is None
    beat(judge, 1, end + 3000, begun=11, finished=10, finished_at=end, phase_at=0.1)  # a step that the other lacks
    assert judge.stuck(end + 3000) is not None


@pytest.mark.parametrize("letter", ["S", "T"])
def test_who_does_not_come_to_where_the_others_meet_first_is_named_in_its_time(letter):
    judge = judge_of(3, starting=60)
    waits: Any = {"begun": 0, "finished": 0, "finished_at": 0.0, "phase": Phase.WAITING, "limit": 80.0}
    for now in (20, 64, 66):
        beat(judge, 0, now, phase_at=5.0, joint_begun=1, **waits)
        beat(judge, 2, now, phase_at=15.0, joint_begun=1, **waits)
        if letter == "S" or now == 66:
            judge.beat(Beat(1, 101, letter, None), now)
        if now < 65:
            assert judge.stuck(now) is None
    stuck = stuck_at(judge, 66)
    assert (stuck.instance, stuck.seconds, stuck.limit, stuck.rule) == (1, 61, 60, "--start-timeout")
    assert judge_of(3).stuck(1e6) is None  # as long as none has come, its program may never do so


ENDED = {"begun": 5, "finished": 5, "finished_at": 9.0, "phase": Phase.ENDING, "phase_at": 10.0}


@pytest.mark.parametrize(
    ("ended", "status", "other", "now", "doing"),
    [
        # by hand: instance 0 has done its part 7 times (popdist.init, 5 steps, a barrier)
        ((7, 7), None, (8, 7, Phase.STEPPING), 10.1, "trains, in step 6"),
        ((7, 7), 0, (8, 8, Phase.STEPPING), 10.1, "trains, in step 6"),  # dispatched, and cannot end
        ((7, 7), None, (8, 7, Phase.COMPILING), 10.1, "compiles step 6"),
        ((7, 7), None, (8, 7, Phase.WAITING), 10.1, "waits in a place"),
        ((8, 7), 0, (8, 7, Phase.COMPILING), 10.1, "compiles step 6"),  # it ended while it compiled
        ((7, 7), None, (8, 7, Phase.BUSY), 10.1, "is busy with in a place"),
        ((7, 7), None, (7, 7, Phase.WAITING), 11.0, None),  # not counted, and it may be about to go on
        ((7, 7), None, (7, 7, Phase.WAITING), 11.3, "waits in a place"),
        ((7, 7), None, (7, 6, Phase.WAITING), 99.0, None),  # of the barrier that instance 0 has left: it is slow
        ((7, 7), None, (7, 7, Phase.STEPPING), 99.0, None),  # it has more to print, or writes a last file
        ((7, 7), None, (7, 7, Phase.BUSY), 99.0, None),
        ((7, 7), None, (6, 6, Phase.STEPPING), 99.0, None),
        ((7, 7), None, (7, 7, Phase.ENDING), 99.0, None),
        ((7, 7), 0, (7, 7, Phase.ENDING), 11.0, None),  # its last moment, perhaps
        ((7, 7), 0, (7, 7, Phase.ENDING), 11.3, "waits for it at the end of the program"),
        ((0, 0), 0, (0, 0, Phase.ENDING), 99.0, None),  # they have never met
        (None, 0, (0, 0, Phase.ENDING), 99.0, None),
        (None, 0, (1, 0, Phase.WAITING), 10.1, "waits in a place"),  # at import: it has no beacon
        (None, 0, (0, 0, Phase.SILENT), 99.0, None),  # a program that tells of nothing
        (None, 0, (9, 9, Phase.STEPPING), 99.0, None),  # its part was done by a process that has no beacon
        ((0, 0), 0, (9, 8, Phase.WAITING), 99.0, None),
    ],
)
def test_who_has_ended_while_another_one_needs_it_is_found(ended, status, other, now, doing):
    ends = judge_of(2)
    if ended is not None:
        phase = Phase.ENDING if status is None else Phase.STEPPING
        counts = {"joint_begun": ended[0], "joint_made": ended[1]}
        ends.beat(Beat(0, 100, "S", progress(**{**ENDED, "phase": phase}, **counts)), 10.0)
    if status is not None:
        ends.exited(0, status, 10.0)
    begun, made, phase = other
    at = progress(6, 5, 9.0, phase, 9.5, joint_begun=begun, joint_made=made)
    ends.beat(Beat(1, 101, "S", dataclasses.replace(at, label="in a place")), now)
    found = ends.early(now)
    if doing is None:
        assert found is None
    else:
        finished = None if ended is None else 5
        assert found == EarlyEnd(0, 1, status, finished, doing)


def test_of_several_that_have_ended_the_one_that_came_the_least_far_is_named():
    ends = judge_of(4)
    for i, made in enumerate((7, 5, 6)):
        ends.beat(Beat(i, 100 + i, "S", progress(**ENDED, joint_begun=made, joint_made=made)), 10.0 + i)
    ends.beat(Beat(3, 103, "S", progress(9, 8, 9.0, joint_begun=9, joint_made=8)), 13.0)
    found = ends.early(13.0)
    assert found is not None
    assert (found.instance, found.other) == (1, 3)


def test_stopped_is_stuck_in_any_phase_after_five_seconds():
    judge = judge_of(1)
    for now in (10.0, 12.0, 14.9):
        judge.beat(Beat(0, 100, "T", None), now)
        assert judge.stuck(now) is None
    stuck = stuck_at(judge, 15.1)
    assert stuck.doing == "was stopped"
    judge.beat(Beat(0, 100, "S", None), 15.2)
    assert judge.stuck(30) is None


def test_an_exception_that_does_not_end_its_program_is_stuck():
    judge = judge_of(1)
    beat(judge, 0, 11, begun=1, finished=1, finished_at=1, phase=Phase.FAILED, phase_at=10)
    assert judge.stuck(14.9) is None
    assert judge.stuck(15.1) is not None


def test_compiling_has_its_limit_and_names_the_one_that_has_not_come():
    judge = judge_of(2, compiling=100)
    beat(judge, 0, 50, begun=1, finished=0, finished_at=0, phase=Phase.COMPILING, phase_at=1)
    judge.beat(Beat(1, 101, "S", None), 50)  # it has not even used jax
    assert judge.stuck(100) is None
    stuck = stuck_at(judge, 102)
    assert (stuck.instance, stuck.rule) == (1, "--compile-timeout")


def test_the_clocks_start_anew_when_nobody_has_looked():
    judge = judge_of(1, compiling=100)
    end = stepped(judge, 1, 5, 0.1)
    judge.resumed(end + 1000)
    assert judge.stuck(end + 1004) is None
    assert judge.stuck(end + 1006) is not None
    judge = judge_of(1, compiling=100)
    beat(judge, 0, 1, begun=0, finished=0, finished_at=0, phase=Phase.STARTING, phase_at=1)
    judge.resumed(1000)
    assert judge.stuck(1099) is None
    assert judge.stuck(1101) is not None


def test_a_limit_that_is_off_is_none():
    judge = judge_of(1, stall=math.inf)
    assert judge.stuck(stepped(judge, 1, 5, 0.1) + 1e6) is None


@pytest.mark.parametrize(
    "event",
    [
        Beat(1, 7, "S", progress(3, 2, 50.0, phase_at=40.0), None),
        Beat(1, 7, "S", progress(9, 8, 50.0, pid=7, beat_at=51.0, mark=Mark(44.0, 5, 640), device_bytes=3), None),
        Beat(1, 7, "S", None, ErrorRecord(60.0, "ValueError", "no")),
        Exited(0, -9, 70.0, ErrorRecord(60.0, "ValueError", "no")),
        Output(0, "stderr", bytes(range(256))),
        Started(0, 9, "3", (1, 2)),
        Stacks(0, "in f", ("IPU 0",), (3, 4)),
        Ended((4, 5)),
    ],
)
def test_what_happens_travels_to_another_clock(event):
    there, here = 1000.0, 100.0
    came = event_of(line_of(event, there), here)
    assert type(came) is type(event)
    assert event_of(line_of(came, here), there) == event


def test_times_travel_as_ages():
    came = event_of(line_of(Exited(0, -9, 70.0, ErrorRecord(60.0, "ValueError", "no")), 1000.0), 100.0)
    assert came == Exited(0, -9, 70.0 - 900, ErrorRecord(60.0 - 900, "ValueError", "no"))
    at = {"first_at": 45.0, "finished_at": 50.0, "phase_at": 40.0, "beat_at": 51.0}
    beat = Beat(1, 7, "S", dataclasses.replace(progress(3, 2, 0.0, mark=Mark(44.0, 5, 6)), **at))
    came = event_of(line_of(beat, 1000.0), 100.0)
    assert isinstance(came, Beat)
    assert came.progress is not None
    assert {name: getattr(came.progress, name) + 900 for name in at} == at
    assert came.progress.mark == Mark(44.0 - 900, 5, 6)


record = lambda at, message="no", kind="ValueError": ErrorRecord(at, kind, message)
LOST = record(9.9, "Gloo: Connection closed by peer", "XlaRuntimeError")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        # instance, exit status, when it was seen, its exception: the one whose exception came first
        ([(0, 1, 10.0, record(9.9)), (1, 1, 10.2, record(9.8))], 1),
        # a lost connection is a consequence even if it is seen first
        *(([(0, 1, 10.0, LOST), (1, status, 9.95, None)], 1) for status in (-9, -11, -6, 3)),
        ([(0, 1, 10.0, LOST), (1, 3, 12.0, None)], 1),
        ([(i, 1, 10.0, record(9.9 - i, "connection reset")) for i in range(3)], 2),
    ],
)
def test_the_first_failure_that_is_no_consequence_is_told(failures, expected):
    assert first([failure_of(*failure) for failure in failures]).instance == expected


def test_an_exception_is_not_believed_of_an_instance_that_a_signal_has_ended():
    assert failure_of(0, -9, 10.0, record(1.0)).error is None
    assert failure_of(0, -9, 10.0, record(1.0)).exit_status == 137


outcome = lambda **values: Outcome(1, **{"again": True, "stepped": True, **values})
STEPLESS = outcome(stepped=False)


@pytest.mark.parametrize(
    ("most", "outcomes", "restarts", "last_words"),
    [
        *((most, [outcome()] * 10, most, [f"no restart is left: --max-restarts {most}"]) for most in range(1, 4)),
        (0, [outcome()] * 10, 0, []),
        # it gets nowhere
        (100, [STEPLESS] * 10, FRUITLESS, ["3 restarts in a row have finished no step: there is no other"]),
        (100, [outcome(), STEPLESS, STEPLESS, outcome(), *[STEPLESS] * 9], 3 + FRUITLESS, None),
        # a program without beacons gets on if it runs for a while
        (100, [outcome(stepped=None, seconds=LONG)] * 10, 10, []),
        (100, [outcome(stepped=None, seconds=1)] * 10, FRUITLESS, None),
        (5, [outcome(again=False)], 0, []),  # what cannot end otherwise
    ],
)
def test_a_run_is_started_again_as_often_as_it_is_allowed_and_gets_on(most, outcomes, restarts, last_words):
    history, count = History(most), 0
    while count < len(outcomes) and history.restart(outcomes[count]) is not None:
        count += 1
    assert count == restarts
    assert last_words is None or history.last_words == last_words


def test_a_taken_port_is_no_restart():
    history = History(0)
    assert history.restart(outcome(port_taken=True)) is not None
    assert history.restart(outcome(port_taken=True)) is None
    assert History(0).restart(outcome(port_taken=True), port_is_given=True) is None


def test_a_later_attempt_gets_another_port_even_if_the_first_one_is_free_again(monkeypatch):
    found = iter([41001, 41001, 41002])
    monkeypatch.setattr(hosts, "free_port", lambda _, port=0: port or next(found))
    host = hosts.LocalHost("")
    assert [host.prepare("127.0.0.1", 0, 0) for _ in range(2)] == [Prepared(41001), Prepared(41002)]
    assert host.prepare("127.0.0.1", 41001, 0) == Prepared(41001)  # the user's choice
    host.close()
