"""Test the commands as processes: without their packages they say what to install, and they run their own checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
sys.argv = ["", "--pipeline-mode", "basic", "--synthetic-data"]
command()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    message = f"{program} needs {package}, which is not installed: pip install 'ipu-jax[mnist]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    "script",
    [
        "tests/sharded_embedding_tool.py",
        "tests/sharded_matmul_tool.py",
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
