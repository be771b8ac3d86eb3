"""Test the checkpoints of the command: a training that is stopped and resumed ends as one that is not."""

import os
import pathlib
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from ipu_jax import Checkpoints, DynamicScale, TrainStep
from mnist_example import data, model, training
from mnist_example.data import synthetic_mnist
from mnist_example.flags import parsed
from mnist_example.run_sharded_mnist import main

# Two epochs of five updates, in calls of two; the last line is of half of a tenth.
TINY = ["--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5", "--epochs", "2"]
TINY += ["--repeat-count", "2", "--learning-rate", "0.003", "--executable-cache", ""]
BASIC, CONCURRENT = ["--pipeline-mode", "basic"], ["--pipeline-mode", "concurrent"]
MEAN = ["--reduction", "mean"]
KEPT = ["--checkpoint-every", "2", "--keep", "20"]


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


@pytest.fixture
def stop_after(monkeypatch):
    """Return a function that lets a SIGTERM come while the device call that makes this update runs."""

    def arrange(update):
        made, usual = [0], Checkpoints.due

        def due(self, state, updates):
            made[0] = made[0] or int(state.step) - updates
            made[0] += updates
            if made[0] - updates < update <= made[0]:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)  # until the thread that waits for signals has seen it
            return usual(self, state, updates)

        monkeypatch.setattr(Checkpoints, "due", due)

    usual = Checkpoints.due
    yield arrange
    monkeypatch.setattr(Checkpoints, "due", usual)


def losses_in(text):
    return [line for line in text.splitlines() if re.fullmatch(r"Epoch \d\.\d+, Mean loss: .*", line)]


def made(flags):
    """Return the training of a command line."""
    _, found = parsed("run-sharded-mnist", "", flags)
    return training.Training(found, found.modes[0], data.prepared(found, found.ipus))


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


def test_stopped_at_any_call_and_resumed_it_ends_with_the_same_bits_and_lines(tmp_path, stop_after, capsys):
    # twenty updates per epoch, each a call of its own: a line is of two
    flags = [*CONCURRENT, *TINY, "--batch-size", "1", "--repeat-count", "1", "--optimizer", "momentum", *KEPT]
    assert main([*flags, "--checkpoint-dir", str(tmp_path / "whole")]) == 0
    expected = losses_in(capsys.readouterr().out)
    assert len(expected) == 20
    whole, updates = saved_in(tmp_path / "whole", flags)
    assert updates == 40
    capsys.readouterr()

    folder, lines = str(tmp_path / "stopped"), []
    for done in (3, 20, 21):  # in the middle of a line, at the end of an epoch, right after that
        stop_after(done)
        assert main([*flags, "--checkpoint-dir", folder]) == 0
        out = capsys.readouterr().out
        assert f"SIGTERM: stopped after {done} updates, which are saved in {folder}: the same call goes on" in out
        lines += losses_in(out)
    stop_after(0)
    assert main([*flags, "--checkpoint-dir", folder]) == 0
    out = capsys.readouterr().out
    assert f"Resumed from {folder}/step-21, after 21 updates\n" in out
    assert re.search(r"^40 updates, 19 of them in .* s, .* samples/s$", out, re.MULTILINE)
    assert lines + losses_in(out) == expected
    leaves, updates = saved_in(folder, flags)
    assert updates == 40
    assert bits(leaves) == bits(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "other"),
    [
        (BASIC, CONCURRENT),
        (CONCURRENT, [*CONCURRENT, "--ipus", "4", "--pipeline-schedule", "1f1b"]),
        (
            [*BASIC, *MEAN, "--pipeline-schedule", "sequential"],
            [*CONCURRENT, *MEAN, "--batch-size", "2", "--replicas", "2"],
        ),
        (
            [*CONCURRENT, *MEAN, "--batch-size", "2", "--replicas", "2", "--shard-optimizer", "--optimizer", "adam"],
            [*CONCURRENT, *MEAN, "--optimizer", "adam", "--repeat-count", "5"],
        ),
    ],
)
def test_onto_other_ipus_the_state_has_the_same_bits_and_the_losses_go_on(tmp_path, stop_after, capsys, flags, other):
    flags, other = [[*TINY, *each, *KEPT] for each in (flags, other)]
    assert main([*flags, "--checkpoint-dir", str(tmp_path / "whole")]) == 0
    whole, _ = saved_in(tmp_path / "whole", flags)
    folder = tmp_path / "stopped"
    stop_after(4)
    assert main([*flags, "--checkpoint-dir", str(folder)]) == 0
    same, onto = (saved_in(folder, each)[0] for each in (flags, other))
    assert bits(same) == bits(onto)
    stop_after(0)
    capsys.readouterr()
    assert main([*other, "--checkpoint-dir", str(folder)]) == 0
    assert "after 4 updates, onto other IPUs or other places of the stages\n" in capsys.readouterr().out
    resumed, updates = saved_in(folder, other)
    assert updates == 10
    for (path, leaf), (_, expected) in zip(resumed, whole, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=2e-6, err_msg=jax.tree_util.keystr(path))


