"""Test the command: what it prints, what it refuses before anything is compiled, and how it ends."""

import dataclasses
import importlib.util
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import ipu_jax
from ipu_jax.io import CheckpointError, SaveError
from ipu_jax.observe import Recording, TraceError
from ipu_jax.options import DynamicScale
from ipu_jax.run.ahead.compilers import folder_of
from ipu_jax.schedules import Schedule
from ipu_jax.steps import NonFiniteLossError
from mnist_example import data, model, training
from mnist_example.data import load_mnist, synthetic_mnist
from mnist_example.flags import Flags, parsed
from mnist_example.run_sharded_mnist import main
from support.launched import HEEDING
from support.mnist_instance import Terminal, write_digits

ROOT = Path(__file__).parents[2]
CONCURRENT = ["--pipeline-mode", "concurrent"]
SYNTHETIC = [*CONCURRENT, "--synthetic-data"]
# Five updates per epoch.
TINY = ["--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5", "--epochs", "1"]

ACCURACY = r"\d+\.\d\d%"
COMPILED = r"Compiled in \d+\.\d s"


@pytest.fixture
def few_digits(monkeypatch):
    """Use synthetic data of 103 images and few hidden units, so that an epoch takes almost no time."""
    monkeypatch.setattr(model, "HIDDEN", 64)
    monkeypatch.setattr(model, "FEATURES", 32)
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))


def interrupted(*args, **how):
    """Take the place of `fit`."""
    raise KeyboardInterrupt


@pytest.fixture
def nothing_runs(monkeypatch):
    """Remove the function that trains and compiles the first program, so that a test fails if it is called."""
    monkeypatch.setattr(training.TrainingRun, "run", None)


def final(epoch, updates, judged="is chance: these images cannot be learnt"):
    """Return the patterns of the last lines."""
    return (
        rf"Epoch {epoch:.1f}, Test accuracy: {ACCURACY}",
        rf"{updates} update{'s' * (updates > 1)} in \d+\.\d s(, [\d,]+ samples/s \(median\))?",
        rf"{ACCURACY} {judged}",
    )


def assert_lines(text, *patterns):
    lines = text.splitlines()
    assert len(lines) == len(patterns), text
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


# what it prints


def test_a_line_follows_every_device_call_and_the_accuracy_every_epoch(few_digits, monkeypatch):
    flags = [*CONCURRENT, *TINY, "--epochs", "1.6", "--repeat-count", "2"]
    patterns = [
        r"concurrent pipeline on 2 IPUs, grouped; synthetic data, seed 0: 5 updates per epoch, each of 5 micro-batches "
        "of 4",
        COMPILED,
        *(rf"Epoch {epoch}, Mean loss: \d\.\d{{3}}" for epoch in (0.4, 0.8, 1.0)),
        rf"Epoch 1\.0, Test accuracy: {ACCURACY}",
        *(rf"Epoch {epoch}, Mean loss: \d\.\d{{3}}" for epoch in (1.4, 1.6)),
        *final(1.6, 8),
    ]
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*flags, "--no-progress"]) == 0
    assert_lines(terminal.getvalue(), *patterns)


def test_there_is_a_bar_unless_a_flag_says_otherwise(few_digits, monkeypatch):
    given = []
    monkeypatch.setattr(ipu_jax, "fit", lambda *args, progress, **how: (given.append(progress), interrupted()))
    for flags in ([], ["--no-progress"]):
        with pytest.raises(KeyboardInterrupt):
            main([*CONCURRENT, *TINY, *flags])
    assert given == [None, False]


