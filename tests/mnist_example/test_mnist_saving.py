"""Test what the command saves and records: a training run that is stopped and resumed ends as one that is not."""

import json
import os
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from ipu_jax import Checkpoints
from ipu_jax.steps import TrainStep
from mnist_example import data, model, training
from mnist_example.data import synthetic_mnist
from mnist_example.flags import Flags, parsed
from mnist_example.run_sharded_mnist import main

# Two epochs of five updates, in calls of two; the last line is of half of a tenth.
TINY = ["--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5", "--epochs", "2"]
TINY += ["--repeat-count", "2", "--learning-rate", "0.003", "--executable-cache", ""]
BASIC, CONCURRENT = ["--pipeline-mode", "basic"], ["--pipeline-mode", "concurrent"]


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory):
    """Train a small network on 103 images, and compile each program once."""
    TINY[-1] = str(tmp_path_factory.mktemp("executables"))
    patch = pytest.MonkeyPatch()
    patch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))
    patch.setattr(model, "HIDDEN", 24)
    patch.setattr(model, "FEATURES", 12)
    yield
    patch.undo()


def made(flags):
    """Return the training of a command line."""
    _, found = parsed("run-sharded-mnist", "", flags, Flags)
    return training.TrainingRun(found, found.modes[0], data.prepared(found, found.ipus))


def saved_in(folder, flags):
    """Return the whole state of the last checkpoint, as leaves, and how many updates it has made."""
    each = made([*flags, "--checkpoint-dir", str(folder)])
    checkpoints = each.checkpoints()
    assert checkpoints is not None
    with checkpoints:
        found = checkpoints.restore(each.init())
    assert found is not None
    return jax.tree.leaves_with_path(each.step.whole(found.state)), found.step


def bits(leaves):
    return {jax.tree_util.keystr(path): (np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) for path, leaf in leaves}


@pytest.mark.slow
def test_stopped_and_resumed_it_is_one_training_and_one_log(tmp_path, capsys, monkeypatch):
    flags = [*CONCURRENT, *TINY, "--checkpoint-every", "2"]
    assert main([*flags, "--checkpoint-dir", str(tmp_path / "whole")]) == 0
    of_losses = lambda out: re.findall(r"Epoch \d\.\d, Mean loss: .*", out)
    expected = of_losses(capsys.readouterr().out)

    folder, log, board = tmp_path / "stopped", tmp_path / "run.jsonl", tmp_path / "board"
    recorded = ["--checkpoint-dir", str(folder), "--log-file", str(log), "--tensorboard", str(board)]
    usual = Checkpoints.due

    def due(self, state, updates):
        if int(state.step) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until the thread that waits for signals has seen it
        return usual(self, state, updates)

    monkeypatch.setattr(Checkpoints, "due", due)
    assert main([*flags, *recorded]) == 0
    first = capsys.readouterr().out
    stopped = f"SIGTERM: stopped after 4 of 10 updates; saved in {folder}: the same call goes on"
    assert stopped in first
    assert main([*flags, *recorded]) == 0
    second = capsys.readouterr().out
    assert f"Resumed from {folder}/step-4, after 4 updates\n" in second
    assert re.search(r"^10 updates, 6 of them in .* s, .* samples/s \(median\)$", second, re.MULTILINE)
    assert len(expected) == 6
    assert of_losses(first) + of_losses(second) == expected
    (whole, _), (leaves, updates) = (saved_in(tmp_path / name, flags) for name in ("whole", "stopped"))
    assert updates == 10
    assert bits(leaves) == bits(whole)

    events = [json.loads(line) for line in log.read_text().splitlines()]
    names = ("start", "resumed", "compiled", "stopped", "end")
    assert [sum(event["event"] == name for event in events) for name in names] == [2, 1, 2, 1, 1]
    start = events[0]
    assert (start["ipus"], start["replicas"], start["samples_per_update"], start["total_updates"]) == (2, 1, 20, 10)
    assert start["flags"]["repeat-count"] == 2
    assert (start["flags"]["epochs"], start["defaults"]["epochs"]) == (2, 20)  # of few images
    assert len(list(board.iterdir())) == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with the checkpoint of one update."""
    folder = tmp_path_factory.mktemp("saved")
    assert main([*CONCURRENT, *TINY, "--run-single-step", "--checkpoint-dir", str(folder)]) == 0
    return folder


@pytest.mark.fast("flags0-holds0")
@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        (["--optimizer", "momentum"], ("optimizer 'sgd'", "'momentum'", "resume with the same")),
        (["--seed", "1"], ("data '103 images, CRC-32 ", "resume with the same")),
        (["--no-shuffle"], ("shuffle True", "shuffle is False", "resume with the same")),
        (["--batch-size", "2"], ("images per update 20", "is 10", "resume with the same")),
        (["--batch-size", "2", "--replicas", "2"], ("micro-batches per update 5", "is 10", "resume with the same")),
        (["--precision", "16.16"], ("precision '32.32'", "'16.16'", "resume with the same")),
        pytest.param(
            ["--model", "resnet18", "--learning-rate", "0.02"],
            ("model 'mlp'", "model is 'resnet18'", "resume with"),
            marks=pytest.mark.slow,
        ),
        (["--resume", "never"], ("resume='never'", "holds step-1", "give another folder")),
    ],
)
def test_another_training_is_refused_by_name(saved, flags, holds, capsys, monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", None)
    assert main([*CONCURRENT, *TINY, *flags, "--checkpoint-dir", str(saved)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("run-sharded-mnist: --checkpoint-dir: ")
    assert [text for text in holds if text not in err] == []


@pytest.mark.slow
def test_a_path_is_resumed_from_in_the_other_mode_at_another_learning_rate_and_each_epoch_is_saved(
    saved, tmp_path, capsys
):
    same, onto = (saved_in(saved, [*mode, *TINY])[0] for mode in (CONCURRENT, BASIC))
    assert bits(same) == bits(onto)
    flags = ["--checkpoint-dir", str(tmp_path), "--resume", str(saved / "step-1"), "--learning-rate", "0.002"]
    assert main([*BASIC, *TINY, *flags, "--epochs", "1.4"]) == 0
    told = f"Resumed from {saved / 'step-1'}, after 1 updates, onto other IPUs or other places of the stages\n"
    assert told in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-7"]


def test_a_damaged_checkpoint_is_skipped_in_one_line(saved, tmp_path, capsys):
    damaged = shutil.copytree(saved / "step-1", tmp_path / "step-1")
    next(file for file in damaged.rglob("*") if file.is_file()).write_bytes(b"")
    flags = [*CONCURRENT, *TINY, "--checkpoint-dir", str(tmp_path), "--run-single-step"]
    assert main(flags) == 2
    assert f"--checkpoint-dir: {tmp_path} holds no checkpoint that is whole: step-1, " in capsys.readouterr().err
    shutil.copytree(saved / "step-1", tmp_path / "step-0")
    assert main(flags) == 0
    told = rf"run-sharded-mnist: {damaged} cannot be restored, .*: it is skipped\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_a_second_training_in_a_folder_is_refused_before_it_compiles(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", None)
    flags = [*CONCURRENT, *TINY, "--checkpoint-dir", str(tmp_path)]
    other = made(flags).checkpoints()
    assert other is not None
    with other:
        other.lock()
        assert main(flags) == 2
    assert f"run-sharded-mnist: --checkpoint-dir: {tmp_path} is in use: " in capsys.readouterr().err
