"""Test that a run says what CPU time it took, with all its processes, and which tests took too much."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os
from support.cpu_budget import Bounds, CpuBudget

def pytest_configure(config):
    run = float(os.environ["MINUTES"])
    config.pluginmanager.register(CpuBudget(strict="STRICT" in os.environ, bounds=Bounds(0.3, run)))
"""
TESTS = """
import subprocess, sys, pytest

BURN = "import time\\nwhile time.process_time() < 0.4: pass"

@pytest.fixture
def burnt():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_of_a_child(): subprocess.run([sys.executable, "-c", BURN], check=True)
def test_of_a_fixture(burnt): pass
@pytest.mark.slow
def test_that_may(burnt): pass
def test_quick(): pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_a.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers = slow: takes long\npythonpath = {ROOT / 'tests'}\n")

    def run(*flags: str, **variables: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *flags]
        environment = {"PATH": "/usr/bin:/bin", "MINUTES": "60", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
def test_tests_above_the_bound_are_named_and_all_processes_count(run):
    status, printed = run("-n", "2")
    named = re.findall(r"^ +([\d.]+) s  test_a\.py::(\w+)$", printed, re.M)
    assert {name for _, name in named} == {"test_of_a_child", "test_of_a_fixture"}
    assert all(float(seconds) >= 0.4 for seconds, _ in named)
    pattern = r"^CPU time: ([\d.]+) minutes \(bound (\d+)\); (\d) fast tests above"
    ((minutes, bound, over),) = re.findall(pattern, printed, re.M)
    assert float(minutes) * 60 > 3 * 0.4  # three tests burn it, and pytest itself takes some
    assert (bound, over, status) == ("60", "2", 0)


@pytest.mark.parametrize(
    ("flags", "minutes", "status"), [((), "60", 1), (("-k", "quick"), "60", 0), (("-k", "quick"), "0.0001", 1)]
)
def test_a_strict_run_fails_by_a_test_or_by_all(run, flags, minutes, status):
    assert run(*flags, STRICT="1", MINUTES=minutes)[0] == status