@pytest.mark.parametrize(
    ("flags", "is_usual"),
    [
        ("", True),
        ("--ipus 3 --seed 3 --pipeline-schedule 1f1b --no-eight-bit-io --epochs 20", True),  # of few images
        ("--epochs 0.5", False),
        ("--learning-rate 0.1", False),
        ("--run-single-step", False),
        ("--replicas 2 --batch-size 8", False),
    ],
)
def test_only_what_the_default_flags_learn_is_measured_by_what_they_reach(flags, is_usual, few_digits, monkeypatch):
    learnt = dataclasses.replace(synthetic_mnist(0, 103, 25), expected=0.96)
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: learnt)
    given = []
    monkeypatch.setattr(ipu_jax, "fit", lambda *args, notes, **how: (given.append(notes), interrupted()))
    with pytest.raises(KeyboardInterrupt):
        main(["--synthetic-data", *flags.split()])
    assert given[0].get("expected") == ({"accuracy": 0.96} if is_usual else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "header", "images"),
    [
        (
            "--pipeline-mode concurrent --replicas 2 --optimizer adamw --shard-optimizer "
            "--half float16 --precision 16.32",
            "concurrent pipeline on 2 IPUs, 2 replicas, grouped; synthetic data, seed 0: 2 updates per epoch, each of "
            "5 micro-batches of 4 on each",
            40,
        ),
        ("--pipeline-mode basic --pipeline-schedule Auto", "basic pipeline on 2 IPUs, auto", 20),
        ("--pipeline-mode basic", "basic pipeline on 2 IPUs, grouped", 20),
        ("--pipeline-mode basic --pipeline-schedule Sequential", "basic pipeline on 2 IPUs, sequential", 20),
        ("--pipeline-mode basic --pipeline-schedule Schedule1F1B", "basic pipeline on 2 IPUs, 1f1b", 20),
        ("--pipeline-mode concurrent --ipus 4", "concurrent pipeline on 4 IPUs, grouped", 20),
        ("--pipeline-mode concurrent --precision 16.32 --reduction mean --no-shuffle", "concurrent pipeline on 2", 20),
    ],
)
def test_a_single_step_works_in_every_layout(flags, header, images, few_digits, capsys):
    assert main([*flags.split(), *TINY, "--run-single-step"]) == 0
    epoch = images / (103 // images * images)
    assert_lines(
        capsys.readouterr().out,
        rf"{header}.*",
        *([r"Schedule auto chose (a table of its own|[a-z0-9-]+)"] if "Auto" in flags else []),
        COMPILED,
        rf"Epoch {epoch:.1f}, Mean loss: 2\.\d{{3}}",
        *final(epoch, 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["basic", "concurrent"])
def test_with_64_bit_numbers_it_trains_and_evaluates_as_without(mode, few_digits, capsys):
    told = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            assert main(["--pipeline-mode", mode, *TINY, "--run-single-step"]) == 0
        told.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")])
    assert told[0] == told[1]
    assert len(told[0]) == 2


class Reached(Exception):
    """Raised in place of the training, with it."""


@pytest.fixture
def reached(monkeypatch, few_digits):
    """Return a function that returns the training that a command line makes."""

    def stop(self, cache):
        raise Reached(self, cache)

    monkeypatch.setattr(training.TrainingRun, "run", stop)

    def reach(*flags):
        with pytest.raises(Reached) as found:
            main([*SYNTHETIC, *flags])
        return found.value.args[0]

    return reach


def test_every_flag_reaches_the_training(reached, monkeypatch, tmp_path):
    flags = "--ipus 3 --replicas 2 --batch-size 2 --gradient-accumulation-count 3 --repeat-count 4 --epochs 2 --seed 7"
    flags += " --optimizer lamb --learning-rate 0.5 --shard-optimizer --reduction mean --precision 16.32 --half float16"
    flags += " --pipeline-schedule sequential --on-nonfinite skip --no-shuffle --async-dataloader --num-workers 3"
    flags += f" --no-eight-bit-io --trace {tmp_path} --trace-steps 2"
    flags += f" --checkpoint-dir {tmp_path} --keep 5 --checkpoint-every 7 --on-save-error continue"
    assert reached().step.options.on_nonfinite == "stop"
    found = reached(*flags.split())
    pipeline, options = found.step.model, found.step.options
    assert (found.mode, pipeline.ipus, pipeline.replicas, pipeline.schedule.name) == ("concurrent", 3, 2, "sequential")
    assert (pipeline.options.gradient_accumulation, pipeline.options.reduction) == (3, "mean")
    assert (options.device_iterations, options.precision, options.on_nonfinite) == (4, "16.32", "skip")
    assert (options.loss_scale, options.shard_optimizer) == (DynamicScale(), True)
    assert (found.flags.epochs, found.flags.learning_rate, found.recording.steps) == (2, 0.5, 2)
    monkeypatch.setattr(ipu_jax, "Checkpoints", lambda folder, step, **how: (folder, how))
    folder, how = found.checkpoints()
    assert folder == tmp_path
    assert [how[name] for name in ("keep", "every", "minutes", "on_save_error")] == [5, 7, None, "continue"]
    np.testing.assert_array_equal(found.data.train_images, synthetic_mnist(7, 103, 25).train_images)
    with training.feed_of(found.flags, found.data, step=found.step) as feed:
        assert (feed.workers, feed.prefetch) == (3, 3)
        batch = next(feed)
    labels = batch.data["labels"]
    assert (labels.shape, labels.dtype) == ((4, 2, 3, 2), np.uint8)
    np.testing.assert_array_equal(labels.reshape(-1), found.data.train_labels[: batch.examples])  # not shuffled
    images = np.asarray(batch.data["images"])
    assert images.dtype == np.float32
    assert 0.9 < float(images.max()) <= 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--optimizer sgd", (16, 4, 0.015)),
        ("--optimizer adam", (16, 4, 0.001)),
        ("--optimizer momentum", (16, 4, 0.0015)),
        ("--optimizer lamb --learning-rate 0.5", (16, 4, 0.5)),
        ("--model resnet18", (32, 2, 0.02)),
        ("--model resnet18 --optimizer momentum", (32, 2, 0.002)),
        ("--model resnet50 --batch-size 8 --learning-rate 0.01", (8, 2, 0.01)),
    ],
)
def test_each_model_and_each_optimizer_has_defaults_of_its_own(flags, expected):
    _, found = parsed("run-sharded-mnist", "", flags.split(), Flags)
    assert (found.batch_size, found.gradient_accumulation_count, found.learning_rate) == expected


