"""Test feeds of examples of unlike lengths: which examples share a batch, their padding, and what is refused.

The expected batches come from a plain loop over the epoch's permutation, in which each bucket collects its examples.
"""

from typing import Any, cast

import numpy as np
import pytest

from ipu_jax import Feed, make_mesh
from ipu_jax.io import Buckets
from support import across_feeds
from support.programs import run_instances
from support.refusals import refusals, refused

COUNT, SIZES = 101, (4, 8, 16)
LENGTHS = np.random.default_rng(5).integers(0, 17, COUNT)
EXAMPLES = [{"tokens": np.arange(1, n + 1) + 100 * k, "id": k} for k, n in enumerate(LENGTHS)]
FILL = {"tokens": -1, "id": -2}


def feed_of(source: Any = EXAMPLES, buckets: Any = SIZES, **options: Any) -> Feed:
    given = {"items": "examples", "mesh": make_mesh(1, 1), "micro_batch": 4, "fill": FILL, "prefetch": 0, "seed": 3}
    return Feed(source, buckets=buckets, **given | options)


def by_hand(epoch: int, per_batch: int, kept: int) -> list[list[int]]:
    """Return the numbers of the examples of each batch of an epoch that keeps this many."""
    order = np.arange(COUNT)
    np.random.default_rng([3, epoch]).shuffle(order)
    size_of = lambda k: next(size for size in SIZES if size >= LENGTHS[k])
    pending: dict[int, list[tuple[int, int]]] = {size: [] for size in SIZES}
    done: list[list[tuple[int, int]]] = []
    for place, k in enumerate(order[:kept].tolist()):
        own = pending[size_of(k)]
        own.append((place, k))
        if len(own) == per_batch:
            done.append(own[:])
            own.clear()
    left = [one for size in reversed(SIZES) for one in pending[size]]
    shared = [left[at : at + per_batch] for at in range(0, len(left), per_batch)]
    last = [shared.pop()] if shared and len(shared[-1]) < per_batch else []
    return [[k for _, k in batch] for batch in [*sorted(done + shared, key=max), *last]]


def check_rows(batch: Any, among: list[int]) -> list[int]:
    """Check the padding of a batch, whose longest example is among these, and return its real examples."""
    tokens, ids = np.asarray(batch.arrays["tokens"]), np.asarray(batch.arrays["id"]).reshape(-1)
    size = next(size for size in SIZES if size >= LENGTHS[among].max())
    assert tokens.shape[-1] == size
    for row, k in zip(tokens.reshape(-1, size), ids, strict=True):
        real = EXAMPLES[k]["tokens"] if k >= 0 else []
        assert row.tolist() == [*real, *[-1] * (size - len(real))]
    return [k for k in ids.tolist() if k >= 0]


@pytest.mark.parametrize(
    ("remainder", "k", "kept"), [("drop", 1, 96), ("updates", 3, 96), ("pad", 1, 101), ("pad", 3, 101)]
)
def test_each_bucket_collects_its_own_examples_and_the_rest_of_an_epoch_shares_batches(remainder, k, kept):
    with feed_of(remainder=remainder, device_iterations=k, micro_batch=8, prefetch=2, workers=2) as feed:
        for epoch in range(2):
            wanted = by_hand(epoch, 8 * k, kept)
            batches = list(feed.epoch())
            assert [check_rows(batch, among) for batch, among in zip(batches, wanted, strict=True)] == wanted
            assert len(batches) == len(feed)
        assert feed.like["tokens"].shape[-1] == SIZES[-1]


def test_batches_that_wrap_hold_the_longest_of_the_examples_that_come_again():
    source = [{"x": np.ones(n)} for n in (9, 9, 1, 1, 2)]
    batches = list(feed_of(source, fill=0, remainder="wrap", micro_batch=2, shuffle=False).epoch())
    assert [batch.data["x"].shape[-1] for batch in batches] == [16, 4, 16]
    assert batches[-1].data["x"].sum(axis=-1).tolist() == [[2, 9]]


