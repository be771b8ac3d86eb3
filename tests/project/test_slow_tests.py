"""Test which of the slow tests run: none of them, all, or one of the parts that together are all."""

import itertools
import os
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

@pytest.mark.fast("c", "e")
@pytest.mark.parametrize("name", "abcdef")
def test_named(name): pass

def test_quick(): assert "optimization_level=0" in os.environ["XLA_FLAGS"] or "all" in os.environ["ASKED"]
"""
# One process for several runs: it takes a second to start, and a run takes none.
RUNS = """
import os, sys, pytest
sys.stderr = sys.stdout
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
    (folder / "wrong.py").write_text(TESTS.replace('fast("c"', 'fast("g"'))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers = slow: takes long\npythonpath = {ROOT / 'tests'}\n")

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


QUICK = ["test_named[c]", "test_named[e]", "test_quick", "test_some[0]"]
SLOW = [*(f"test_many[{i}]" for i in range(43)), *(f"test_some[{i}]" for i in range(1, 9))]
SLOW = sorted([*SLOW, *(f"test_named[{name}]" for name in "abdf"), "test_alone"])


def test_a_plain_run_has_the_fast_tests_and_the_parts_are_all(printed_by):
    plain, everything, *fifths = map(names_of, printed_by("", "--slow=all", *(f"--slow={k}/5" for k in range(5))))
    assert everything == sorted(QUICK + SLOW)
    assert plain == sorted(QUICK)
    assert sorted(name for fifth in fifths for name in fifth) == SLOW
    for fifth in fifths:
        assert sum(name.startswith("test_many") for name in fifth) in (8, 9), "a function's cases are spread evenly"


@pytest.mark.slow
def test_workers_run_the_part_of_their_run(printed_by):
    by_workers, alone = printed_by("-n 2 --slow=1/3", "--slow=1/3")
    assert sorted(set(re.findall(r"PASSED (?:\[.*\] )?test_a.py::(\S+)", by_workers))) == names_of(alone)


def test_a_name_that_no_case_has_is_refused_unless_one_case_is_asked_for(printed_by):
    refused, alone = printed_by("wrong.py", "wrong.py::test_named[e]")
    assert "status 4" in refused
    assert "status 0" in alone
    assert "no case has the name that the mark fast gives: " in refused
    assert "{'g'}" in refused


def test_the_last_lines_say_the_cpu_time_and_fail_only_if_asked_to(printed_by):
    plain, strict = printed_by("-k quick", "-k quick --budget")
    for printed in (plain, strict):
        assert re.search(r"^CPU time: 0\.\d+ minutes \(bound [\d.]+\); 0 fast tests above [\d.]+ s$", printed, re.M)
        assert "status 0" in printed


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["", "-n 2"])
def test_no_test_starts_after_the_deadline_and_their_number_is_said(printed_by, workers):
    past, future = printed_by(
        *(f"{workers} --slow=0/2 --slow-deadline {time.time() + seconds}" for seconds in (-1, 3600))
    )
    assert "\n29 tests did not run: later than --slow-deadline\n" in past
    assert re.search(r"= 29 skipped[, ]", past)
    assert "\n0 tests did not run: later than --slow-deadline\n" in future
    assert re.search(r"= 29 passed[, ]", future)


@pytest.mark.slow
def test_other_values_are_refused(printed_by):
    for printed in printed_by(*(f"--slow={wrong}" for wrong in ("some", "5/5", "1/0", "-1/5", "1"))):
        assert "status 4" in printed


PYTHON = """#!/bin/sh
echo "${0##*.} $0"
"""
# It makes a virtual environment whose pytest says what it was asked for.
MAKE = """#!/bin/bash
for word; do case "$word" in VENV=*) venv="${word#VENV=}" ;; esac; done
mkdir -p "$venv/bin"
cat > "$venv/bin/python" <<'END'
#!/bin/bash
echo "asked: $0 $*"
[ -z "$LATE" ] || echo "$LATE tests did not run: later than --slow-deadline"
exit ${STATUS:-0}
END
chmod +x "$venv/bin/python"
"""


@pytest.fixture
def ci(tmp_path):
    """Return functions that commit to a repository with the script of CI, and run it there."""
    tools, repository = tmp_path / "tools", tmp_path / "repository"
    tools.mkdir()
    for name, text in (("make", MAKE), ("python3.11", PYTHON), ("python3.19", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", repository / ".ci")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull}

    def git(*words: str, cwd: Path = repository) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True, env=environment)

    def run(cwd: Path = repository, **variables: str) -> tuple[int, str]:
        command = [cwd / ".ci" / "run"]
        done = subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, timeout=60)
        return done.returncode, done.stdout

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return git, run


def asked_of(printed: str) -> tuple[str, str]:
    """Return the Python and the part of the slow tests that ran."""
    ((python, part),) = re.findall(r"^asked: \.venv-3\.(\d+)/bin/python -m pytest .*--slow=(\d+/15) ", printed, re.M)
    return python, part


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_fifteen_commits_run_each_part_and_the_next_fifteen_under_the_other_python(ci):
    git, run = ci
    asked, whole = [], []
    for _ in range(16):
        git("commit", "--allow-empty", "-m", "next")
        status, printed = run()
        assert status == 0
        asked.append(asked_of(printed))
        (part,) = re.findall(r"^== make test with .*python3\.(\d+) of what can differ between Pythons$", printed, re.M)
        whole += re.findall(r"^== make test with .*python3\.(\d+)$", printed, re.M)
        assert {part, whole[-1]} == {"11", "19"}
    assert all(one != other for one, other in itertools.pairwise(whole))
    assert sorted(part for _, part in asked[:15]) == sorted(f"{k}/15" for k in range(15))
    assert asked[0][1] == asked[15][1]
    assert {asked[0][0], asked[15][0]} == {"11", "19"}


def test_what_can_differ_between_pythons_is_there():
    (paths,) = re.findall(r'^differs="([^"]*)"$', (ROOT / ".ci" / "run").read_text(), re.M)
    assert [path for path in paths.replace("\\", "").split() if not (ROOT / path).exists()] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize(
    ("variables", "status", "last"),
    [
        ({"LATE": "0"}, 0, "0 failed, 0 tests of part 1/15 did not run in time"),
        ({"LATE": "17"}, 0, "0 failed, 17 tests of part 1/15 did not run in time"),
        ({"LATE": "17", "STATUS": "1"}, 1, "1 failed, 17 tests of part 1/15 did not run in time"),
        ({"STATUS": "3"}, 1, "1 failed, ? tests of part 1/15 did not run in time"),
    ],
)
def test_the_last_line_of_ci_says_how_many_tests_did_not_run(ci, variables, status, last):
    _, run = ci
    found, printed = run(**variables)
    assert found == status
    assert re.fullmatch(rf"== \d+ minutes, \d+ CPU minutes, {re.escape(last)}", printed.splitlines()[-1])


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_shallow_clone_does_not_count(ci, tmp_path):
    git, run = ci
    git("commit", "--allow-empty", "-m", "second")
    git("clone", "--depth", "1", f"file://{tmp_path / 'repository'}", str(tmp_path / "shallow"))
    status, printed = run(tmp_path / "shallow", LATE="0")
    assert status == 0
    assert "== a shallow clone does not know the count of commits: the hash decides" in printed
    assert asked_of(printed)[0] in ("11", "19")
