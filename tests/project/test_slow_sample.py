"""Test which of the slow tests run: a fixed few of them, all, or one of the parts that together are all."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(43))
def test_many(i): pass

@pytest.mark.parametrize("i", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 9))])
def test_some(i): pass

@pytest.mark.slow
def test_alone(): pass

def test_quick(): assert "optimization_level=0" in os.environ["XLA_FLAGS"] or "all" in os.environ["ASKED"]
"""
# One process for several runs: it takes a second to start, and a run takes none.
RUNS = """
import os, sys, pytest
flags_before = os.environ.get("XLA_FLAGS", "")
for flags in sys.argv[1:]:
    print("run of", flags)
    os.environ.update(XLA_FLAGS=flags_before, ASKED=flags)
    print("status", int(pytest.main(["-v", "-p", "no:cacheprovider", *flags.split()])))
"""


@pytest.fixture(scope="module")
def printed_by(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_a.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")

    def of(*flags: str) -> list[str]:
        """Return what is printed by a run with each of the flags."""
        command = [sys.executable, "-c", RUNS, *flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = done.stdout.split("run of ")[1:]
        assert len(printed) == len(flags)
        return printed

    return of


def names_of(printed: str) -> list[str]:
    assert "status 0" in printed, printed
    return sorted(re.findall(r"test_a.py::(\S+)[^\n]* PASSED", printed))


QUICK = ["test_quick", "test_some[0]"]
SLOW = sorted([*(f"test_many[{i}]" for i in range(43)), *(f"test_some[{i}]" for i in range(1, 9)), "test_alone"])


def test_the_sample_is_fixed_and_the_parts_are_all(printed_by):
    sample, everything, *fifths = map(names_of, printed_by("", "--slow=all", *(f"--slow={k}/5" for k in range(5))))
    assert everything == sorted(QUICK + SLOW)
    # Written down: it is the same on every machine, with every Python, each time.
    assert sample == sorted(["test_many[19]", "test_many[39]", "test_some[6]", *QUICK])
    assert sorted(name for fifth in fifths for name in fifth) == SLOW
    for fifth in fifths:
        assert sum(name.startswith("test_many") for name in fifth) in (8, 9), "a function's cases are spread evenly"


@pytest.mark.slow
def test_workers_run_the_part_of_their_run(printed_by):
    by_workers, alone = printed_by("-n 2 --slow=1/3", "--slow=1/3")
    assert sorted(set(re.findall(r"PASSED (?:\[.*\] )?test_a.py::(\S+)", by_workers))) == names_of(alone)


@pytest.mark.parametrize("workers", ["", pytest.param("-n 2", marks=pytest.mark.slow)])
def test_no_test_starts_after_the_deadline_and_their_number_is_said(printed_by, workers):
    past, future = printed_by(
        *(f"{workers} --slow=0/2 --slow-deadline {time.time() + seconds}" for seconds in (-1, 3600))
    )
    assert "\n27 tests did not run: later than --slow-deadline\n" in past
    assert re.search(r"= 27 skipped[, ]", past)
    assert "\n0 tests did not run: later than --slow-deadline\n" in future
    assert re.search(r"= 27 passed[, ]", future)


def test_other_values_are_refused(printed_by):
    for printed in printed_by(*(f"--slow={wrong}" for wrong in ("none", "5/5", "1/0", "-1/5", "1"))):
        assert "status 4" in printed
