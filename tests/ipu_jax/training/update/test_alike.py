"""Test that instances which are about to train unlike are named before the first update, and equal ones never."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.distributed import board
from ipu_jax.distributed.errors import InstancesDifferError
from ipu_jax.training.update._alike import Alike, around_difference, checksums
from support import unlike
from support.programs import run_instances
from support.refusals import compilations


def check_said(name: str, text: str, others: str = " 0 has", odd: int = 1) -> None:
    *_, what, usual, other = unlike.UNLIKE[name]
    assert text.endswith(". popdist.init(check_programs=False) allows it")
    head, tail = text.split(f", instance{others} ")
    assert head.startswith("before the first update, instance 1 has ")
    first, second = (other, usual) if odd > 0 else (usual, other)  # of two, instance 0 counts as right
    assert what in head
    assert first in head
    assert second in tail


@pytest.fixture
def two_instances(monkeypatch):
    """Let each step compare itself with another one, and return a function that calls two functions in threads.

    It returns what they returned or raised, and the number of messages of each.
    """
    own, sent, of_class = threading.local(), dict[int, bytes](), Alike.__init__
    met, messages = threading.Barrier(2), [0, 0]

    def gather(what: str, payload: bytes, **options: Any) -> list[bytes]:
        messages[own.number] += 1
        sent[own.number] = payload
        met.wait(60)
        found = [sent[0], sent[1]]
        met.wait(60)
        return found

    def due(self: Alike, *args: Any) -> None:
        of_class(self, *args)
        self._is_due = True

    def called(number: int, call: Callable[[], Any]) -> Any:
        own.number = number
        try:
            return call()
        except InstancesDifferError as error:
            return str(error)
        except BaseException:
            met.abort()
            raise

    def both(*calls: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(called, (0, 1), calls)], messages

    monkeypatch.setattr(board, "gather", gather)
    monkeypatch.setattr(Alike, "__init__", due)
    return both


@pytest.mark.fast("learning rate")
@pytest.mark.parametrize("name", ["learning rate", "first weights"])
def test_unlike_instances_are_named_before_anything_is_compiled(name, two_instances):
    """Two steps in one process, each of one IPU."""
    steps = [unlike.made(1, 1, unlike.ALIKE | {name: value}) for value in unlike.UNLIKE[name][:2]]
    batches = [next(feed) for *_, feed in steps]
    before = len(compilations)
    told, _ = two_instances(
        *(lambda made=made, batch=batch: made[0](made[1], batch) for made, batch in zip(steps, batches, strict=True))
    )
    assert len(compilations) == before
    assert told[0] == told[1]
    check_said(name, told[0])
    for *_, feed in steps:
        feed.close()


@pytest.mark.slow
def test_equal_steps_exchange_one_message(two_instances):
    def train(step: Any, state: Any, feed: Any) -> int:
        with feed:
            for batch in itertools.islice(feed, 2):
                state, _ = step(state, batch)
        return int(state.step)

    steps = [unlike.made(1, 1, unlike.ALIKE) for _ in range(2)]
    assert two_instances(*(lambda made=made: train(*made) for made in steps)) == ([4, 4], [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "replicas", "ipus", "odd", "but"),
    [
        ((1, 1), 2, 1, 1, ("schedule",)),  # of one IPU
        ((2, 2), 1, 4, 0, ("weights put together",)),  # the instances hold no part in common
        ((1, 1, 1), 3, 1, 1, ("schedule",)),
    ],
)
def test_each_difference_is_named(devices, replicas, ipus, odd, but):
    names = [name for name in unlike.UNLIKE if name not in but]
    found = run_instances(unlike.refusals, list(devices), replicas=replicas, ipus=ipus, odd=odd, names=names)
    for results in found:
        assert results.pop("compiled by calls") == 0
        assert list(results) == names
        for name, said in results.items():
            assert str(said) == str(found[0][name])
            check_said(name, str(said), " 0 has" if len(devices) == 2 else "s 0 and 2 have", odd)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas", "ipus"), [((1, 1), 2, 1), ((3, 1), 2, 2)])  # or it spans both
def test_equal_instances_exchange_one_message_per_step(devices, replicas, ipus):
    first, second = run_instances(unlike.equals, devices, replicas=replicas, ipus=ipus)
    missing = str(first.pop("missing"))
    assert missing.startswith("the first update of a training step: instance 1 of 2 did not join within 1 s.")
    assert missing.endswith("popdist.init(check_programs=False) waits for none")
    for found in (first, second):
        assert {name: int(count) for name, count in found.items()} == {
            "an epoch of a feed": 1,
            "whole": 0,
            "a state that was restored": 1,
            "a state that was put together, and an own batch": 1,
            "a step of one instance": 0,
            "unlike programs that are allowed": 0,
        }


def test_a_long_line_is_cut_around_its_difference():
    first, second = around_difference(["a" * 5000 + "x" + "b" * 500, "a" * 5000 + "y" + "b" * 500])
    assert first.startswith("...a")
    assert "ax" in first
    assert "ay" in second
    assert len(first) == len(second) < 200


def test_checksums_are_of_bits_whatever_holds_them():
    """The reference is another way to read the bytes."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    trees = {"numpy": array, "jax": jnp.asarray(array), "transposed": np.ascontiguousarray(array.T).T}
    assert len(set(checksums(trees).values())) == 1
    half = jnp.ones((3,), jnp.bfloat16)
    others: dict[str, Any] = {
        "half": half,
        "one bit": jnp.asarray(np.asarray(half).view(np.uint16) ^ np.uint16(1)).view(jnp.bfloat16),
        "key": jax.random.key(0),
        "other key": jax.random.key(1),
        "scalar": 1.0,
        "empty": np.zeros((0, 2)),
    }
    assert len(set(checksums(others).values())) == len(others)
