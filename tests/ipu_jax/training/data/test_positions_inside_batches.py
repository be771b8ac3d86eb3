"""Test feeds that continue inside a batch, after some of its updates: every example once, in order, from any source.

Each example is its own number. Epochs have 23 examples, an update 2 and a batch 4 updates.
"""

import itertools

import numpy as np
import pytest

from ipu_jax import Feed, make_mesh
from support.refusals import refused
from support.streams import StatefulItems

COUNT, B, K = 23, 2, 4


SINGLE = [np.int32(n) for n in range(COUNT)]
PARTS = [np.arange(start, min(start + 3, COUNT), dtype=np.int32) for start in range(0, COUNT, 3)]
SOURCES = {
    "array": (None, lambda: np.arange(COUNT, dtype=np.int32)),
    "function of examples": ("examples", lambda: lambda epoch: iter(SINGLE)),
    "function of batches": ("batches", lambda: lambda epoch: iter(PARTS)),
    "list of batches": ("batches", lambda: PARTS),
    "stateful, of examples": ("examples", lambda: StatefulItems(SINGLE)),
    "stateful, of batches": ("batches", lambda: StatefulItems(PARTS)),
    "iterator of batches": ("batches", lambda: iter(PARTS)),
}


def feed_of(kind, remainder="updates", k=K, micro_batch=B, **more):
    items, source = SOURCES[kind]
    more |= {"shuffle": False} if items is None else {}
    options = {"items": items, "micro_batch": micro_batch, "device_iterations": k, "remainder": remainder}
    return Feed(source(), mesh=make_mesh(1, 1), epochs=2, **options, **more)


def taken(batch, updates):
    """Return the real examples of a batch's first updates."""
    numbers = np.asarray(batch.data).reshape(len(batch.is_real), -1)
    return numbers[:updates][batch.is_real.reshape(numbers.shape)[:updates]].tolist()


def expected(kind, remainder):
    epoch = list(range(COUNT - 1 if remainder == "updates" else COUNT))
    return epoch if kind.startswith("iterator") else epoch * 2


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("remainder", ["updates", "pad"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_batch_that_is_put_back_comes_again_without_its_first_updates(kind, remainder, prefetch):
    for pattern in ([1], [3], [0, 2], [1, 1, 9], [2, 9, 0, 0, 1]):
        found = []
        with feed_of(kind, remainder, prefetch=prefetch) as feed:
            for most in itertools.islice(itertools.cycle(pattern), 200):
                if kind.startswith("iterator") and feed.state()["epoch"] == 1:
                    break
                batch = next(feed, None)
                if batch is None:
                    break
                assert batch.is_real.sum() == batch.examples  # also of a batch that was put back
                made = min(most, batch.updates)
                found += taken(batch, made)
                if made < batch.updates:
                    feed.put_back(batch, made)
        assert found == expected(kind, remainder)


@pytest.mark.fast("array", "stateful, of examples")
@pytest.mark.parametrize("kind", [kind for kind in SOURCES if not kind.startswith("iterator")])
def test_another_feed_continues_after_any_update(kind):
    """Even with other batches, which cross the items and the epochs elsewhere."""
    for read, made, again in itertools.product((1, 3, 5), (0, 1, 3), (None, 1)):
        found = []
        with feed_of(kind) as feed:
            for number in range(read):
                batch = next(feed)
                made = min(made, batch.updates - 1)
                found += taken(batch, made if number == read - 1 else batch.updates)
            state = feed.state(updates=made)
            if again is not None:  # from a position that is inside a batch already
                feed.restore(state)
                batch = next(feed)
                if batch.updates == again:
                    continue
                found += taken(batch, again)
                state = feed.state(updates=again)
                feed.put_back(batch, again)
                assert feed.state() == state
        for k, micro_batch in ((K, B), (3, 1)):
            with feed_of(kind, "pad", k=k, micro_batch=micro_batch, state=state) as feed:
                rest = [n for batch in feed for n in taken(batch, len(batch.is_real))]
            # "updates" leaves out the last example of an epoch that it has completed, "pad" does not
            assert [n for n in found + rest if n != COUNT - 1] == list(range(COUNT - 1)) * 2


def test_a_stream_with_other_examples_is_refused_inside_a_batch_too():
    with feed_of("function of examples") as feed:
        for _ in range(2):
            next(feed)
        state = feed.state(updates=1)
    assert (state["position"], state["beyond"]) == (10, 2)
    other = lambda epoch: (n + np.int32(1) for n in SINGLE)
    with refused("gave other examples before", "repeats the order"):
        Feed(other, items="examples", mesh=make_mesh(1, 1), micro_batch=B, device_iterations=K, state=state)


def test_only_updates_of_the_batch_can_be_put_back():
    with feed_of("array") as feed:
        batch = next(feed)
        for updates in (-1, 4):
            with refused(f"updates={updates}", "the batch has 4", "from 0 to 3"):
                feed.put_back(batch, updates)
