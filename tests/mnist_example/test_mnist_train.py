"""Test training: the images of each update, equal results in all layouts, and the error when training diverges."""

import dataclasses
import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import DynamicScale, replicate
from mnist_example import model
from mnist_example.batches import Batches
from mnist_example.data import load_mnist
from mnist_example.layouts import Mode
from mnist_example.model import init_params, make_pipeline
from mnist_example.train import Call, DivergedError, Trainer

UPDATES = 50
B, M = 8, 4
RATE = 0.03


@pytest.fixture(autouse=True, scope="module")
def small_smooth_network():
    """Train a tenth as many hidden units, which take a tenth of the time, and put silu for relu in both programs.

    Where a rounding carries the input of a relu past 0, a gradient jumps. One such jump, made on purpose in one unit
    for one image, changes a loss among the first 50 by 1e-5 to 0.1, where roundings alone change it by 5e-7. That a
    stage has its relu is tested with the model.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(jax.nn, "relu", jax.nn.silu)
    patch.setattr(model, "HIDDEN", 256)
    patch.setattr(model, "FEATURES", 128)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return MNIST's digits if the machine has them, else scikit-learn's. Random pixels could not be learned."""
    if os.environ.get("MNIST_DIR"):
        return load_mnist()
    return load_mnist(cache_dir=tmp_path_factory.mktemp("empty"), mirrors=())


@pytest.fixture(scope="module")
def batches(digits):
    """Return batches with at least 44 updates per epoch, so that an epoch ends within or after 50 updates."""
    count = UPDATES * B * M
    return Batches(digits.train_images[:count], digits.train_labels[:count], B, M, seed=5)


def make_trainer(batches, mode: Mode = "concurrent", ipus=2, *, learning_rate=0.01, repeat_count=100, **options):
    pipeline = make_pipeline(mode, ipus=ipus, gradient_accumulation=batches.gradient_accumulation)
    if batches.replicas > 1:
        pipeline = replicate(pipeline, replication_factor=batches.replicas)
    return Trainer(pipeline, batches, learning_rate=learning_rate, repeat_count=repeat_count, **options)


def train(trainer, *, updates, epoch=0):
    """Return the calls for so many updates, from the start of an epoch on."""
    calls: list[Call] = []
    state = trainer.init(init_params(0))
    while updates > 0:
        now = min(updates, trainer.batches.updates_per_epoch)
        state = trainer.run_epoch(state, epoch, updates=now, on_call=calls.append)
        updates, epoch = updates - now, epoch + 1
    return calls


def losses_of(calls):
    return np.concatenate([call.losses for call in calls])


# batches


def numbered(count, **options):
    """Return batches of images whose pixels are the image's own number."""
    images = np.broadcast_to(np.arange(count)[:, None, None], (count, 28, 28)).astype(np.uint8)
    return Batches(images, np.arange(count, dtype=np.uint8), **options)


def test_an_epoch_has_whole_updates_and_each_image_once():
    batches = numbered(100, batch_size=5, gradient_accumulation=3)
    assert batches.images_per_update == 15
    assert batches.updates_per_epoch == 6
    order = batches.of_epoch(0)
    assert order.shape == (6, 3, 5)
    assert len(np.unique(order)) == 90
    assert order.min() >= 0
    assert order.max() < 100


def test_shuffling_leaves_other_images_out_in_each_epoch():
    batches = numbered(100, batch_size=5, gradient_accumulation=3)
    first, second = (set(range(100)) - set(batches.of_epoch(epoch).flat) for epoch in (0, 1))
    assert len(first) == len(second) == 10
    assert first != second


