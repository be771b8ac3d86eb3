"""Test the sample of the slow tests: it depends on the seed only, and over many seeds all tests run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(40))
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


# One process for several runs: it takes a second to start, and a run takes none. "same" is the seed of the run before.
RUNS = """
import sys, pytest
class Seed:
    def pytest_configure(self, config): self.last = str(config.option.slow_seed)
seed = Seed()
for flags in sys.argv[1:]:
    print("run of", flags)
    given = flags.replace("same", getattr(seed, "last", "")).split()
    assert pytest.main(["-v", "-p", "no:cacheprovider", *given], plugins=[seed]) == 0
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_a.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")

    def of(*flags: str) -> list[tuple[set[str], str]]:
        """Return the tests that ran with each of the flags, and the line about the sample."""
        command = [sys.executable, "-c", RUNS, *flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        found = []
        for printed in done.stdout.split("run of ")[1:]:
            lines = printed.splitlines()
            names = {re.findall(r"::(\S+)", line)[0] for line in lines if "PASSED" in line}
            found.append((names, next(line for line in lines if line.startswith("slow tests: "))))
        assert len(found) == len(flags)
        return found

    return of


def cases(names: set[str], function: str) -> set[str]:
    return {name for name in names if name.startswith(f"{function}[")}


def test_a_sample_holds_some_of_each_and_the_seed_decides_which(runs):
    *found, again, everything = runs(*(f"--slow-seed {seed}" for seed in (0, 1, 2, 3, 2)), "--slow=all")
    for seed, (names, line) in enumerate(found):
        assert line == f"slow tests: a sample, drawn by --slow-seed {seed}"
        assert "test_quick" in names
        assert "test_long" not in names
        assert (len(cases(names, "test_many")), len(cases(names, "test_some")) in (2, 3)) == (2, True)
        assert len(cases(names, "test_few")) == 3, "two of four, and one of eight"
    assert len({frozenset(cases(names, "test_many")) for names, _ in found}) > 1
    assert {"test_alone" in names for names, _ in found} == {True, False}
    assert again == found[2]
    names, line = everything
    assert (len(names), line) == (40 + 7 + 12 + 3, "slow tests: all")


@pytest.mark.slow
def test_workers_draw_the_sample_of_their_run(runs):
    by_workers, alone = runs("-n 2", "--slow-seed same")
    assert by_workers == alone