def test_help_says_every_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    defaults = "--batch-size 16 --repeat-count 5 --learning-rate 0.015 --gradient-accumulation-count 4 --ipus 2"
    defaults += " --epochs 3 --reduction sum --precision 32.32 --replicas 1 --optimizer sgd --half bfloat16"
    words = defaults.split()
    for flag, default in zip(words[::2], words[1::2], strict=True):
        # since Python 3.13 another name of the flag comes before the value
        assert re.search(rf"{flag}(, --\S+)? \S+ [^)]*\(default: {re.escape(default)}\)", text), flag


# comparing


@pytest.mark.slow
def test_compare_draws_both_curves_and_a_picture_that_fails_leaves_the_figures(
    few_digits, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    losses, modes = {"basic": np.ones(3), "concurrent": np.full(3, 1.5)}, []
    run = lambda self, cache: (modes.append(self.mode), types.SimpleNamespace(losses=losses[self.mode]))[1]
    monkeypatch.setattr(training.TrainingRun, "run", run)
    apart = "Largest relative difference of the losses: 5.0e-01 over the first 3 updates, 5.0e-01 over all 3\n"
    assert main(["--compare", *CONCURRENT, *TINY]) == 0
    assert modes == ["concurrent", "basic"]  # the mode that was asked for is the first
    assert capsys.readouterr().out == f"{apart}Picture: mnist-losses.png\n"
    drawn = Path("mnist-losses.png")
    content = drawn.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 500
    drawn.unlink()
    picture = tmp_path / "losses.png"
    # a file may have as many bytes as the picture needs when it is tried, and fewer afterwards
    draw = training.draw

    def on_a_full_disk(*arguments):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            draw(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(training, "draw", on_a_full_disk)
    assert main(["--compare", "--plot", str(picture), *TINY]) == 74
    out, err = capsys.readouterr()
    assert out == apart
    assert err == f"run-sharded-mnist: --plot {picture} was not written (File too large)\n"
    assert not list(tmp_path.iterdir())
    picture.write_text("of an earlier run")
    losses["concurrent"] = losses["basic"]  # there is no logarithm of 0
    assert main(["--compare", "--plot", str(picture), *TINY]) == 74
    assert picture.read_text() == "of an earlier run"
    assert [path.name for path in tmp_path.iterdir()] == ["losses.png"]


@pytest.mark.slow
def test_explain_and_plot_schedule_show_the_schedule_before_training(few_digits, capsys, tmp_path, monkeypatch):
    picture = tmp_path / "schedule.svg"
    monkeypatch.setattr(ipu_jax, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*CONCURRENT, *TINY, "--explain", "--plot-schedule", str(picture), "--replicas", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("grouped: 3 stages on 2 IPUs, 5 micro-batches")
    assert "IPU 0  " in lines[5]
    (columns,) = (number for number, line in enumerate(lines) if re.match("IPU +weights ", line))
    assert [line.split()[0] for line in lines[columns + 1 : columns + 3]] == ["0", "1"]
    (sent,) = (number for number, line in enumerate(lines) if re.match("stage +task +collective +axis ", line))
    assert re.fullmatch(r"classifier +F and B +all-\w+ +ipu +\d x .*", lines[sent + 1])
    assert lines[-1] == f"Schedule: {picture}"
    explained = "\n".join(lines[1 : columns - 1])  # the report begins with a line above its columns
    assert picture.read_text() == Schedule.from_text(explained).to_svg()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a whole training, minutes on a busy machine
@pytest.mark.parametrize("seed", [0, 1])
def test_the_defaults_learn_without_a_spike(seed, monkeypatch, tmp_path, capsys):
    """Test on scikit-learn's digits: the original's defaults made the loss jump to 54, and ended with 10%."""
    digits = load_mnist(cache_dir=tmp_path, mirrors=())
    monkeypatch.setattr(data, "load_mnist", lambda data_dir: digits)
    results, run = [], training.TrainingRun.run
    monkeypatch.setattr(training.TrainingRun, "run", lambda *args: results.append(run(*args)) or results[-1])
    assert main(["--seed", str(seed)]) == 0
    assert re.search(r"^9\d\.\d\d% is good: 95% or more is expected$", capsys.readouterr().out, re.M)
    losses = results[0].losses
    assert losses.max() < losses[0] + 0.2
    assert losses[-10:].mean() < 0.3


# what it refuses


def refused(argv, capsys):
    """Return the one line that is printed at an exit with status 2."""
    jax.devices()  # the backend runs with 8 IPUs: more cannot be made
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("run-sharded-mnist: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("argv", "holds"),
    [
        (["--ipus", "9"], ("--ipus 9", "already started", "configure(9)", "JAX_NUM_CPU_DEVICES=9")),
        (
            ["--ipus", "5", "--replicas", "2"],
            ("--ipus 5 x --replicas 2", "already started", "configure(10)", "JAX_NUM_CPU_DEVICES=10"),
        ),
        (["--replicas", "6"], ("5 x --replicas 6", "120 images", "there are 103", "lower one of the three")),
        (["--trace", "x", "--run-single-step"], ("--trace", "--run-single-step makes no other", "give one")),
        (["--trace", __file__], (f"--trace {__file__}", "is not a folder", "give one")),
        (["--trace", "x", "--trace-steps", "5"], ("--trace records 5", "ask for 5", "more --epochs", "--trace-steps")),
        (
            ["--compare", "--plot-schedule", "x.png", "--plot", "./x-concurrent.png"],
            ("--plot-schedule would write x-concurrent.png", "--plot", "different names"),
        ),
        (["--report", "run.txt"], ("--report run.txt", "has the wrong suffix", "ends in .html")),
        (["--log-file", "missing/run.jsonl"], ("--log-file missing/run.jsonl", "there is no folder missing")),
        (["--log-file", "notes.jsonl"], ("notes.jsonl", "is not the log of a run", "line 1")),
        (["--compile-for", "v9:2x2"], ("--compile-for 'v9:2x2'", "is not known", "give one such as v5e:4x4")),
        (["--compile-for", "h100x9"], ("--compile-for 'h100x9'", "whole number of hosts with 8 GPUs", "give h100x8")),
        (["--compile-for", "v5e:2x2", "--trace", "x"], ("--trace", "--compile-for starts none", "give one")),
        (["--report", "a.html", "--compare"], ("--report", "--compare makes two", "give ")),
        (["--data-dir", "broken"], ("broken/t10k-images-idx3-ubyte.gz", "is broken or truncated")),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_data_devices_and_folders_refuse_is_one_line_before_anything_is_compiled(
    argv, holds, capsys, nothing_runs, few_digits, tmp_path, monkeypatch
):
    """Lines that need no files are in tests/project/wrong_command_lines.txt."""
    monkeypatch.chdir(tmp_path)
    notes = tmp_path / "notes.jsonl"
    notes.write_text("hello\n")
    write_digits(tmp_path / "broken", synthetic_mnist(0, 7, 3))
    broken = tmp_path / "broken/t10k-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:-100])
    flags = TINY if "--data-dir" not in argv else TINY[1:]
    line = refused([*CONCURRENT, *flags, *argv], capsys)
    assert [text for text in holds if text not in line] == [], line
    assert notes.read_text() == "hello\n"


@pytest.mark.skipif(not folder_of("tpu"), reason="needs libtpu: make aot")
def test_both_modes_compile_for_chips_that_are_not_there():
    flags = "--compare --replicas 2 --compile-for v5e:2x2 --batch-size 3 --gradient-accumulation-count 5"
    command = [sys.executable, "-m", "mnist_example.run_sharded_mnist", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    of_modes = done.stdout.split("\n\nTrainStep")
    assert len(of_modes) == 2
    # F of the layers on one IPU, of 5 micro-batches of 3 images; the classifier adds little
    layers = 2 * 5 * 3 * (784 * 2560 + 2560 * 1280) / 1e6
    for report in of_modes:
        assert "4 x TPU v5 lite" in report
        found = re.search(r"F ([\d.]+) MFLOP", report)
        assert found is not None
        assert layers <= float(found[1]) <= 1.01 * layers


@pytest.mark.parametrize(
    "given",
    [
        [*SYNTHETIC, "--compare"],
        [*CONCURRENT, *TINY, "--plot-schedule", "x.svg"],
        [*CONCURRENT, *TINY, "--report", "x.html"],
    ],
)
def test_a_flag_that_draws_says_that_matplotlib_is_missing(given, capsys, nothing_runs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    flag = next(one for one in given if one in ("--compare", "--plot-schedule", "--report"))
    line = f"{flag} needs matplotlib, which is not installed: pip install 'ipu-jax[plots]', or leave it out"
    assert refused(given, capsys) == line


# how it ends


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (
            NonFiniteLossError("update 3 was not finite", 3, None),
            *(1, "update 3 was not finite: training diverged; use a learning rate below 0.5"),
        ),
        (SaveError("saving step-4 failed"), 74, "saving step-4 failed"),
        (CheckpointError("no step-4"), 2, "--checkpoint-dir: no step-4"),
    ],
)
def test_an_error_of_the_training_is_one_line_and_a_status(error, status, told, few_digits, monkeypatch, capsys):
    def fail(*args, **how):
        raise error

    monkeypatch.setattr(ipu_jax, "fit", fail)
    assert main([*CONCURRENT, *TINY, "--learning-rate", "0.5"]) == status
    assert capsys.readouterr().err == f"run-sharded-mnist: {told}\n"


def test_a_training_whose_last_loss_is_not_finite_does_not_look_like_a_success(few_digits, monkeypatch, capsys):
    def fit(step, state, feed, **how):
        losses = np.array([2.3, np.nan], np.float32)
        return ipu_jax.steps.FitResult(state, 2, losses, [(2, {"accuracy": 0.1})], skipped=1)

    monkeypatch.setattr(ipu_jax, "fit", fit)
    assert main([*CONCURRENT, *TINY, "--learning-rate", "0.5", "--on-nonfinite", "skip"]) == 1
    told = "the last loss is nan: training diverged; use a learning rate below 0.5"
    assert capsys.readouterr().err == f"run-sharded-mnist: {told}\n"


def start(*flags):
    """Start the script as a new user does, from the root of the repository."""
    command = [*HEEDING, sys.executable, "mnist_example/run_sharded_mnist.py", *CONCURRENT, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUM_CPU_DEVICES")
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_it_runs_as_a_script_and_makes_its_own_ipus(tmp_path):
    write_digits(tmp_path / "digits", synthetic_mnist(0, 7, 3))
    flags = ("--data-dir", str(tmp_path / "digits"), "--batch-size", "3", "--gradient-accumulation-count", "2")
    with start("--run-single-step", "--ipus", "3", *flags) as process:
        out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert_lines(
        out,
        rf"concurrent pipeline on 3 IPUs, grouped; MNIST from --data-dir {tmp_path}/digits: 1 updates per epoch, .*",
        COMPILED,
        r"Epoch 1\.0, Mean loss: 2\.\d{3}",
        *final(1, 1, "of the test images are classified correctly"),
    )


@pytest.mark.parametrize(
    ("flags", "mend"),
    [([], "--checkpoint-dir FOLDER"), (["--compare"], "--checkpoint-dir FOLDER, without --compare"),
     (["--checkpoint-dir", "saved"], None)],
)  # fmt: skip
def test_after_ctrl_c_it_says_how_to_save(flags, mend, few_digits, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ipu_jax, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, *flags])
    line = f"run-sharded-mnist: nothing was saved: give {mend}, and the same command goes on from there\n"
    assert capsys.readouterr().err == (line if mend else "")


@pytest.mark.slow
def test_ctrl_c_ends_the_call_and_a_second_one_does_not_wait_for_it():
    for presses in (1, 2):
        with start("--synthetic-data", "--repeat-count", "200") as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("Compiled"):
                pass
            for _ in range(presses):
                time.sleep(1)
                process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
            out, err = process.communicate(timeout=240)
        assert process.returncode == 130
        assert err.startswith("Ctrl-C: stopping after this step; once more ends at once\n")
        said = re.search(r"^Ctrl-C: stopped after [\d,]+ of 2,811 updates; nothing was saved$", out, re.MULTILINE)
        assert bool(said) == (presses == 1)
        assert presses == 2 or err.endswith("give --checkpoint-dir FOLDER, and the same command goes on from there\n")
        assert presses == 1 or time.monotonic() - pressed < 10  # the call takes a minute


@pytest.mark.slow
def test_a_trace_that_fails_leaves_the_training_and_is_told(few_digits, tmp_path, capsys, monkeypatch):
    def fail(self):
        if self._state != "finished":
            self._stop()
            self._state = "finished"
            raise TraceError("the disk is full")

    monkeypatch.setattr(Recording, "finish", fail)
    assert main([*CONCURRENT, *TINY, "--trace", str(tmp_path / "trace")]) == 74
    out = capsys.readouterr().out
    assert "There is no trace: the disk is full\n" in out
    assert "Test accuracy: " in out
