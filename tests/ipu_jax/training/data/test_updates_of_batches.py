"""Test feeds that continue inside a batch, after some of its updates, and how many updates an epoch makes.

Every example comes once, in order, from any source.

Each example is its own number. Epochs have 23 examples, an update 2 and a batch 4 updates.
"""

import itertools
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, TrainOptions, make_mesh, make_train_step
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


# how many updates an epoch makes: by default a feed says which are left out, and "updates" makes all of them

# examples, B, M, R, K -> what an epoch leaves out by default: updates, of how many, and examples; worked out by hand
LEFT_OUT = [
    ((64, 1, 1, 1, 5), (4, 64, 4)),
    ((512, 8, 2, 1, 5), (2, 32, 32)),
    ((512, 2, 2, 4, 3), (2, 32, 32)),
    ((23, 2, 1, 2, 2), (1, 5, 7)),
    ((101, 3, 2, 2, 3), (2, 8, 29)),
    ((100, 8, 2, 1, 1), None),  # no whole update is left out, but 4 examples
    ((39, 2, 2, 2, 2), None),
    ((48, 2, 2, 2, 3), None),
    ((55, 2, 2, 2, 3), None),
]


def message(left_out: Any, examples: int, iterations: int) -> str:
    updates, of_updates, left = left_out
    counts = rf"{updates} of {of_updates} updates \({left} of {examples} examples\)"
    return rf"{counts}, .*device_iterations={iterations}: give remainder='updates' .* remainder='drop'"


@pytest.mark.parametrize(("sizes", "left_out"), LEFT_OUT)
def test_a_feed_says_once_which_updates_its_default_leaves_out(sizes, left_out):
    count, micro_batch, m, replicas, iterations = sizes
    options = {"micro_batch": micro_batch, "gradient_accumulation": m, "device_iterations": iterations, "prefetch": 0}
    make = lambda **more: Feed({"n": np.arange(count)}, mesh=make_mesh(replicas, 1), epochs=1, **options, **more)
    if left_out is None:
        feed = make()
    else:
        with pytest.warns(UserWarning, match=message(left_out, count, iterations)) as caught:
            feed = make()
        assert [warning.filename for warning in caught] == [__file__]
    made = sum(batch.updates for batch in feed)
    assert made == sum(batch.updates for batch in make(remainder="drop"))
    possible = count // (micro_batch * m * replicas)
    assert made == possible - (left_out[0] if left_out else 0)
    assert sum(batch.updates for batch in make(remainder="updates")) == possible
    assert (make(remainder="updates").updates_per_epoch, feed.updates_per_epoch) == (possible, made)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_says_so_at_the_end_of_an_epoch(prefetch):
    def stream(epoch):
        return ({"n": n} for n in range(23))

    options: dict[str, Any] = {"items": "examples", "mesh": make_mesh(2, 1), "micro_batch": 2, "device_iterations": 2}
    with Feed(stream, epochs=1, prefetch=prefetch, **options) as feed:
        with pytest.warns(UserWarning, match=message((1, 5, 7), 23, 2)) as caught:
            batches = list(feed)
        assert (sum(batch.updates for batch in batches), len(caught)) == (4, 1)
    # a shorter batch begins behind those that were read, so that less is left over than the whole epoch would leave
    of_one: dict[str, Any] = {**options, "device_iterations": 1, "remainder": "drop"}
    with Feed(stream, epochs=2, prefetch=prefetch, **of_one) as feed:
        for _ in range(3):
            next(feed)
        state = feed.state()
    with warnings.catch_warnings(), Feed(stream, epochs=1, prefetch=prefetch, state=state, **options) as feed:
        warnings.simplefilter("error")
        assert sum(batch.updates for batch in feed) == 2


def test_filled_up_updates_are_not_in_the_data_and_a_step_does_not_train_on_them():
    """6 updates in calls of 4: the second batch has 2 of them. Weights would be drawn to 0 by rows of zeros."""
    loss_fn = lambda w, rows: jnp.mean((rows - w) ** 2)
    step = make_train_step(loss_fn, optax.sgd(0.25), TrainOptions(device_iterations=4, donate=False))
    source = np.ones((12, 3), np.float32)
    with Feed(source, step=step, micro_batch=2) as feed:
        state = step.init(jnp.zeros(3))
        whole, incomplete = list(feed.epoch())
        state, _ = step(state, whole.data)
        after_six, _ = step(state, incomplete)
        with pytest.raises(ValueError, match=r"shape \(2, 1, 2, 3\): .* give a batch of a Feed itself"):
            step(state, incomplete.data)
        with pytest.raises(ValueError, match=r"device_iterations=4; give a batch of a Feed itself"):
            step.loss(state, incomplete.data)
        loss = step.loss(state, incomplete)
    assert (incomplete.updates, incomplete.data.shape, incomplete.arrays.shape) == (2, (2, 1, 2, 3), (4, 1, 2, 3))
    assert incomplete.is_real.shape == (2, 1, 2)
    # w' = w + 0.5 (1 - w): the distance to 1 is halved in each update, per element a third of the gradient
    w = 1 - (1 - 0.5 / 3) ** np.arange(7)
    np.testing.assert_allclose(after_six.params, np.full(3, w[6]), rtol=1e-5)
    np.testing.assert_allclose(loss, (1 - w[4]) ** 2, rtol=1e-5)