def test_a_longer_training_goes_on_where_a_shorter_one_ended(tmp_path, capsys):
    flags = [*CONCURRENT, *TINY]
    assert main([*flags, "--repeat-count", "1"]) == 0
    expected = losses_in(capsys.readouterr().out)
    folder = ["--checkpoint-dir", str(tmp_path)]
    assert main([*flags, *folder, "--epochs", "0.6", "--repeat-count", "3"]) == 0
    capsys.readouterr()
    assert main([*flags, *folder, "--repeat-count", "1"]) == 0
    assert losses_in(capsys.readouterr().out) == expected[3:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-3", "step-5"]  # an epoch's end, too
    assert main([*flags, *folder]) == 0
    assert "10 updates were made before\n" in capsys.readouterr().out


def test_what_was_skipped_before_is_counted_after(tmp_path, stop_after, capsys, monkeypatch):
    monkeypatch.setattr(training, "DynamicScale", lambda: DynamicScale(initial=2.0**24))
    flags = [*CONCURRENT, *TINY, "--precision", "16.32", "--half", "float16"]
    assert main(flags) == 0
    told = capsys.readouterr().out
    stop_after(5)
    folder = ["--checkpoint-dir", str(tmp_path)]
    assert main([*flags, *folder]) == 0
    lines = losses_in(capsys.readouterr().out)
    stop_after(0)
    assert main([*flags, *folder]) == 0
    out = capsys.readouterr().out
    assert lines + losses_in(out) == losses_in(told)
    skipped = lambda text: re.findall(r"; \d+ updates were skipped$", text, re.MULTILINE)  # noqa: E731
    assert skipped(out) == skipped(told) != []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with the checkpoint of one update."""
    folder = tmp_path_factory.mktemp("saved")
    assert main([*CONCURRENT, *TINY, "--run-single-step", "--checkpoint-dir", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer", "momentum"], r".* is of optimizer 'sgd', but this training's optimizer is 'momentum': resume"),
        (["--seed", "1"], r".* is of data '103 images, CRC-32 .*', but this training's data is '103 images, CRC-32 "),
        (["--no-shuffle"], r".* is of shuffle True, but this training's shuffle is False: resume with the same"),
        (["--batch-size", "2"], r".* is of images per update 20, but this training's images per update is 10: resume"),
        (
            ["--batch-size", "2", "--replicas", "2"],
            r".* is of micro-batches per update 5, but this training's micro-batches per update is 10: resume",
        ),
        (["--precision", "16.16"], r".* is of precision '32.32', but this training's precision is '16.16': resume"),
        (["--model", "resnet18", "--learning-rate", "0.02"], r".* is of model 'mlp', but this training's model is"),
        (["--resume", "never"], r"resume='never', but .* holds step-1: give another folder, or resume='auto'"),
    ],
)
def test_another_training_is_refused_by_name(saved, flags, message, capsys, monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", None)
    assert main([*CONCURRENT, *TINY, *flags, "--checkpoint-dir", str(saved)]) == 2
    assert re.match(f"run-sharded-mnist: --checkpoint-dir: {message}", capsys.readouterr().err)


def test_a_path_is_resumed_from_at_another_learning_rate(saved, tmp_path, capsys):
    flags = ["--checkpoint-dir", str(tmp_path), "--resume", str(saved / "step-1"), "--learning-rate", "0.002"]
    assert main([*CONCURRENT, *TINY, *flags, "--epochs", "0.6"]) == 0
    out = capsys.readouterr().out
    assert f"Resumed from {saved / 'step-1'}, after 1 updates\n" in out
    assert (tmp_path / "step-3").is_dir()


def test_a_damaged_checkpoint_is_named_and_one_that_was_asked_for_is_refused(saved, tmp_path, capsys):
    damaged = tmp_path / "step-1"
    shutil.copytree(saved / "step-1", damaged)
    largest = max((file for file in damaged.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    flags = [*CONCURRENT, *TINY, "--checkpoint-dir", str(tmp_path), "--run-single-step"]
    assert main([*flags, "--resume", str(damaged)]) == 2
    name = largest.relative_to(damaged)
    assert capsys.readouterr().err == (
        f"run-sharded-mnist: --checkpoint-dir: {damaged} cannot be restored: {name} was changed\n"
    )
    assert main(flags) == 2
    assert capsys.readouterr().err == (
        f"run-sharded-mnist: --checkpoint-dir: {tmp_path} holds no checkpoint that is whole: step-1, {name} was "
        "changed. Nothing was removed: resume from the path of another one, or save to another folder to begin at 0\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    shutil.copytree(saved / "step-1", tmp_path / "step-0")
    assert main(flags) == 0
    assert capsys.readouterr().err == (
        f"run-sharded-mnist: {damaged} cannot be restored, {name} was changed: it is skipped\n"
    )


def test_checkpoints_that_cannot_be_read_are_not_written_over(saved, tmp_path, capsys, monkeypatch):
    folder, usual = tmp_path / "runs", pathlib.Path.open
    shutil.copytree(saved, folder)

    def opened(self, *args, **options):
        if self.name == "ipu_jax.json":
            raise PermissionError(13, "Permission denied", str(self))
        return usual(self, *args, **options)

    monkeypatch.setattr(TrainStep, "__call__", None)
    monkeypatch.setattr(pathlib.Path, "open", opened)
    assert main([*CONCURRENT, *TINY, "--checkpoint-dir", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"run-sharded-mnist: --checkpoint-dir: {folder}/step-1 may be the last checkpoint, and ipu_jax.json cannot be "
        "read (Permission denied): see that this user can read it; or resume from the path of another one. Nothing was "
        "removed\n"
    )
    assert [path.name for path in folder.iterdir()] == ["step-1"]


def test_a_second_training_in_a_folder_is_refused_before_it_compiles(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainStep, "__call__", None)
    flags = [*CONCURRENT, *TINY, "--checkpoint-dir", str(tmp_path)]
    other = made(flags).checkpoints()
    assert other is not None
    with other:
        other.lock()
        assert main(flags) == 2
        assert re.match(
            rf"run-sharded-mnist: --checkpoint-dir: {tmp_path} is in use: this process saves there since .* by other "
            r"Checkpoints, which close\(\) would end\. .* or save to another folder\n$",
            capsys.readouterr().err,
        )


@pytest.mark.parametrize(("flags", "status"), [([], 74), (["--on-save-error", "continue"], 0)])
def test_a_folder_that_vanishes_ends_the_training_or_is_told(tmp_path, flags, status, capsys, monkeypatch):
    folder = tmp_path / "runs"
    usual = Checkpoints.save

    def save(self, state, *args, **how):
        if int(state.step) == 4:
            self.wait()
            folder.rename(tmp_path / "gone")
        return usual(self, state, *args, **how)

    monkeypatch.setattr(Checkpoints, "save", save)
    command = [*CONCURRENT, *TINY, "--epochs", "1", "--checkpoint-dir", str(folder), "--checkpoint-every", "2", *flags]
    assert main(command) == status
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert re.fullmatch(
        rf"run-sharded-mnist: saving {folder}/step-4 failed, \[Errno 2\] No such file or directory, of [\d,]+ bytes: "
        r".*; the last good one is of step 2",
        lines[0],
    )
    assert len(lines) == (1 if status else 3)  # the save at the end fails, too, and so does verifying the last one
    assert ("Test accuracy" in out) == (not status)
    assert (tmp_path / "gone" / "step-2").is_dir()
