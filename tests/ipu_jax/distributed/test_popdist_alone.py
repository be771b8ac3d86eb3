"""Test popdist with one instance, what it reads from poprun's environment, and the arithmetic of exchanges."""

import json
import re
import tracemalloc
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from ipu_jax import popdist
from ipu_jax.distributed import board
from ipu_jax.distributed.agreeing import Meetings
from ipu_jax.distributed.environment import InstancePlace
from ipu_jax.training.checkpoints import _all_instances
from support.refusals import refusals, refused

ADDRESS = "127.0.0.1:40001"


@pytest.fixture
def second_of_four(monkeypatch):
    place = InstancePlace(1, 4, 0, replicas=8, ipus_per_replica=2, coordinator=ADDRESS, bind=ADDRESS)  # on four hosts
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    jax.random.key(0)  # compiles


def test_without_poprun_there_is_one_instance():
    popdist.init()
    assert not popdist.is_popdist_env_set()
    assert popdist.get_instance_index() == popdist.get_local_instance_index() == popdist.get_replica_index_offset() == 0
    assert popdist.get_num_instances() == popdist.get_num_total_replicas() == popdist.get_num_local_replicas() == 1
    assert popdist.get_num_ipus_per_replica() == popdist.get_num_local_ipus() == popdist.get_num_local_devices() == 1
    assert popdist.get_further_axes() == {}


def test_the_answers_are_those_of_the_environment(second_of_four, monkeypatch):
    assert popdist.is_popdist_env_set()
    assert (popdist.get_instance_index(), popdist.get_num_instances(), popdist.get_local_instance_index()) == (1, 4, 0)
    assert (popdist.get_num_total_replicas(), popdist.get_num_local_replicas()) == (8, 2)
    assert (popdist.get_replica_index_offset(), popdist.get_num_ipus_per_replica()) == (2, 2)
    assert popdist.get_num_local_ipus() == popdist.get_num_local_devices() == 4
    assert popdist.get_further_axes() == {}
    monkeypatch.setenv("IPU_JAX_AXES", "tensor=2,context=3")  # an IPU is a group of devices
    assert popdist.get_further_axes() == {"tensor": 2, "context": 3}
    assert (popdist.get_num_local_ipus(), popdist.get_num_local_devices()) == (4, 24)


def test_names_of_the_original_work(second_of_four):
    own = ["is_popdist_env_set", "get_instance_index", "get_local_instance_index", "get_num_instances"]
    own += ["get_num_total_replicas", "get_num_local_replicas", "get_replica_index_offset", "get_num_ipus_per_replica"]
    for name in own:
        original = re.sub(r"_[a-z]", lambda found: found[0][1].upper(), name)
        assert getattr(popdist, original)() == getattr(popdist, name)()


def test_one_instance_exchanges_with_itself():
    tree: dict[str, Any] = {"a": 1, "b": [2.5, np.array([1, 2], np.float32)], "c": True}
    for op in ("mean", "sum"):
        reduced: Any = popdist.all_reduce(tree, op)
        assert reduced["a"] == 1
        assert reduced["b"][0] == 2.5
        assert reduced["b"][1].tolist() == [1, 2]
        assert reduced["b"][1].dtype == np.float32
    key = jax.random.key(3)
    assert (jax.random.key_data(popdist.broadcast(key)) == jax.random.key_data(key)).all()
    popdist.barrier()
    with popdist.busy("nothing"):
        popdist.count_steps()


def test_a_function_runs_on_the_instances_that_are_named(second_of_four):
    assert popdist.execute_on_instances([0, 1], max, 3, 4) == 4
    assert popdist.execute_on_instances({0, 3}, max, 3, 4) is None


@refusals(
    (lambda: popdist.all_reduce(1.0, "max"), "op='max'", "'mean'"),  # pyright: ignore[reportArgumentType] (on purpose)
    (lambda: popdist.all_reduce({"a": "text"}), "a leaf is 'text'", "give numbers"),
    (lambda: popdist.all_reduce(jax.random.key(0)), "random key", "no mean or sum"),
    (lambda: popdist.broadcast(1, root=4), "root=4", "number of an instance", "from 0 to 3"),
    (lambda: popdist.count_steps(0), "steps=0", "at least 1"),
    (lambda: popdist.execute_on_instances({1, 4}, max, 3, 4), "instances=[1, 4] has 4", "give", "from 0 to 3"),
)
def test_wrong_arguments_are_refused(second_of_four, call, holds):
    with refused(*holds):
        call()


def test_init_refuses_an_environment_that_no_launcher_made(monkeypatch):
    monkeypatch.setenv("IPU_JAX_INSTANCE", "0")
    with refused("the environment has IPU_JAX_INSTANCE", "but not ", "start"):
        popdist.init()


# the arithmetic of exchanges


@pytest.fixture
def exchanged(monkeypatch):
    """Return a function that makes a call for each of several trees, as if each were another instance's."""

    class SentError(Exception):
        pass

    def of(call, trees):
        parts = list[bytes]()

        def collect(what, payload, **options):
            parts.append(payload)
            raise SentError

        monkeypatch.setattr(board, "gather", collect)
        for own, tree in enumerate(trees):
            monkeypatch.setattr(board, "process", lambda own=own: (own, len(trees)))
            with pytest.raises(SentError):
                call(tree)
        monkeypatch.setattr(board, "gather", lambda *_, **options: parts)
        return [call(tree) for tree in trees]

    return of


