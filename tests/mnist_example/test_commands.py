"""Test the commands as processes: without their packages they say what to install, and they run their own checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mnist_example import benchmark_dataset, run_sharded_mnist

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
