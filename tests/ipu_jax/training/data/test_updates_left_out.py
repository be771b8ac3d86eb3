"""Test how many updates an epoch makes: by default a feed says which are left out, and "updates" makes all of them."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, TrainOptions, make_mesh, make_train_step

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
