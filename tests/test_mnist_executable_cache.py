"""The executable cache: a second start of the command compiles nothing, and jax is left as it was found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mnist_example.executable_cache import ExecutableCache

ROOT = Path(__file__).parents[1]

# The command on so few images that it takes no time.
COMMAND = """
import sys
from mnist_example import run_sharded_mnist
from mnist_example.data import synthetic_mnist
run_sharded_mnist.synthetic_mnist = lambda seed: synthetic_mnist(seed, 103, 25)
sys.exit(run_sharded_mnist.main(sys.argv[1:]))
"""
FLAGS = "--pipeline-mode concurrent --synthetic-data --batch-size 4 --gradient-accumulation 5 --run-single-step"


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    folder = tmp_path / "made" / "by it"
    command = [sys.executable, "-W", "error", "-c", COMMAND, *FLAGS.split(), "--executable-cache", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = []
    for _ in range(2):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
        assert run.stderr == ""
        lines = run.stdout.splitlines()
        compiled = re.fullmatch(r"Compiled in \d+\.\d s; executable cache: (\d+) hits, (\d+) misses", lines[1])
        at_the_end = re.fullmatch(r"With evaluation, executable cache: (\d+) hits, (\d+) misses", lines[-1])
        assert compiled, lines[1]
        assert at_the_end, lines[-1]
        learned = [line for line in lines if line.startswith("Epoch")]
        told.append(([int(n) for n in compiled.groups()], [int(n) for n in at_the_end.groups()], learned))
    (first, first_end, first_learned), (second, second_end, second_learned) = told
    assert first_end[1] > first[1] > 0
    assert second == [sum(first), 0]
    assert second_end == [sum(first_end), 0]
    assert first_learned == second_learned


def test_a_program_is_compiled_once_and_jax_is_left_as_it_was(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    first, second = ExecutableCache(tmp_path), ExecutableCache(tmp_path)
    for cache in (first, second):
        with cache:
            jax.jit(lambda x: 7 * x - 2).lower(1.0).compile()
    assert (first.hits, first.misses) == (0, 1)
    assert str(second) == "executable cache: 1 hits, 0 misses"
    assert {name: jax.config.values[name] for name in names} == before
    files = sorted(tmp_path.iterdir())
    jax.jit(lambda x: 7 * x - 3).lower(1.0).compile()
    assert sorted(tmp_path.iterdir()) == files
    assert (second.hits, second.misses) == (1, 0)