def test_seed_and_epoch_decide_the_order():
    order = {
        (seed, epoch): numbered(100, batch_size=5, gradient_accumulation=3, seed=seed).of_epoch(epoch).tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert all(order[a] != order[b] for a in order for b in order if a != b)
    assert order[1, 1] == numbered(100, batch_size=5, gradient_accumulation=3, seed=1).of_epoch(1).tolist()


def test_without_shuffling_the_order_is_the_datas():
    batches = numbered(100, batch_size=5, gradient_accumulation=3, shuffle=False)
    for epoch in (0, 1):
        np.testing.assert_array_equal(batches.of_epoch(epoch).reshape(-1), np.arange(90))


def test_an_update_has_the_same_images_on_however_many_replicas():
    alone = numbered(100, batch_size=5, gradient_accumulation=4, seed=3)
    shared = numbered(100, batch_size=5, gradient_accumulation=2, seed=3, replicas=2)
    assert shared.of_epoch(1).shape == (5, 2, 2, 5)
    assert shared.images_per_update == alone.images_per_update
    np.testing.assert_array_equal(shared.of_epoch(1).reshape(5, 4, 5), alone.of_epoch(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas=0 is not a count: give an int of at least 1"),
        (
            {"replicas": 4},
            "batch_size=8 x gradient_accumulation=4 x replicas=4 takes 128 images for an update, but there are 100: "
            "lower one of the three",
        ),
        ({"batch_size": 0}, "batch_size=0 is not a count: give an int of at least 1"),
        ({"gradient_accumulation": -1}, "gradient_accumulation=-1 is not a count: give an int of at least 1"),
        ({"seed": -1}, "seed=-1 is negative: give one of at least 0"),
        (
            {"batch_size": 26},
            "batch_size=26 x gradient_accumulation=4 takes 104 images for an update, but there are 100: "
            "lower one of the two",
        ),
    ],
)
def test_batches_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole message is compared)
        numbered(100, **{"batch_size": 8, "gradient_accumulation": 4, **options})
    assert str(refused.value) == message


def test_images_without_a_label_each_are_refused():
    images = np.zeros((4, 28, 28), np.uint8)
    with pytest.raises(ValueError, match=r"^there are 4 images and 3 labels: give one for each$"):
        Batches(images, np.zeros(3, np.uint8), batch_size=1, gradient_accumulation=1)


# learning


def unsharded_losses(batches, optimizer, updates=UPDATES):
    """Train with an independent program: plain jax and optax on one device, gradients summed over micro-batches."""

    def micro_batch_loss(params, images, labels):
        x = images.reshape(-1, 784).astype(jnp.float32) / 255
        for layer in (params["mlp"]["hidden"], params["mlp"]["features"]):
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params["classifier"]["w"] + params["classifier"]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels.astype(jnp.int32)).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, images, labels):
        def total(params):
            losses = jax.vmap(functools.partial(micro_batch_loss, params))(images, labels)
            return losses.sum(), losses.mean()

        gradients, loss = jax.grad(total, has_aux=True)(params)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    params, losses = init_params(0), []
    state = optimizer.init(params)
    for chosen in np.concatenate([batches.of_epoch(0), batches.of_epoch(1)])[:updates]:
        params, state, loss = update(params, state, batches.images[chosen], batches.labels[chosen])
        losses.append(float(loss))
    return np.array(losses)