LARGE = 2**53 + 1  # the first integer that float64 does not hold
WHOLE = {  # of each dtype, the numbers of three instances; None for Python's own
    "above 2**53": (None, [LARGE, 2, -LARGE - 2]),
    "counts": (None, [LARGE, LARGE, 1]),
    "at the end of int64": ("int64", [2**62, 2**62 - 1, 0]),
    "at the beginning of int64": ("int64", [-(2**63), 2**63 - 1, 3]),
    "at the end of uint64": ("uint64", [2**64 - 1, 0, 0]),
    "above int64": ("uint64", [2**63 + 1, 2**63 - 5, 3]),
    "of 32 bits": ("int32", [2**31 - 1, -(2**31), 7]),
    "of 32 bits without a sign": ("uint32", [2**32 - 9, 4, 4]),
    "of 8 bits": ("int8", [127, -128, 100]),
    "of 4 bits": ("int4", [7, -8, 3]),
    "flags": ("bool", [True, False, True]),
    "Python's flags": (None, [True, True, False]),
}


@pytest.mark.parametrize(("dtype", "numbers"), WHOLE.values(), ids=WHOLE)
def test_integers_of_several_instances(exchanged, dtype, numbers):
    """By Python's own integers and fractions, which are exact."""
    trees = [{"a": [n if dtype is None else np.array([n], dtype)]} for n in numbers]

    def number(found, kind, held):
        (leaf,) = found["a"]
        assert type(leaf) is kind if dtype is None else leaf.dtype == held
        return np.ravel(leaf)[0].item()

    for found in exchanged(lambda tree: popdist.all_reduce(tree, "sum"), trees):
        assert number(found, int, "int64" if dtype == "bool" else dtype) == sum(numbers)
    mean, largest = Fraction(sum(numbers), 3), max(abs(int(n)) for n in numbers)
    for found in exchanged(popdist.all_reduce, trees):
        assert abs(Fraction(number(found, float, "float64")) - mean) <= Fraction(largest, 2**51)  # a few roundings
    for root, n in enumerate(numbers):
        for found in exchanged(lambda tree, root=root: board.broadcast(tree, root, seconds=1), trees):
            assert number(found, type(n), dtype) == n


FLOATS = {  # of three instances, and their sum, which is rounded once to the dtype
    "a small one between large ones": ("float32", [2.0**30, 1.0, -(2.0**30)], 1.0),
    "beyond float32 between": ("float32", [2.0**127, 2.0**127, -(2.0**127)], 2.0**127),
    "more than bfloat16 counts": ("bfloat16", [256.0, 1.0, 1.0], 258.0),
    "beyond float16 between": ("float16", [60000.0, 60000.0, -65504.0], 54496.0),
    "of 8 bits": ("float8_e4m3fn", [16.0, 1.0, 1.0], 18.0),
    "of 64 bits": ("float64", [2.0**53, 1.0, 1.0], 2.0**53),  # from the first instance to the last
    "infinite": ("float32", [np.inf, 1.0, 2.0], np.inf),
    "no number": ("bfloat16", [np.nan, 1.0, 2.0], np.nan),
    "complex": ("complex64", [2.0**30 + 1j, 1.0, -(2.0**30) - 3j], 1.0 - 2j),
    "Python's": (None, [0.1, 0.2, 0.3], 0.1 + 0.2 + 0.3),
    "Python's complex": (None, [1j, 3.0 + 0j, 3.0 - 4j], 6.0 - 3j),
}


@pytest.mark.parametrize(("dtype", "numbers", "total"), FLOATS.values(), ids=FLOATS)
def test_floats_of_several_instances(exchanged, dtype, numbers, total):
    trees = [[n if dtype is None else np.array([n], dtype)] for n in numbers]
    like = np.asarray(trees[0][0]).dtype

    def check(found, expected):
        assert isinstance(found, np.ndarray if dtype else type(expected))
        assert np.asarray(found).dtype == like
        np.testing.assert_array_equal(np.ravel(found).astype(complex), np.ravel(expected).astype(like).astype(complex))

    for call, expected in ((lambda tree: popdist.all_reduce(tree, "sum"), total), (popdist.all_reduce, total / 3)):
        for (found,) in exchanged(call, trees):
            check(found, expected)
    for root in range(3):
        for (found,) in exchanged(lambda tree, root=root: board.broadcast(tree, root, seconds=1), trees):
            check(found, numbers[root])


# what one instance needs no board for


def test_one_instance_agrees_with_itself_without_a_board(monkeypatch):
    def fail(*_, **options):
        raise AssertionError("it was serialized")

    monkeypatch.setattr(board, "Board", fail)
    monkeypatch.setattr(json, "dumps", fail)
    value, error = object(), OSError(28, "No space left on device")
    assert board.agree("a value", value, seconds=1) == [value]
    assert _all_instances.first_error(error, 1) is error
    assert _all_instances.first_error(None, 1) is None
    assert [_all_instances.anywhere(here, 1) for here in (True, False)] == [True, False]
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
