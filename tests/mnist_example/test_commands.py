"""Test the installed commands: they start their programs, and without their packages they say what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from mnist_example import benchmark_dataset, commands, run_sharded_mnist

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "run-sharded-mnist": (commands.run_sharded_mnist, run_sharded_mnist),
    "benchmark-dataset": (commands.benchmark_dataset, benchmark_dataset),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_its_program_and_ends_with_its_status(command, monkeypatch):
    start, program = COMMANDS[command]
    monkeypatch.setattr(program, "main", lambda: 5)
    assert start() == 5


@pytest.mark.parametrize(("command", "package"), [("run-sharded-mnist", "rich"), ("benchmark-dataset", "pooch")])
def test_without_a_package_a_command_says_what_to_install(command, package):
    start = COMMANDS[command][0].__name__
    code = (
        f"import sys; sys.modules[{package!r}] = None; from mnist_example import commands; sys.exit(commands.{start}())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    message = f"{command} needs {package}, which is not installed: pip install 'ipu-jax[mnist]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
