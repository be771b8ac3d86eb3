"""Test the board: what instances see of each other, who is named as missing, and that one instance needs no board."""

import json
import tracemalloc

import jax
import numpy as np
import pytest

from ipu_jax import popdist
from ipu_jax.distributed import board
from ipu_jax.distributed.meetings import Meetings
from ipu_jax.training.checkpoints import _agreement
from support.programs import places, run_programs

PROGRAM = """
    import json, os, signal, time
    from ipu_jax import popdist

    popdist.init()
    from ipu_jax.distributed import board
    from ipu_jax.distributed.board import Board, agree, gather

    board._ANSWER_SECONDS = 0.5
    own, found = popdist.get_instance_index(), {}
    missing = lambda who: f"{who} did not come"
    pids = agree("pids", os.getpid(), seconds=60)

    def refused(call, *args, **options):
        begun = time.monotonic()
        try:
            call(*args, **options)
        except (popdist.InstancesMissingError, ValueError) as error:
            assert time.monotonic() - begun < 5
            return str(error)

    def both(at, place):
        at.post(place, b"y", seconds=60)
        while len(at.seen(place, seconds=60)) < 2:
            time.sleep(0.05)

    def fail():
        raise ValueError("another instance has failed")

    first, again, other = Board("a"), Board("a"), Board("b")
    for number, each in enumerate((first, again, other)):
        each.post("x", b"%d on %d" % (number, own), seconds=60)
    found["looks"] = [
        [entry.decode() for entry in each.look("x", seconds=60, missing=missing)] for each in (first, again, other)
    ]
    popdist.barrier("all have looked")
    if own == 0:
        again.clear("x", seconds=60)
    popdist.barrier("one has cleared")
    found["cleared"] = [sorted(each.seen("x", seconds=60)) for each in (first, again, other)]
    if own != 1:
        both(first, "y")
        found["look"] = refused(first.look, "y", seconds=1, missing=missing)
        found["polled"] = refused(first.look, "y", seconds=1, missing=missing, unless=lambda: None)
        found["unless"] = refused(first.look, "y", seconds=60, missing=missing, unless=fail)
        found["seen"] = sorted(first.seen("y", seconds=60))
        both(again, "ready")
        found["gather"] = refused(gather, "a call", b"", seconds=3)
        again.post("tried", seconds=60)
    else:
        while len(again.seen("tried", seconds=60)) < 2:
            time.sleep(0.05)
        gather("a call", b"", seconds=60)
    popdist.barrier("all have tried")
    exchange, through, turn = board._board(), Board("through"), 0

    def look_late(place, **options):  # after all others have gone on
        while len(through.seen(str(turn), seconds=60)) < 2:
            time.sleep(0.01)
        return Board.look(exchange, place, **options)

    if own == 1:
        exchange.look = look_late
    found["slow"] = []
    for turn in range(2 * board._ERA + 1):
        found["slow"].append(agree("a number", [turn, own], seconds=60))
        if own != 1:
            through.post(str(turn), seconds=60)
    vars(exchange).pop("look", None)
    found["of the first era"] = len(exchange.seen("0/0", seconds=60))
    popdist.barrier("all have read")
    if own == 1:
        os.kill(pids[0], signal.SIGSTOP)
        found["stopped"] = [
            refused(first.post, "z", seconds=0.5),
            refused(first.seen, "x", seconds=0.5),
            refused(first.clear, "x", seconds=0.5),
            refused(first.look, "none", seconds=0.5, missing=missing),
            refused(first.look, "none", seconds=0.5, missing=missing, unless=lambda: None),
            refused(gather, "a call", b"", seconds=0.5),
        ]
        os.kill(pids[0], signal.SIGCONT)
    else:
        gather("a call", b"", seconds=60)
    print(json.dumps(found))
    popdist.barrier("the end")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    ended = run_programs(tmp_path_factory.mktemp("board"), PROGRAM, places(3))
    assert [one.code for one in ended] == [0, 0, 0], "\n".join(one.stderr for one in ended)
    return [json.loads(one.lines[-1]) for one in ended]


def test_boards_of_any_name_keep_their_entries_apart(found):
    for each in found:
        assert each["looks"] == [[f"{number} on {instance}" for instance in range(3)] for number in range(3)]
        assert each["cleared"] == [[0, 1, 2], [], [0, 1, 2]]


def test_an_instance_that_has_posted_nothing_is_named(found):
    for each in (found[0], found[2]):
        assert each["look"] == each["polled"] == "instance 1 of 3 did not come"
        assert each["gather"] == (
            "a call: instance 1 of 3 did not come within 3 s. All instances must call it, in the same order; allow "
            "more with timeout="
        )
        assert each["seen"] == [0, 2]


def test_entries_stay_until_the_slowest_instance_has_read_them_and_no_longer(found):
    for each in found:
        assert each["slow"] == [[[turn, instance] for instance in range(3)] for turn in range(2 * board._ERA + 1)]
        assert each["of the first era"] == 0


def test_an_error_of_the_caller_ends_a_wait(found):
    assert found[0]["unless"] == found[2]["unless"] == "another instance has failed"


def test_the_first_instance_is_named_if_it_keeps_the_board_and_is_stopped(found):
    assert found[1]["stopped"] == [
        *["instance 0 of 3 did not answer within 0.5 s: look at what it does"] * 3,
        *["instance 0 of 3 did not come"] * 2,
        "a call: instance 0 of 3 did not come within 0.5 s. All instances must call it, in the same order; allow more "
        "with timeout=",
    ]


def test_one_instance_agrees_with_itself_without_a_board(monkeypatch):
    def fail(*_, **options):
        raise AssertionError("it was serialized")

    monkeypatch.setattr(board, "Board", fail)
    monkeypatch.setattr(json, "dumps", fail)
    value, error = object(), OSError(28, "No space left on device")
    assert board.agree("a value", value, seconds=1) == [value]
    assert _agreement.first_error(error, 1) is error
    assert _agreement.first_error(None, 1) is None
    assert [_agreement.anywhere(here, 1) for here in (True, False)] == [True, False]
    popdist.barrier()


def test_meetings_of_one_instance_end_at_once():
    meetings = Meetings(1)
    meetings.begin()
    meetings.fail(ValueError("here"), None)
    meetings.meet("a place", 1)
    meetings.check()
    assert not meetings.is_time_to_tell()


@pytest.mark.parametrize(("call", "copies"), [(popdist.broadcast, 1), (lambda x: popdist.all_reduce(x, "sum"), 2)])
def test_one_instance_copies_arrays_for_the_result_only(call, copies):
    """`copies` counts the result, and the sum in 64 bits."""
    for array in (np.ones(1 << 20), np.asarray(jax.numpy.ones(1 << 20))):
        call(array)
        tracemalloc.start()
        try:
            result = call(array)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < (copies + 0.1) * 8 * array.size
        assert isinstance(result, np.ndarray)
        assert (result.dtype, result.flags.writeable, np.shares_memory(result, array)) == (array.dtype, True, False)