@pytest.fixture(scope="module")
def expected(batches):
    return unsharded_losses(batches, optax.sgd(RATE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ipus"), [("basic", 2), ("concurrent", 2), pytest.param("concurrent", 4, marks=pytest.mark.slow)]
)
def test_the_first_50_updates_agree_with_the_unsharded_program_step_by_step(mode, ipus, batches, expected):
    calls = train(make_trainer(batches, mode, ipus, learning_rate=RATE, repeat_count=20), updates=UPDATES)
    np.testing.assert_allclose(losses_of(calls), expected, rtol=1e-5)
    assert expected[-5:].mean() < 0.5 * expected[0]  # and something was learned


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus", "replicas"), [("basic", 2, 2), ("concurrent", 2, 4)])
def test_replicas_agree_with_the_unsharded_program_on_the_same_images(mode, ipus, replicas, batches, expected):
    shared = dataclasses.replace(batches, gradient_accumulation=M // replicas, replicas=replicas)
    options = {"learning_rate": RATE, "shard_optimizer": replicas > 2}
    calls = train(make_trainer(shared, mode, ipus, repeat_count=20, **options), updates=10)
    np.testing.assert_allclose(losses_of(calls), expected[:10], rtol=1e-5)


def test_an_optimizers_state_may_be_shared_by_the_replicas(batches):
    shared = dataclasses.replace(batches, gradient_accumulation=M // 2, replicas=2)
    options = {"optimizer": "adamw", "learning_rate": 0.001, "shard_optimizer": True}
    found = losses_of(train(make_trainer(shared, **options), updates=6))
    dense = unsharded_losses(batches, optax.adamw(0.001), updates=6)
    np.testing.assert_allclose(found, dense, rtol=1e-4)
    assert dense[-1] < 0.9 * dense[0]  # and something was learned


def test_in_float16_an_update_that_overflows_is_skipped_and_training_goes_on(batches):
    pipeline = make_pipeline("concurrent", gradient_accumulation=M)
    scale = DynamicScale(initial=2.0**20)  # the first gradients overflow
    precision: Any = {"precision": "16.32", "half": "float16"}
    trainer = Trainer(pipeline, batches, learning_rate=RATE, loss_scale=scale, repeat_count=5, **precision)
    told: list[Call] = []
    state = trainer.run_epoch(trainer.init(init_params(0)), 0, updates=16, on_call=told.append)
    losses = losses_of(told)
    assert state.scale is not None
    # each of them halves the scale, which grows again after a thousand good updates
    skipped = 20 - np.log2(float(state.scale.scale))
    assert 0 < skipped < 16
    assert sum(call.skipped for call in told) == skipped
    assert losses[-3:].mean() < 0.9 * losses[0]


def test_how_many_updates_a_call_makes_changes_nothing(batches):
    few = train(make_trainer(batches, repeat_count=2), updates=5)
    many = train(make_trainer(batches, repeat_count=100), updates=5)
    assert [len(call.losses) for call in few] == [2, 2, 1]
    assert [len(call.losses) for call in many] == [5]
    np.testing.assert_array_equal(losses_of(few), losses_of(many))


def test_a_call_says_how_far_training_is(batches):
    per_epoch = batches.updates_per_epoch
    calls = train(make_trainer(batches, repeat_count=3), epoch=2, updates=5)
    assert [call.updates for call in calls] == [2 * per_epoch + 3, 2 * per_epoch + 5]
    assert [call.epoch for call in calls] == [2 + 3 / per_epoch, 2 + 5 / per_epoch]


def test_training_goes_on_from_the_state(batches):
    first, second = batches.of_epoch(0)[:2].reshape(-1), batches.of_epoch(1)[:2].reshape(-1)
    chosen = np.concatenate([first, second])
    images, labels = batches.images[chosen], batches.labels[chosen]
    half = len(first)
    parts = [Batches(images[part], labels[part], B, M, shuffle=False) for part in (slice(half), slice(half, None))]
    state, in_parts = None, []
    for part in parts:
        trainer = make_trainer(part)
        state = trainer.init(init_params(0)) if state is None else state
        state = trainer.run_epoch(state, 0, on_call=in_parts.append)
    at_once = train(make_trainer(Batches(images, labels, B, M, shuffle=False)), updates=4)
    np.testing.assert_allclose(losses_of(in_parts), losses_of(at_once), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus"), [("basic", 2), ("concurrent", 4)])
@pytest.mark.parametrize("count", [1, 32, 70])
def test_accuracy_is_of_all_images_and_no_others(mode, ipus, count, digits, batches):
    trainer = make_trainer(batches, mode, ipus)
    params = init_params(3)
    images, labels = digits.test_images[:count], digits.test_labels[:count]
    x = images.reshape(count, 784) / np.float32(255)
    for layer in (params["mlp"]["hidden"], params["mlp"]["features"]):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    right = (x @ params["classifier"]["w"]).argmax(-1) == labels
    assert trainer.accuracy(trainer.init(params), images, labels) == right.mean()
    if count == 70 and mode == "concurrent":
        trainer = make_trainer(dataclasses.replace(batches, gradient_accumulation=2, replicas=2), mode, ipus)
        assert trainer.accuracy(trainer.init(params), images, labels) == right.mean()


def half_logits(params, images, half):
    """Return float32 logits (images, 10) of the dense network in plain jax, with every operation in `half`."""
    cast = jax.tree.map(lambda leaf: leaf.astype(half), params)
    x = images.reshape(-1, 784).astype(half) / jnp.asarray(255, half)
    for layer in (cast["mlp"]["hidden"], cast["mlp"]["features"]):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return (x @ cast["classifier"]["w"] + cast["classifier"]["b"]).astype(jnp.float32)


def make_half_trainer(batches, mode, precision, half):
    pipeline = make_pipeline(mode, gradient_accumulation=batches.gradient_accumulation)
    return Trainer(pipeline, batches, learning_rate=0.01, precision=precision, half=half)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "precision", "half"),
    [("basic", "16.16", "bfloat16"), ("concurrent", "16.16", "bfloat16"), ("concurrent", "16.32", "float16")],
)
def test_evaluation_computes_in_the_half_that_training_does(mode, precision, half, digits, batches):
    trainer = make_half_trainer(batches, mode, precision, half)
    params = init_params(3)
    logits = half_logits(params, digits.test_images[:200], half)
    first, second = jnp.sort(logits, axis=-1)[:, :-3:-1].T
    clear = np.flatnonzero(first - second > 0.05 * jnp.abs(logits).max())  # however sums are rounded
    assert len(clear) > 60
    # every third label is wrong
    labels = np.asarray((logits[clear].argmax(-1) + (np.arange(len(clear)) % 3 == 0)) % 10, np.uint8)
    right = (np.arange(len(clear)) % 3 != 0).mean()
    assert trainer.accuracy(trainer.init(params), digits.test_images[clear], labels) == right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "precision", "half", "step"),
    [
        ("basic", "16.32", "bfloat16", 2.0**-9),
        ("concurrent", "16.32", "bfloat16", 2.0**-9),
        ("concurrent", "16.32", "float16", 2.0**-12),
        ("concurrent", "32.32", None, 2.0**-12),
    ],
)
def test_of_logits_that_are_equal_in_half_alone_the_first_counts(mode, precision, half, step, digits, batches):
    """By hand: in half, 1 + step is 1, so of the classes 3 and 7 class 3 is predicted; in float32 it is 7."""
    params = init_params(3)
    params["classifier"] = {
        "w": jnp.zeros((model.FEATURES, 10)),
        "b": jnp.zeros(10).at[3].set(1.0).at[7].set(1.0 + step),
    }
    trainer = make_half_trainer(batches, mode, precision, half or "bfloat16")
    state = trainer.init(params)
    named = [trainer.accuracy(state, digits.test_images[:8], np.full(8, digit, np.uint8)) for digit in (3, 7)]
    assert named == ([0, 1] if half is None else [1, 0])


