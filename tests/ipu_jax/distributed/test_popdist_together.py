"""Test what three instances exchange and see of each other, with real processes that do it all in one run.

Sums are compared with those that NumPy makes of all parts. Who does not come or answer is named.
"""

import json

import numpy as np
import pytest

from ipu_jax.distributed import board
from support.programs import places, run_programs

PROGRAM = """
    import json, os, signal, time
    from ipu_jax import popdist
    from ipu_jax.steps import StopRequest

    popdist.init()
    popdist.init()  # a second call does nothing
    import jax, jax.numpy as jnp, ml_dtypes, numpy as np

    own, found = popdist.get_instance_index(), {}
    assert (jax.process_index(), jax.process_count()) == (own, popdist.get_num_instances())
    assert len(jax.local_devices()) == popdist.get_num_local_ipus() == 2

    draw = np.random.default_rng(own).standard_normal
    tree = {
        "loss": 0.1 * own, "count": own + 1, "flag": own == 1,
        "f32": draw((3, 2)).astype(np.float32), "bf16": jnp.asarray(draw(5), jnp.bfloat16),
        "i32": np.arange(3, dtype=np.int32) * own, "none": np.zeros((0, 4), np.float32), "c64": np.complex64(1j * own),
    }
    def told(tree):
        kind = lambda value: str(getattr(value, "dtype", type(value).__name__))
        return {name: [kind(x), list(np.shape(x)), str(np.asarray(x).tolist())] for name, x in tree.items()}
    print(json.dumps(told(tree)))
    for op in ("mean", "sum"):
        found[op] = told(popdist.all_reduce(tree, op))
    large = draw(200_000).astype(np.float32)  # more than goes through the coordination service
    found["large"] = np.asarray(popdist.all_reduce(large, "sum")).tobytes().hex()[:4000]
    found["large of 1"] = popdist.broadcast(large, root=1).tobytes().hex()[:4000]
    key = popdist.broadcast(jax.random.key(own), root=2)
    found["key"] = jax.random.key_data(key).tolist()
    found["seed"] = popdist.broadcast(10 + own)
    for _ in range(20):  # more exchanges than are kept
        popdist.barrier()
    try:
        if own == 1:
            popdist.all_reduce(1.0, timeout=20)
        else:
            popdist.all_reduce(1, timeout=20)
    except popdist.InstancesDifferError as error:
        found["differ"] = str(error)
    popdist.barrier("all are here")
    calls = 0
    with StopRequest() as stop:
        while True:
            calls += 1
            if own == 1 and calls == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.15 if own == 0 else 0.02)  # one is far behind the others
            if stop.due():
                break
    found["stopped"] = calls, stop.asked
    print(json.dumps(found))
    found = {}

    # the board
    from ipu_jax.distributed import board
    from ipu_jax.distributed.board import Board, agree, gather

    missing = lambda who: f"{who} did not come"
    pids = agree("pids", os.getpid(), seconds=60)

    def refused(call, *args, **options):
        try:
            call(*args, **options)
        except (popdist.InstancesMissingError, ValueError) as error:
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
        found["barrier"] = refused(popdist.barrier, "the middle", timeout=3)
        again.post("tried", seconds=60)
    else:
        while len(again.seen("tried", seconds=60)) < 2:
            time.sleep(0.05)
        popdist.barrier("the middle")
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
        board._ANSWER_SECONDS = 0.5
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

    if own != 1:  # which never enters a block
        with StopRequest(grace=2) as stop:
            stop._grace = 60
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                while not stop.due():
                    time.sleep(0.05)
            except popdist.InstancesMissingError as error:
                found["not asked"] = str(error)
    print(json.dumps(found))
    popdist.barrier("the end")
"""


pytestmark = pytest.mark.slow  # three processes start jax


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    own = places(3, replicas=3, ipus_per_replica=2)
    ended = run_programs(tmp_path_factory.mktemp("three"), PROGRAM, own, seconds=180)
    for one in ended:
        assert one.code == 0, one.stderr
    return ended


