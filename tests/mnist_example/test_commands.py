"""Test the commands as processes, which packages they miss and whose code they run; and the one that only reads."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mnist_example import benchmark_dataset, data, run_sharded_mnist
from mnist_example.data import synthetic_mnist
from support.mnist_instance import Terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.fast("run-sharded-mnist-requests")
@pytest.mark.parametrize(
    ("program", "package"),
    [("run-sharded-mnist", "requests"), ("run-sharded-mnist", "flax"), ("benchmark-dataset", "pooch")],
)
def test_without_a_package_a_command_says_what_to_install(program, package):
    module = program.replace("-", "_")
    code = f"""
import sys
sys.modules[{package!r}] = None
from mnist_example.{module} import command
sys.argv = ["", "--synthetic-data"]
command()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    message = f"{program} needs {package}, which is not installed: pip install 'ipu-jax[mnist]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "mnist_example", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()[0]) == (0, "run-sharded-mnist")


@pytest.mark.parametrize(("main", "most"), [(run_sharded_mnist.main, 90), (benchmark_dataset.main, 60)])
def test_help_fits_two_screens_with_examples_first_and_help_all_explains_more(main, most, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main([flag])
        texts.append(capsys.readouterr().out)
    lines = texts[0].splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("    ") for line in lines[: lines.index("options:")]) >= 2
    flags_of = lambda text: re.findall(r"^  (--\S+)", text, re.MULTILINE)
    assert flags_of(texts[0]) == flags_of(texts[1])
    assert "32 for a resnet" in texts[1]
    assert "32 for a resnet" not in texts[0]
    assert "--bs for --batch-size" in " ".join(texts[1].split())


@pytest.mark.fast("tests/sharded_matmul_tool.py", "run_sharded_mnist.py")
@pytest.mark.parametrize(
    "script",
    [
        "tests/sharded_embedding_tool.py",
        "tests/sharded_matmul_tool.py",
        "run_sharded_mnist.py",
        "mnist_example/run_sharded_mnist.py",
        "mnist_example/benchmark_dataset.py",
    ],
)
def test_a_script_runs_the_packages_of_its_own_checkout(script, tmp_path):
    for package in ("ipu_jax", "sharded_ops", "mnist_example"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('what is installed')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / script), "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(Path(script).stem.replace("_", "-"))


# the command that only reads the data: its printed lines

TINY = ["--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5"]
SPEED = r"in \d+\.\d\d s, [\d,]+ samples/s, [\d,]+\.\d\d MB/s"


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """Use synthetic data of 103 images, so that an epoch takes almost no time."""
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))


@pytest.mark.parametrize(
    ("flags", "whom", "lines"),
    [
        # an epoch is 2, 2 and 1 updates of 20 images; 0.4 of it is one call
        *((flags, "4 IPUs: 5 updates", [100, 100, 40]) for flags in ("", "--no-eight-bit-io", "--async-dataloader")),
        ("--async-dataloader --num-workers 3", "4 IPUs: 5 updates", [100, 100, 40]),
        ("--replicas 2 --epochs 1", "2 replicas of 4 IPUs: 2 updates", [80]),
        # nothing is compiled for the model
        ("--model resnet18 --run-single-step", "4 IPUs: 5 updates", [20]),
    ],
)
def test_a_line_follows_every_epoch(flags, whom, lines, capsys):
    assert benchmark_dataset.main([*TINY, "--epochs", "2.4", "--repeat-count", "2", "--ipus", "4", *flags.split()]) == 0
    header, *found = capsys.readouterr().out.splitlines()
    of_each = " on each" if "replicas" in whom else ""
    assert header == f"synthetic data, seed 0, to {whom} per epoch, each of 5 micro-batches of 4{of_each}"
    if len(lines) > 1:
        last = found.pop()
        assert re.fullmatch(
            rf"In all: {sum(lines)} samples in \d+\.\d\d s, [\d,]+ samples/s \(median of epochs\)", last
        )
        speeds = sorted(int(line.split(", ")[1].split()[0].replace(",", "")) for line in found)
        assert int(last.split(", ")[1].split()[0].replace(",", "")) == speeds[len(speeds) // 2]
    for k, (line, samples) in enumerate(zip(found, lines, strict=True)):
        assert re.fullmatch(rf"Epoch {k + 1}: {samples} samples {SPEED}", line), line
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
def test_a_part_of_an_epoch_counts_its_own_samples(epochs, repeat_count, samples, flags, monkeypatch, capsys):
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 2060, 25))
    flags = [*flags, "--batch-size", "16", "--gradient-accumulation-count", "2", "--repeat-count", repeat_count]
    assert benchmark_dataset.main(["--synthetic-data", *flags, "--epochs", epochs]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("In all")]
    assert [line.split(" in ")[0] for line in lines] == [f"Epoch {k + 1}: {n:,} samples" for k, n in enumerate(samples)]


@pytest.mark.parametrize("flags", [[], ["--no-progress"]])
def test_there_is_a_bar_on_a_terminal_unless_it_is_not_wanted(flags, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert benchmark_dataset.main([*TINY, "--epochs", "1", *flags]) == 0
    assert ("5/5" in terminal.getvalue()) == (flags == [])
    assert ("\x1b" in terminal.getvalue()) == (flags == [])
