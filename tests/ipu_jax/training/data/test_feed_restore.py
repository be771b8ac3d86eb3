"""Test a feed that continues from the very end of an epoch, or of all data, against batches worked out by hand.

Each example is its own number. The expected batches are slices of each epoch's permutation, made without a feed:

    26 examples, an update of 2 x 2 (replicas x micro-batch), a batch of 2 updates: 8 examples

        "drop"      8 8 8                3 batches, 2 examples left out
        "updates"   8 8 8                6 updates are 3 batches, 2 examples left out
        "pad"       8 8 8 2              and 6 that are not real
        "wrap"      8 8 8 2              and the epoch's first 6 again
"""

import itertools

import numpy as np
import pytest

from ipu_jax import Feed, make_mesh

EPOCHS = 2


def source(count):
    return {"number": np.arange(count, dtype=np.int32)}


def by_hand(count, remainder, *, per_update, per_batch, shuffle):
    """Return (epoch, real examples, updates that contain one) for every batch of two epochs."""
    batches = []
    for epoch in range(EPOCHS):
        order = np.arange(count)
        if shuffle:
            np.random.default_rng([7, epoch]).shuffle(order)
        whole = {"drop": per_batch, "updates": per_update, "pad": 1, "wrap": 1}[remainder]
        order = order[: count // whole * whole].tolist()
        for start in range(0, len(order), per_batch):
            real = order[start : start + per_batch]
            batches.append((epoch, real, -(-len(real) // per_update)))
    return batches


def read(feed):
    batches = itertools.islice(feed, 60)  # a feed that does not end would be a hang
    return [(batch.epoch, np.asarray(batch.data["number"])[batch.is_real].tolist(), batch.updates) for batch in batches]


CASES = [
    # count, remainder, replicas, micro-batches, device iterations, batches per epoch
    (26, "drop", 2, 1, 2, 3),
    (26, "updates", 2, 1, 2, 3),
    (28, "updates", 2, 1, 2, 4),
    (26, "pad", 2, 1, 2, 4),
    (26, "wrap", 2, 1, 2, 4),
    (24, "drop", 2, 3, 1, 2),
    (24, "pad", 1, 1, 3, 4),
    (25, "drop", 1, 1, 1, 12),
    (5, "pad", 4, 2, 2, 1),
]


# prefetch and workers: by the caller, by one worker, by several
@pytest.mark.parametrize(("shuffle", "prefetch", "workers"), [(True, 0, 1), (False, 2, 1), (True, 4, 3)])
@pytest.mark.parametrize(("count", "remainder", "replicas", "m", "iterations", "per_epoch"), CASES)
def test_a_feed_goes_on_from_the_end_of_an_epoch_and_of_all_data(
    count, remainder, replicas, m, iterations, per_epoch, shuffle, prefetch, workers
):
    sizes = {"micro_batch": 2, "gradient_accumulation": m, "device_iterations": iterations, "remainder": remainder}
    loading = {"mesh": make_mesh(replicas, 1), "shuffle": shuffle, "seed": 7, "prefetch": prefetch, "workers": workers}
    options = sizes | loading
    per_update = 2 * m * replicas
    expected = by_hand(count, remainder, per_update=per_update, per_batch=per_update * iterations, shuffle=shuffle)
    assert len(expected) == EPOCHS * per_epoch
    with Feed(source(count), **options, epochs=EPOCHS) as feed:
        assert len(feed) == per_epoch
        states = [feed.state()]
        for _ in itertools.islice(feed, 60):
            states.append(feed.state())
        assert [*feed, *feed.epoch()] == []
    for done in {0, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch - 1, 2 * per_epoch}:
        state = states[done]
        epoch, batches = divmod(done, per_epoch)
        position = batches * per_update * iterations
        assert state == {"epoch": epoch, "position": position, "examples": count, "seed": 7, "shuffle": int(shuffle)}
        with Feed(source(count), **options, epochs=EPOCHS, state=state) as feed:
            assert feed.state() == state
            assert read(feed) == expected[done:]
        # by epochs: the rest of the current one, which is whole if none of it was read; nothing after the last
        restored = {name: np.int64(value) for name, value in state.items()}  # as a checkpoint may bring them back
        with Feed(source(count), **options, epochs=EPOCHS, state=restored) as feed:
            of_epoch = [batch for batch in expected[done:] if batch[0] == epoch]
            assert read(feed.epoch()) == of_epoch


@pytest.mark.parametrize("remainder", ["drop", "updates", "pad", "wrap"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state_behind_which_no_batch_is_left_goes_on_with_the_next_epoch(remainder, prefetch):
    """A feed of smaller batches was stopped where a larger batch does not fit any more, or at the last example."""
    order = np.arange(10)
    np.random.default_rng([0, 1]).shuffle(order)
    for position, left in ((10, 0), (9, 1)):
        state = {"epoch": 0, "position": position, "examples": 10, "seed": 0, "shuffle": 1}
        options = {"micro_batch": 2, "remainder": remainder, "prefetch": prefetch, "epochs": 2, "state": state}
        with Feed(source(10), mesh=make_mesh(2, 1), **options) as feed:
            batches = read(feed)
        last_of_first = 1 if left and remainder in ("pad", "wrap") else 0
        assert [len(real) for epoch, real, _ in batches if epoch == 0] == [left] * last_of_first
        assert batches[last_of_first] == (1, order[:4].tolist(), 1)
        assert len(batches) - last_of_first == (3 if remainder in ("pad", "wrap") else 2)


def test_a_state_of_an_epoch_after_the_last_has_nothing_left():
    state = {"epoch": 5, "position": 0, "examples": 10, "seed": 0, "shuffle": 1}
    with Feed(source(10), mesh=make_mesh(1, 1), micro_batch=2, epochs=2, state=state) as feed:
        assert list(feed) == list(feed.epoch()) == []
        assert feed.state() == state
