"""Test the MNIST example's feed: bytes or floats, made by the caller or by workers, train equally; and its flags."""

import jax
import numpy as np
import pytest

from ipu_jax import make_mesh
from mnist_example import inputs, model, training_run
from mnist_example.batches import Batches
from mnist_example.data import synthetic_mnist
from mnist_example.feeding import make_feed
from mnist_example.model import init_params, make_pipeline
from mnist_example.run_sharded_mnist import main
from mnist_example.train import Trainer

SYNTHETIC = ["--pipeline-mode", "concurrent", "--synthetic-data"]
TINY = [*SYNTHETIC, "--batch-size", "4", "--gradient-accumulation-count", "5", "--epochs", "2"]


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    """Train few hidden units, whatever feeds them."""
    monkeypatch.setattr(model, "HIDDEN", 64)
    monkeypatch.setattr(model, "FEATURES", 32)


@pytest.fixture
def few_digits(monkeypatch):
    """Use synthetic data of 103 images, so that an epoch takes almost no time."""
    monkeypatch.setattr(inputs, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))


def batches(count=103):
    digits = synthetic_mnist(3, count, 1)
    return Batches(digits.train_images, digits.train_labels, batch_size=4, gradient_accumulation=5, seed=2)


def losses_of(trainer):
    """Return the losses of an epoch and most of the next one, from the same weights each time."""
    losses = []
    state = trainer.init(init_params(0))
    for epoch, updates in ((0, None), (1, 4)):
        state = trainer.run_epoch(state, epoch, updates=updates, on_call=lambda call: losses.append(call.losses))
    return np.concatenate(losses)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["basic", "concurrent"])
def test_training_is_the_same_however_the_images_come(mode):
    pipeline, of = make_pipeline(mode, gradient_accumulation=5), batches()
    of_bytes = Trainer(pipeline, of, learning_rate=0.01, repeat_count=2)
    expected = losses_of(of_bytes)
    assert len(expected) == 9
    with make_feed(of, pipeline.mesh, repeat_count=2, num_workers=3) as of_bytes.feed:
        np.testing.assert_array_equal(losses_of(of_bytes), expected)  # the same program, and the same batches
    of_floats = Trainer(pipeline, of, learning_rate=0.01, repeat_count=2, eight_bit_io=False, num_workers=2)
    with of_floats.feed:
        np.testing.assert_allclose(losses_of(of_floats), expected, rtol=1e-5)


@pytest.mark.parametrize("repeat_count", [1, 2, 100])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_feed_has_the_updates_of_the_batches(repeat_count, num_workers):
    of = batches()
    with make_feed(of, make_mesh(1, 1), repeat_count=repeat_count, num_workers=num_workers) as feed:
        for epoch in (0, 1):
            labels = [np.asarray(b.data["labels"]).reshape(-1, 5, 4)[: b.updates] for b in feed.epoch()]
            np.testing.assert_array_equal(np.concatenate(labels), of.labels[of.of_epoch(epoch)])


def test_a_quarter_of_the_bytes_crosses_in_eight_bits():
    crossed = {}
    for eight_bit_io in (True, False):
        feed = make_feed(batches(), make_mesh(1, 2), eight_bit_io=eight_bit_io)
        images = next(feed).data["images"]
        assert images.dtype == (np.uint8 if eight_bit_io else np.float32)
        crossed[eight_bit_io] = sum(shard.data.nbytes for shard in images.addressable_shards)
    assert crossed[False] == 4 * crossed[True]


def test_floats_are_the_images_over_255():
    of = batches()
    images = next(make_feed(of, make_mesh(1, 1), eight_bit_io=False)).data["images"]
    np.testing.assert_array_equal(np.asarray(images), of.images[of.of_epoch(0)] / np.float32(255))


# flags


@pytest.mark.parametrize(
    ("flags", "dtype", "prefetch", "workers"),
    [
        ([], np.uint8, 0, 1),
        (["--eight-bit-io", "--async-dataloader"], np.uint8, 2, 1),
        (["--no-eight-bit-io", "--async-dataloader", "--num-workers", "5"], np.float32, 5, 5),
    ],
)
@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_the_flags_reach_the_feed(flags, dtype, prefetch, workers, model, monkeypatch, few_digits):
    runs = []
    monkeypatch.setattr(training_run, "train", lambda run: runs.append(run) or np.ones(1))
    assert main([*TINY, "--model", model, *flags]) == 0
    (trainer,) = (run.trainer for run in runs)
    assert trainer.feed.like["images"].dtype == dtype
    assert (trainer.feed.prefetch, trainer.feed.workers) == (prefetch, workers)


def test_the_flags_change_no_line_of_the_output(few_digits, capsys):
    told = []
    for flags in ([], ["--async-dataloader", "--num-workers", "2"]):
        assert main([*TINY, "--repeat-count", "3", *flags]) == 0
        told.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")])
    assert told[0] == told[1]
    assert len(told[0]) == 6


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num-workers", "2"], "--num-workers are threads of --async-dataloader: give both, or neither"),
        (
            ["--async-dataloader", "--num-workers", "0"],
            "argument --num-workers: '0' is not a count: give a whole number of at least 1",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(flags, line, capsys, monkeypatch):
    monkeypatch.setattr(training_run, "train", None)
    jax.devices()
    with pytest.raises(SystemExit) as stopped:
        main([*SYNTHETIC, *flags])
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"run-sharded-mnist: {line}\n")
