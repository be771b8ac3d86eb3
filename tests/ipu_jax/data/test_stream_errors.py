"""Test what a feed says of a stream that fails, of an item unlike the first one, and of options that cannot be."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from ipu_jax import Feed, FeedTimeoutError, make_mesh
from support.harness import exactly

LOADING = [0, 2]
ONCE = "give a function of the epoch that returns a fresh iterator, such as lambda epoch: read(files)"


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed worker")]


def examples(epoch=0, count=23):
    return ({"number": k} for k in range(count))


def feed_of(source, items, **options):
    given: dict[str, Any] = {"micro_batch": 4, "prefetch": 0} | options
    return Feed(source, items=items, mesh=make_mesh(1, 1), **given)


def real(batch):
    return np.asarray(batch.data["number"])[batch.is_real].tolist()


# sources that fail


@pytest.mark.parametrize("prefetch", LOADING)
def test_what_a_stream_raises_comes_in_its_turn_and_the_batch_can_be_had_again(prefetch):
    broken = [True]

    def failing(epoch):
        for k in range(12):
            if k == 9 and broken:
                raise OSError("the disk is gone")
            yield {"number": k}

    with feed_of(failing, "examples", prefetch=prefetch, epochs=1) as feed:
        assert [real(next(feed)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(OSError, match="the disk is gone"):
            next(feed)
        broken.clear()
        assert [real(batch) for batch in feed] == [[8, 9, 10, 11]]


def test_a_stream_that_is_stuck_is_said_to_be():
    may_go_on = threading.Event()

    def stuck(epoch):
        yield from examples(epoch, 4)
        may_go_on.wait(60)
        yield from examples(epoch, 4)

    with feed_of(stuck, "examples", prefetch=1, timeout=0.2, epochs=1) as feed:
        assert real(next(feed)) == [0, 1, 2, 3]
        with pytest.raises(FeedTimeoutError, match=r"worker 0 has been at the batch from example 4 of epoch 0 on for"):
            next(feed)
        may_go_on.set()
        assert real(next(feed)) == [0, 1, 2, 3]


WHERE = {"examples": "example 9 of epoch 0", "batches": "the batch from example 8 of epoch 0 on"}


@pytest.mark.parametrize("prefetch", LOADING)
@pytest.mark.parametrize(
    ("items", "change", "message"),
    [
        ("examples", {"x": None}, "lacks example['x'], which the first example has: give all alike"),
        ("examples", {"mask": 1}, "has example['mask'], which the first example lacks: give all alike"),
        (
            "examples",
            {"x": np.zeros(4)},
            "has float64 (4,) at example['x'], and the first example float32 (3,): give all alike",
        ),
        (
            "examples",
            {"label": 1.5},
            "has float64 () at example['label'], and the first example int32 (): give all alike",
        ),
        (
            "examples",
            {"label": 2**40},
            "has 1099511627776 at example['label'], which int32 cannot hold: set jax_enable_x64, or give smaller "
            "numbers",
        ),
        (
            "examples",
            {"label": "cat"},
            "has str at example['label']: IPUs hold numbers and bools only, so leave it out, or turn it into numbers",
        ),
        (
            "batches",
            {"label": [1, 2, 3]},
            "has arrays of different lengths, 3 at example['label'], 2 at example['x']: give a row of each for every "
            "example",
        ),
        (
            "batches",
            {"x": np.zeros((2, 4))},
            "has float64 (4,) at example['x'], and the first example float32 (3,): give all alike",
        ),
    ],
)
def test_an_item_unlike_the_first_is_named_with_its_number_and_leaf(items, change, message, prefetch):
    def changing(epoch):
        for k in range(12 if items == "examples" else 6):
            good = {"label": k, "x": np.zeros(3)} if items == "examples" else {"label": [k, k], "x": np.zeros((2, 3))}
            is_bad = k == (9 if items == "examples" else 4)
            yield good | change if is_bad else good

    with feed_of(changing, items, prefetch=prefetch) as feed:
        for _ in range(2):
            next(feed)
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole message is compared)
            next(feed)
        assert str(refused.value) == f"{WHERE[items]} {message}"


@pytest.mark.parametrize(
    ("items", "item", "message"),
    [
        ("examples", {}, "example 0 of epoch 0 has no arrays: give a dict, a tuple or an array of numbers"),
        (
            "batches",
            {"x": 3},
            "the batch from example 0 of epoch 0 on has one int64 at example['x'], without a dim of examples: give a "
            "row per example, or items='examples' if each item is one",
        ),
    ],
)
def test_a_first_item_that_is_none_is_refused(items, item, message):
    with pytest.raises(ValueError, match=exactly(message)):
        feed_of(lambda epoch: iter([item]), items)


STREAM = "the source, a function, gives one item after the other"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            examples,
            {"shuffle": True},
            f"shuffle=True, but {STREAM}: let the source shuffle, or give one with __len__ and __getitem__",
        ),
        (
            examples,
            {"seed": 3},
            f"seed=3, but {STREAM}: let the source shuffle, or give one with __len__ and __getitem__",
        ),
        (
            examples,
            {"workers": 2, "prefetch": 2},
            f"workers=2, but {STREAM}: use workers=1, and let the source have workers of its own",
        ),
        (
            examples,
            {"remainder": "wrap"},
            f"remainder='wrap', but {STREAM}, so the first ones are gone: use 'drop', 'updates' or 'pad'",
        ),
        (
            examples,
            {"items": "example"},
            "items='example' is unknown: did you mean 'examples'? Choose one of 'examples', 'batches'",
        ),
        (
            examples,
            {"micro_batch": 24},
            "micro_batch=24 takes 24 examples for a batch, but there are 23: lower one of "
            "them, or fill up with remainder='pad'",
        ),
        (lambda: examples(), {}, f"the source <lambda>() does not take the number of an epoch: {ONCE}"),
        (lambda epoch: 7, {}, f"the source's function returned a value of type int: {ONCE}"),
        (lambda epoch: iter(()), {}, "epoch 0 of the source has no examples: give at least one"),
        (7, {}, "the source is of type int, not one item after the other: give an iterable"),
        ({"x": np.zeros(3)}, {}, "the source is of type dict, not one item after the other: leave items out"),
        (examples, {"state": {"epoch": 0}}, "state={'epoch': 0} is not one of a stream: give what state() returned"),
        (examples, {"state": 7}, "state=7 is not one of a stream: give what state() returned"),
    ],
    ids=itertools.count(),
)
def test_what_cannot_be_is_refused_in_one_line(source, options, message):
    with pytest.raises(ValueError) as refused, feed_of(source, **({"items": "examples"} | options)) as feed:  # noqa: PT011
        next(feed)
    assert str(refused.value) == message