@pytest.fixture(scope="module")
def found(ended):
    return [json.loads(one.lines[1]) for one in ended]


@pytest.fixture(scope="module")
def seen(ended):
    return [json.loads(one.lines[2]) for one in ended]


KINDS = {"sum": {"bool": "int"}, "mean": {"bool": "float", "int": "float", "int32": "float64"}}


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_reduction_is_that_of_numpy(ended, found, op):
    parts = [json.loads(one.lines[0]) for one in ended]
    for name, (kind, shape, text) in found[0][op].items():
        kind_of_part, shape_of_part, _ = parts[0][name]
        assert (kind, shape) == (KINDS[op].get(kind_of_part, kind_of_part), shape_of_part)
        total = sum(np.array(eval(part[name][2]), np.complex128) for part in parts)
        expected = total / 3 if op == "mean" else total
        tolerance = 2**-8 if name == "bf16" else 1e-6
        np.testing.assert_allclose(np.array(eval(text), np.complex128), expected, tolerance, err_msg=name)
    assert found[0][op]["flag"][2] == str({"sum": 1, "mean": 1 / 3}[op])


def test_all_get_the_same_bits_of_large_arrays_a_key_and_a_seed(found):
    assert found[0] == found[1] == found[2]
    assert (found[0]["key"], found[0]["seed"]) == ([0, 2], 10)  # of the root
    arrays = []
    for own in range(3):
        draw = np.random.default_rng(own).standard_normal
        for before in ((3, 2), 5):
            draw(before)
        arrays.append(draw(200_000).astype(np.float32))
    total = (arrays[0].astype(np.float64) + arrays[1] + arrays[2]).astype(np.float32)
    assert found[0]["large"] == total.tobytes().hex()[:4000]
    assert found[0]["large of 1"] == arrays[1].tobytes().hex()[:4000]


def test_all_stop_after_the_same_call_although_one_alone_gets_the_signal(found):
    calls, asked = found[0]["stopped"]
    assert calls > 4
    assert asked


def test_different_calls_are_named(found):
    assert found[0]["differ"] == (
        "instance 0 calls all_reduce(mean) PyTreeDef(*) of int64[], instance 1 calls all_reduce(mean) PyTreeDef(*) of "
        "float64[]: all instances must make the same calls, with arrays of the same shapes and dtypes"
    )


def test_boards_of_any_name_keep_their_entries_apart(seen):
    for each in seen:
        assert each["looks"] == [[f"{number} on {instance}" for instance in range(3)] for number in range(3)]
        assert each["cleared"] == [[0, 1, 2], [], [0, 1, 2]]


def test_an_instance_that_has_posted_nothing_is_named(seen):
    for each in (seen[0], seen[2]):
        assert each["look"] == each["polled"] == "instance 1 of 3 did not come"
        assert each["barrier"] == (
            "barrier 'the middle': instance 1 of 3 did not join within 3 s. All instances must call it, in the same "
            "order; allow more with timeout="
        )
        assert each["seen"] == [0, 2]
        assert each["unless"] == "another instance has failed"  # an error of the caller ends a wait


def test_entries_stay_until_the_slowest_instance_has_read_them_and_no_longer(seen):
    for each in seen:
        assert each["slow"] == [[[turn, instance] for instance in range(3)] for turn in range(2 * board._ERA + 1)]
        assert each["of the first era"] == 0


def test_the_first_instance_is_named_if_it_keeps_the_board_and_is_stopped(seen):
    assert seen[1]["stopped"] == [
        *["instance 0 of 3 did not answer within 0.5 s: look at what it does"] * 3,
        *["instance 0 of 3 did not come"] * 2,
        "a call: instance 0 of 3 did not join within 0.5 s. All instances must call it, in the same order; allow more "
        "with timeout=",
    ]


def test_an_instance_that_does_not_say_after_which_step_to_stop_is_named(seen):
    said = "SIGTERM: instance 1 of 3 did not say within 2 s after which step to stop: look at what it does"
    assert [each.get("not asked") for each in seen] == [said, None, said]
