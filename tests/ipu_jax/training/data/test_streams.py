"""Test feeds of streams: batches against slices of plain numbers, whatever the sizes of the stream's own batches.

Example k of epoch e holds the number 100 e + k and a vector of it, so every expected batch is a slice of a range.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from ipu_jax import Feed, make_mesh
from support.refusals import refused
from support.streams import StatefulItems

N = 23
SIZES = (1, 5, 0, 2, 9, 6)  # of a loader's batches: 23 examples in all
LOADING = [0, 2]


def example(number):
    return {"number": number, "vector": np.full(3, number, np.float64), "list": [number, -number]}


def examples(epoch=0, count=N):
    return (example(100 * epoch + k) for k in range(count))


def batches(epoch=0, sizes=SIZES):
    first = 100 * epoch
    for size in sizes:
        numbers = np.arange(first, first + size)
        yield {
            "number": numbers.tolist() if size else np.zeros(0, np.int64),
            "vector": np.repeat(numbers[:, None], 3, 1).astype(np.float64),
            "list": np.stack([numbers, -numbers], 1),
        }
        first += size


class Loader:
    """An iterable that begins again each time, with the epoch that it was told."""

    def __init__(self, read):
        self._read, self._epoch = read, 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __iter__(self):
        return self._read(self._epoch)


READ = {"examples": examples, "batches": batches}


def feed_of(source, items, replicas=1, **options):
    given: dict[str, Any] = {"micro_batch": 4, "prefetch": 0} | options
    return Feed(source, items=items, mesh=make_mesh(replicas, 1), **given)


def read(feed):
    return [(batch.epoch, real(batch), batch.updates) for batch in feed]


def real(batch):
    return np.asarray(batch.data["number"])[batch.is_real].tolist()


# the contents of a batch


@pytest.mark.parametrize("prefetch", LOADING)
@pytest.mark.parametrize("items", ["examples", "batches"])
@pytest.mark.parametrize("kind", ["function", "iterable"])
def test_batches_are_slices_whatever_the_items_are(kind, items, prefetch):
    source = READ[items] if kind == "function" else Loader(READ[items])
    sizes = {"replicas": 2, "micro_batch": 2, "device_iterations": 2}
    options: dict[str, Any] = {**sizes, "epochs": 2, "prefetch": prefetch, "remainder": "drop"}
    with feed_of(source, items, **options) as feed:
        assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in feed.like.items()} == {
            "number": ((2, 2, 1, 2), "int32"),
            "vector": ((2, 2, 1, 2, 3), "float32"),
            "list": ((2, 2, 1, 2, 2), "int32"),
        }
        found = list(feed)
    assert [batch.epoch for batch in found] == [0, 0, 1, 1]
    for batch, first in zip(found, (0, 8, 100, 108), strict=True):
        numbers = np.arange(first, first + 8).reshape(2, 2, 1, 2)
        np.testing.assert_array_equal(batch.data["number"], numbers)
        np.testing.assert_array_equal(batch.data["vector"], np.repeat(numbers[..., None], 3, -1))
        np.testing.assert_array_equal(batch.data["list"], np.stack([numbers, -numbers], -1))
        assert (batch.examples, batch.updates, batch.nbytes) == (8, 2, 8 * 4 * (1 + 3 + 2))
        assert batch.data["number"].sharding == feed.like["number"].sharding


@pytest.mark.parametrize("items", ["examples", "batches"])
def test_the_end_of_an_epoch_is_dropped_kept_by_updates_or_filled_up(items):
    def last(remainder, **options):
        with feed_of(READ[items], items, device_iterations=2, epochs=1, remainder=remainder, **options) as feed:
            return list(feed)[-1], feed.state()["epoch"]

    dropped, epoch = last("drop")
    assert (real(dropped), epoch) == (list(range(8, 16)), 1)
    of_updates, epoch = last("updates", fill=-1)
    assert of_updates.arrays["number"].reshape(-1).tolist() == [*range(16, 20), -1, -1, -1, -1]
    assert real(of_updates) == of_updates.data["number"].reshape(-1).tolist() == [*range(16, 20)]
    assert (of_updates.updates, of_updates.examples, epoch) == (1, 4, 1)
    padded, epoch = last("pad", fill={"number": -1, "vector": 0.5, "list": 7})
    assert padded.data["number"].reshape(-1).tolist() == [*range(16, 23), -1]
    assert padded.data["vector"].reshape(-1, 3)[-1].tolist() == [0.5] * 3
    assert (padded.updates, padded.examples, padded.is_real.sum(), epoch) == (2, 7, 7, 1)


def test_an_epoch_ends_and_the_next_one_begins():
    with feed_of(examples, "examples", micro_batch=10, prefetch=2) as feed:
        assert [[real(batch)[0] for batch in feed.epoch()] for _ in range(3)] == [[0, 10], [100, 110], [200, 210]]
        feed.seek(1)
        assert real(next(feed))[0] == 100
        with refused("does not say how many batches", "feed.epoch()", error=TypeError):
            _ = len(feed)


@pytest.mark.parametrize("instances", [1, 2, 4])
@pytest.mark.parametrize("items", ["examples", "batches"])
def test_each_instance_keeps_the_rows_of_its_replicas(items, instances):
    options = {"micro_batch": 2, "device_iterations": 2, "remainder": "pad", "fill": -1, "epochs": 1}
    parts = [
        [
            np.asarray(batch.data["number"]).reshape(2, -1, 2)
            for batch in feed_of(
                READ[items], items, replicas=4 // instances, instances=instances, instance=k, **options
            )
        ]
        for k in range(instances)
    ]
    for first, *of_batch in zip((0, 16), *parts, strict=True):
        wanted = np.arange(first, first + 16).reshape(2, 4, 2)
        np.testing.assert_array_equal(np.concatenate(of_batch, 1), np.where(wanted < N, wanted, -1))


def test_a_buffer_that_is_used_again_changes_nothing_that_was_read():
    def reusing(epoch):
        buffer = np.zeros(2)
        for k in range(8):
            buffer[:] = k
            yield {"number": buffer[0], "x": buffer}

    with feed_of(reusing, "examples", epochs=1) as feed:
        first, second = list(feed)
    assert first.data["x"][0, :, 1].tolist() == [0, 1, 2, 3]
    assert second.data["x"][0, :, 1].tolist() == [4, 5, 6, 7]


# continuing


@pytest.mark.parametrize("prefetch", LOADING)
@pytest.mark.parametrize("items", ["examples", "batches"])
def test_a_stream_goes_on_from_its_state_with_the_very_next_batch(items, prefetch):
    options = {"remainder": "pad", "epochs": 2}
    with feed_of(READ[items], items, **options) as feed:
        expected = read(feed)
    assert [len(numbers) for _, numbers, _ in expected] == [4, 4, 4, 4, 4, 3] * 2
    for done in (0, 1, 5, 6, 8, 12):
        with feed_of(Loader(READ[items]), items, **options, prefetch=prefetch) as feed:
            for _ in range(done):
                next(feed)
            state = feed.state()
        assert (state["epoch"], state["position"]) == (done // 6, done % 6 * 4)
        assert {type(value) for value in state.values()} == {int}
        with feed_of(READ[items], items, **options, prefetch=prefetch, state=state) as feed:
            assert feed.state() == state
            assert read(feed) == expected[done:]


def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next_one():
    with feed_of(examples, "examples", micro_batch=23) as feed:
        next(feed)
        state = feed.state()
    assert (state["epoch"], state["position"]) == (0, 23)
    with feed_of(examples, "examples", micro_batch=5, state=state) as feed:
        assert real(next(feed)) == [100, 101, 102, 103, 104]


class Stateful:
    """A loader that can say where it is, and counts what it reads."""

    def __init__(self, sizes=None):
        self._sizes, self._next, self.reads = sizes, 0, 0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]

    def __iter__(self):
        every = list(examples() if self._sizes is None else batches(sizes=self._sizes))
        start, self._next = self._next, 0
        for self._next, item in enumerate(every[start:], start + 1):
            self.reads += 1
            yield item
        self._next = 0


@pytest.mark.parametrize("prefetch", LOADING)
@pytest.mark.parametrize("sizes", [None, (5, 5, 0, 2, 7, 4), (23,)])
def test_a_source_that_says_where_it_is_is_not_read_again(sizes, prefetch):
    items, options = "examples" if sizes is None else "batches", {"epochs": 1, "prefetch": prefetch, "remainder": "pad"}
    for done in range(1, 6):
        with feed_of(Stateful(sizes), items, **options) as feed:
            for _ in range(done):
                next(feed)
            state = feed.state()
        source = Stateful(sizes)
        with feed_of(source, items, **options, state=state) as feed:
            assert feed.state() == state
            assert [numbers for _, numbers, _ in read(feed)] == [
                list(range(first, min(first + 4, N))) for first in range(4 * done, N, 4)
            ]
        # the item in which the position is, and those after it
        ends = range(1, N + 1) if sizes is None else itertools.accumulate(sizes)
        assert source.reads == sum(end > 4 * done for end in ends)


class Numbers(StatefulItems):
    """Does not begin again by itself."""

    def __init__(self):
        super().__init__(list(examples()))

    def __next__(self):
        if self.at == N:
            raise StopIteration
        return super().__next__()


def test_an_iterator_with_a_state_can_be_returned_to():
    with feed_of(Numbers(), "examples", prefetch=2, micro_batch=10) as feed:
        assert [real(batch)[0] for _ in range(2) for batch in feed.epoch()] == [0, 10, 0, 10]
        next(feed)
        state = feed.state()
    with feed_of(Numbers(), "examples", state=state) as feed:
        assert real(next(feed)) == [10, 11, 12, 13]


@pytest.mark.parametrize("prefetch", LOADING)
def test_a_generator_is_one_epoch(prefetch):
    with feed_of(examples(), "examples", prefetch=prefetch, micro_batch=10) as feed:
        assert [real(batch)[0] for batch in feed.epoch()] == [0, 10]
        with refused("a generator cannot be repeated", "example 0 of epoch 1", "a fresh iterator"):
            next(feed)
        with refused("a generator cannot be repeated", "example 0 of epoch 0", "a fresh iterator"):
            feed.seek(0)
    with feed_of(examples(), "examples", prefetch=prefetch, micro_batch=10, epochs=1) as feed:
        assert len(list(feed)) == 2


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
