"""Test the command that only reads the data: its printed lines, and its errors."""

import io
import re
import sys
import threading

import jax
import numpy as np
import pytest

from ipu_jax import EpochOrder, Position
from mnist_example import data, training
from mnist_example.benchmark_dataset import main
from mnist_example.data import synthetic_mnist

TINY = ["--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5"]
SPEED = r"in \d+\.\d\d s, [\d,]+ samples/s, [\d,]+\.\d\d MB/s"


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """Use synthetic data of 103 images, so that an epoch takes almost no time."""
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))


@pytest.mark.parametrize(
    "flags", [[], ["--no-eight-bit-io"], ["--async-dataloader"], ["--async-dataloader", "--num-workers", "3"]]
)
def test_a_line_follows_every_epoch(flags, capsys):
    assert main([*TINY, *flags, "--epochs", "2.4", "--repeat-count", "2", "--ipus", "4"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "synthetic data, seed 0, to 4 IPUs: 5 updates per epoch, each of 5 micro-batches of 4"
    # an epoch is 2, 2 and 1 updates of 20 images; 0.4 of it is one call
    for line, (epoch, samples) in zip(lines, [(1, 100), (2, 100), (3, 40)], strict=True):
        assert re.fullmatch(rf"Epoch {epoch}: {samples} samples {SPEED}", line), line
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed worker")]


@pytest.mark.parametrize(
    ("epochs", "repeat_count", "samples"),
    [
        # 2,060 images are 64 updates of 32: 0.05 of them are 3.2 updates, 96 images
        ("0.05", "100", [96]),
        ("0.05", "2", [96]),
        ("0.001", "100", [32]),
        ("1.05", "100", [2048, 96]),
        ("1.05", "2", [2048, 96]),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--async-dataloader"]])
def test_a_part_of_an_epoch_reads_its_own_samples_and_no_more(
    epochs, repeat_count, samples, flags, monkeypatch, capsys
):
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 2060, 25))
    made = []
    wait = jax.block_until_ready
    monkeypatch.setattr(training.jax, "block_until_ready", lambda data: made.append(wait(data)) or data)
    flags = [*flags, "--batch-size", "16", "--gradient-accumulation-count", "2", "--repeat-count", repeat_count]
    assert main(["--synthetic-data", *flags, "--epochs", epochs]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(" in ")[0] for line in lines] == [f"Epoch {k + 1}: {n:,} samples" for k, n in enumerate(samples)]
    # the images of the updates that training makes, in the same order
    digits = synthetic_mnist(0, 2060, 25)
    epoch_order = EpochOrder(2060, 16, gradient_accumulation=2, iterations=64, remainder="updates")
    read = [epoch_order.rows(Position(epoch, 0)).indices.reshape(-1)[:n] for epoch, n in enumerate(samples)]
    labels = [np.asarray(data["labels"]).reshape(-1, 32) for data in made]
    labels = [rows if rows.ndim == 2 else rows[None] for rows in labels]
    found, per_epoch = [], iter(samples)
    left = next(per_epoch) // 32
    for rows in labels:  # of each call, the updates that are left of its epoch
        found.append(rows[:left].reshape(-1))
        left -= min(left, len(rows))
        left = left or next(per_epoch, 0) // 32
    np.testing.assert_array_equal(np.concatenate(found), digits.train_labels[np.concatenate(read)])


def test_replicas_get_batches_of_their_own(capsys):
    assert main([*TINY, "--replicas", "2", "--epochs", "1"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header == (
        "synthetic data, seed 0, to 2 replicas of 2 IPUs: 2 updates per epoch, each of 5 micro-batches of 4 on each"
    )
    assert re.fullmatch(rf"Epoch 1: 80 samples {SPEED}", line)


def test_a_trainings_own_command_line_can_be_given(capsys):
    """Flags of the model have no effect, and nothing is compiled for them."""
    flags = "--pipeline-mode concurrent --model resnet18 --learning-rate 0.1 --precision 16.16 --run-single-step"
    assert main([*TINY, *flags.split()]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.endswith("5 updates per epoch, each of 5 micro-batches of 4")
    assert re.fullmatch(rf"Epoch 1: 20 samples {SPEED}", line)


@pytest.mark.parametrize("flags", [[], ["--no-progress"]])
def test_there_is_a_bar_on_a_terminal_unless_it_is_not_wanted(flags, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*TINY, "--epochs", "1", *flags]) == 0
    assert ("5/5" in terminal.getvalue()) == (flags == [])
    assert ("\x1b" in terminal.getvalue()) == (flags == [])


def test_more_than_the_data_or_the_devices_is_refused_in_one_line(capsys):
    jax.devices()  # the backend runs with 8 IPUs: more cannot be made
    for flag, value, rule in (
        ("--batch-size", "104", "x --gradient-accumulation-count 5 takes 520 images for an update, but there are 103"),
        ("--ipus", "9", "but jax already started its CPU backend with 8: call configure(9)"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*TINY, flag, value])
        assert stopped.value.code == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.match(f"benchmark-dataset: {flag} {value},? {re.escape(rule)}", err)