# errors


def test_a_loss_that_is_not_finite_stops_training_and_names_where_it_is(batches):
    trainer = make_trainer(batches, learning_rate=1e6, repeat_count=2)
    told: list[Call] = []
    with pytest.raises(DivergedError) as stopped:
        trainer.run_epoch(trainer.init(init_params(0)), 0, on_call=told.append)
    # by rounding, it is the classifier's loss or the layers before it that overflow first
    found = re.fullmatch(
        r"update (\d), replica 0, micro-batch [0-3], stage [01], '(mlp|classifier)': .* is .*(nan|inf): "
        r"training diverged; use a learning rate below 1e\+06",
        str(stopped.value),
    )
    assert found is not None, stopped.value
    update = int(found[1])
    # the calls before it were reported, and it is the first that is not finite
    assert sum(len(call.losses) for call in told) == (update - 1) // 2 * 2
    assert 2 <= update <= 6


def test_updates_that_are_not_finite_may_be_skipped_but_not_for_ever(batches):
    """By hand: the weights are NaN, so that no update is finite; the tenth in a row ends the training."""
    trainer = make_trainer(batches, repeat_count=4, on_nonfinite="skip")
    params = init_params(0)
    params["mlp"]["features"]["b"] = params["mlp"]["features"]["b"].at[7].set(jnp.nan)
    told: list[Call] = []
    with pytest.raises(DivergedError) as stopped:
        trainer.run_epoch(trainer.init(params), 0, on_call=told.append)
    where = "update %d, replica 0, micro-batch 0, stage 0, 'mlp': its weight params['mlp']['features']['b'] is not "
    where += "finite, and the loss of the micro-batch is nan"
    mend = "; it is the last of 10 in a row: training diverged; use a learning rate below 0.01"
    assert str(stopped.value) == where % 10 + mend
    assert [call.nonfinite for call in told] == [tuple(where % (first + i) for i in range(4)) for first in (1, 5)]
    assert [call.skipped for call in told] == [0, 0]


@pytest.mark.parametrize("learning_rate", [0.0, -0.1, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused(learning_rate, batches):
    with pytest.raises(ValueError, match=rf"^learning_rate={learning_rate} is not a positive number$"):
        make_trainer(batches, learning_rate=learning_rate)


def test_other_bad_input_is_refused(batches):
    with pytest.raises(ValueError, match=r"^repeat_count=0 is not a count: give an int of at least 1$"):
        make_trainer(batches, repeat_count=0)
    pipeline = make_pipeline("basic", gradient_accumulation=3)
    with pytest.raises(ValueError, match=r"^batches of gradient_accumulation=4 don't fit a pipeline of 3"):
        Trainer(pipeline, batches, learning_rate=0.1)
    pipeline = replicate(make_pipeline("basic", gradient_accumulation=4), replication_factor=2)
    with pytest.raises(ValueError, match=r"^batches of replicas=1 don't fit a pipeline of 2: make both with the same$"):
        Trainer(pipeline, batches, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"^optimizer='adams' is unknown: did you mean 'adam'\? Choose one of 'sgd', "):
        make_trainer(batches, optimizer="adams")
