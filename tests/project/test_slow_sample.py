"""Test the sample of the slow tests: it depends on the seed only, and over many seeds all tests run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(32))
def test_many(i): pass

@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("i", range(7))
def test_some(i): pass

@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("i", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 12))])
def test_few(i): pass

@pytest.mark.slow
def test_alone(): pass

@pytest.mark.slow(sampled=False)
def test_long(): pass

def test_quick(): pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_a.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")

    def of(*flags: str) -> tuple[set[str], str]:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout
        names = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "PASSED" in line}
        return names, next(line for line in done.stdout.splitlines() if line.startswith("slow tests: "))

    return of


def cases(names: set[str], function: str) -> set[str]:
    return {name for name in names if name.startswith(f"{function}[")}


def test_a_sample_holds_some_of_each_and_the_seed_decides_which(run):
    found = [run("--slow-seed", str(seed)) for seed in range(4)]
    for seed, (names, line) in enumerate(found):
        assert line == f"slow tests: a sample, drawn by --slow-seed {seed}"
        assert "test_quick" in names
        assert "test_long" not in names
        assert (len(cases(names, "test_many")), len(cases(names, "test_some")) in (2, 3)) == (2, True)
        assert len(cases(names, "test_few")) == 3, "two of four, and one of eight"
    assert len({frozenset(cases(names, "test_many")) for names, _ in found}) > 1
    assert {"test_alone" in names for names, _ in found} == {True, False}
    assert run("--slow-seed", "2")[0] == found[2][0]


def test_workers_draw_the_sample_of_their_run(run):
    names, line = run("-n", "2")
    assert run("--slow-seed", line.split()[-1])[0] == names


def test_all_of_them_run_when_asked_for(run):
    names, line = run("--slow=all")
    assert (len(names), line) == (32 + 7 + 12 + 3, "slow tests: all")