@pytest.mark.parametrize("instances", [1, 2])
def test_all_instances_have_the_buckets_of_the_whole_batch(instances):
    mesh = make_mesh(4 // instances, 1)
    feeds = [feed_of(mesh=mesh, micro_batch=2, instances=instances, instance=i, epochs=1) for i in range(instances)]
    for parts, among in zip(zip(*feeds, strict=True), by_hand(0, 8, 96), strict=True):
        assert [k for part in parts for k in check_rows(part, among)] == among


@pytest.mark.parametrize("options", [{"prefetch": 3, "workers": 2}, {"micro_batch": 2, "gradient_accumulation": 2}])
@pytest.mark.parametrize("k", [1, 3])
def test_another_feed_continues_after_any_update_with_the_same_updates(k, options):
    def updates(feed, most=None):
        """Return the updates of the epoch that are left: the examples and the bucket of each."""
        found = []
        for batch in feed.epoch():
            ids = np.asarray(batch.arrays["id"]).reshape(k, -1)[: batch.updates].tolist()
            found += [(one, np.shape(batch.arrays["tokens"])[-1]) for one in ids]
            if most is not None and len(found) > most:
                feed.put_back(batch, batch.updates - (len(found) - most))
                break
        return found[:most]

    given: Any = {"device_iterations": k, "remainder": "updates"}
    whole = updates(feed_of(**given))
    for most in (1, 5, 9):
        first = feed_of(**given)
        assert updates(first, most) == whole[:most]
        with feed_of(state=first.state(), **given | options) as then:
            assert updates(first) == updates(then) == whole[most:]


def test_a_state_inside_an_epoch_belongs_to_its_buckets_and_batches():
    feed = feed_of()
    start = feed.state()
    next(feed)
    for other, name in ((feed_of(buckets=(4, 16)), "bucket_checksum"), (feed_of(micro_batch=2), "examples_per_batch")):
        with refused(f"state is of {name}=", "lost or read twice", "only at the start of an epoch"):
            other.restore(feed.state())
        other.restore(start)
    plain = Feed({"x": np.arange(COUNT)}, mesh=make_mesh(1, 1), micro_batch=4, seed=3)
    feed.restore(plain.state())
    with refused("state is of examples_per_batch=4, but the feed has examples_per_batch=0", "start of an epoch"):
        next(feed)
        plain.restore(feed.state())


def test_lengths_that_are_given_need_no_reading():
    class Counted(list[Any]):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    source = Counted(EXAMPLES)
    feed, read = feed_of(source, Buckets(SIZES, lengths=LENGTHS)), feed_of()
    assert source.reads == 1
    assert [check_rows(batch, among) for batch, among in zip(feed.epoch(), by_hand(0, 4, 100), strict=True)]
    assert feed.state() == (list(read.epoch()) and read.state())


def test_longer_examples_are_truncated_if_that_is_said():
    feed = feed_of(
        [{"tokens": [1, 2, 3, 4, 5]}, {"tokens": [6]}], Buckets((2, 4), truncate=True), micro_batch=2, fill=0
    )
    assert sorted(next(feed).data["tokens"][0].tolist()) == [[1, 2, 3, 4], [6, 0, 0, 0]]


def test_each_leaf_has_its_dim_and_its_filling():
    examples = [{"frames": np.ones((2, n)), "target": np.ones(m), "image": np.ones(9)} for n, m in ((3, 2), (1, 7))]
    dims, fill = {"frames": 1, "target": 0, "image": None}, {"frames": -1, "target": -2, "image": -3}
    data = next(feed_of(examples, Buckets((4, 8, 16), dim=dims), micro_batch=2, fill=fill, shuffle=False)).data
    assert {name: leaf.shape[2:] for name, leaf in data.items()} == {"frames": (2, 8), "target": (8,), "image": (9,)}
    assert data["frames"][0, 0, 0].tolist() == [1, *[-1] * 7]
    assert data["target"][0, 1].tolist() == [1, 1, *[-2] * 6]


@pytest.mark.parametrize("items", ["examples", "batches"])
def test_a_stream_is_padded_in_its_own_order(items):
    """A loader's batches are as long as their own longest example."""
    one = {
        "examples": lambda k: EXAMPLES[k],
        "batches": lambda k: {n: np.stack([x] * 2) for n, x in EXAMPLES[k].items()},
    }
    stream = lambda epoch: map(one[items], range(16))
    feed = feed_of(stream, items=items, seed=0)
    for at in range(4):
        among = [k if items == "examples" else k // 2 for k in range(4 * at, 4 * at + 4)]
        state = feed.state()
        batch = next(feed)
        assert check_rows(batch, among) == among
        assert np.asarray(next(feed_of(stream, items=items, seed=0, state=state)).data["id"]).ravel().tolist() == among


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ipus"), [(4, 1), (2, 2)])
def test_two_processes_train_with_the_same_buckets_as_one(replicas, ipus):
    alone = across_feeds.feed_in_buckets(replicas, ipus)
    assert {*alone["sizes"]} == {4, 8, 16}
    for found in run_instances(across_feeds.feed_in_buckets, [2, 2], replicas=replicas, ipus=ipus):
        assert found["sizes"].tolist() == alone["sizes"].tolist()
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5)


LONG = [{"tokens": [1]}, {"tokens": [1, 2, 3]}]
MEND = "give a larger one, leave the example out, or say Buckets(..., truncate=True)"
DIM = "give the dim of the length"


@refusals(
    *(
        (lambda bad=bad: feed_of(buckets=bad), f"buckets={bad!r}", "are not sizes", "such as (128, 256, 512)")
        for bad in ((), (0, 8), (8, 8), (16, 8), (8.0,), 8, "8")
    ),
    (lambda: Buckets((8,), truncate=cast(Any, "no")), "truncate='no'", "not a bool", "give True or False"),
    (lambda: feed_of({"x": np.zeros((9, 3))}, items=None), "buckets=(4, 8, 16)", "one length", "items='examples'"),
    (lambda: feed_of(LONG, (1, 2), fill=0), "example 1 has length 3 at example['tokens']", "bucket is 2", MEND),
    (lambda: feed_of(LONG, Buckets((2,), lengths=[1, 3]), fill=0), "example 1 has length 3 in lengths", "is 2", MEND),
    (lambda: feed_of(LONG, Buckets((2,), lengths=[1]), fill=0), "int64 (1,)", "2 examples", "at least 0 for each"),
    (lambda: feed_of(buckets=Buckets(SIZES, dim=1)), "dim=1 is a dim of no leaf", "no length", DIM),
    (lambda: feed_of(buckets=Buckets(SIZES, dim={"id": 0, "tokens": 0})), "dim=0 at example['id']", "dim of ()", DIM),
    (lambda: feed_of(buckets=Buckets(SIZES, dim=[0])), "dim=[0]", "neither an int nor a pytree", DIM),
    (
        lambda: feed_of([{"x": [1, 2], "y": [1]}], fill=0, micro_batch=1),
        "example 0 has several lengths, 2 at example['x'], 1 at example['y']",
        DIM,
    ),
    (
        lambda: feed_of(lambda epoch: iter(LONG), (2,), fill=0, seed=0, micro_batch=2).epoch().__next__(),
        "has length 3",
        MEND,
    ),
    (
        lambda: feed_of(lambda epoch: iter(LONG), Buckets((4,), lengths=[1, 3]), fill=0, seed=0),
        "lengths= is given",
        "leave it out",
    ),
    (
        lambda: next(feed_of(LONG, Buckets((2, 4), lengths=[1, 1]), fill=0, micro_batch=2)),
        "example 1 has length 3, and its bucket is 2",
        "give Buckets(lengths=...)",
    ),
    (
        lambda: next(feed_of([{"x": np.zeros((1, 2))}, {"x": np.zeros((3, 1))}], micro_batch=2, fill=0)),
        "example 1 has float64 (3, 1) at example['x']",
        "give all alike",
    ),
)
def test_what_no_bucket_holds_is_refused(call, holds):
    with refused(*holds):
        call()
