"""Run a sample of the random programs (docs/design/tests.md), and test the tools that run them.

`make random` draws other programs. Cases run in another process, so a crash or a hang only fails that case.
"""

import argparse
import functools

import numpy as np
import pytest

from ipu_jax.schedules import Schedule
from random_programs import run
from random_programs.closeness import assert_close
from random_programs.dice import Dice
from random_programs.judge import fault_of
from random_programs.schedules import spoil
from random_programs.tables import random_table

SEED = 5

# for each kind, how many cases always run, and how many more are slow
ALWAYS = {"ops": 1, "pipelines": 1, "schedules": 1, "training": 1, "modules": 1, "functions": 2}
MORE = {"ops": 71, "pipelines": 43, "schedules": 22, "training": 22, "modules": 21, "functions": 40}
assert ALWAYS.keys() == MORE.keys() == {*run.KINDS}


@pytest.fixture(scope="module")
def worker():
    started: list[run.Worker] = []

    def alive() -> run.Worker:
        if not started or not started[-1].alive:
            started.append(run.Worker())
        return started[-1]

    yield alive
    for each in started:
        each.end()


def _cases():
    for kind in ALWAYS:
        for case in range(ALWAYS[kind] + MORE[kind]):
            marks = () if case < ALWAYS[kind] else pytest.mark.slow
            yield pytest.param(kind, case, marks=marks, id=f"{kind}-{case}")


@pytest.mark.parametrize(("kind", "case"), list(_cases()))
def test_random_programs_equal_dense_ones(worker, kind, case):
    print(f"python tests/random_programs/run.py --kind {kind} --seed {SEED} --case {case}")
    outcome = worker().run(kind, SEED, case, timeout=240)
    assert not outcome.error, f"--kind {kind} --seed {SEED} --case {case}\n{outcome.error}"


def test_tables_are_judged_as_the_schedule_judges_them():
    """Judge many tables, valid and spoilt, without running them; the cases above run some."""
    accepted = refused = 0
    for case in range(80):
        dice = Dice("tables", SEED, case)
        placement = tuple(dice.one_of((0, 0, 1, 1, 2, None)) for _ in range(dice.between(1, 5)))
        table = random_table(np.random.default_rng(dice.number()), placement, dice.between(1, 5))
        assert not fault_of(placement, 3, table)
        for each in (table, *(spoil(dice, placement, table) for _ in range(6))):
            fault = fault_of(placement, 3, each)
            make = functools.partial(Schedule, "own", placement, 3, *each)
            if fault:
                refused += 1
                with pytest.raises(ValueError, match="schedule 'own'"):
                    make()
            else:
                accepted += 1
                schedule = make()
                assert Schedule.from_text(str(schedule)) == schedule
    assert min(accepted, refused) > 100


def test_a_leaf_that_is_another_ones_is_far_from_right():
    exact = {"a": np.ones((3, 3)), "b": 2 * np.ones((3, 3))}
    rounded = {name: leaf.astype(np.float32) for name, leaf in exact.items()}
    assert_close("gradients", rounded, exact, [rounded], 1e-7)
    with pytest.raises(AssertionError, match=r"gradients\['a'\] of shape \(3, 3\) is off by 1, where"):
        assert_close("gradients", {"a": rounded["b"], "b": rounded["a"]}, exact, [rounded], 1e-7)
    unknown = {**rounded, "b": np.full((3, 3), np.nan)}
    with pytest.raises(AssertionError, match=r"gradients\['b'\] has 9 numbers that are not finite, not 0"):
        assert_close("gradients", unknown, exact, [rounded], 1e-7)
    diverged = {**exact, "b": np.where(np.eye(3), np.nan, 2)}
    with pytest.raises(AssertionError, match=r"gradients\['b'\] has 0 numbers that are not finite, not 3"):
        assert_close("gradients", rounded, diverged, [rounded], 1e-7)
    assert_close("gradients", diverged, diverged, [diverged], 1e-7)


CASES_MADE_FOR_THIS = {
    "fine": "pass",
    "wrong": "raise AssertionError('off by 7')",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import time; time.sleep(600)",
}


@pytest.mark.parametrize(
    ("kind", "timeout", "error"),
    [
        ("fine", 200, ""),
        ("wrong", 200, "AssertionError: off by 7"),
        ("dies", 200, "the process died with exit code -9"),
        ("hangs", 1, "hangs: no end after 1 s"),
    ],
)
def test_the_run_outlives_its_cases_and_names_those_that_failed(tmp_path, monkeypatch, capsys, kind, timeout, error):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / f"{kind}.py").write_text(
        "class Case:\n    def __init__(self, dice): self.number = dice.number()\n"
        f"    def __str__(self): return 'a case'\n    def check(self): {CASES_MADE_FOR_THIS[kind]}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = argparse.Namespace(kind=(f"made.{kind}",), seed=3, case=7, first=0, timeout=timeout)
    assert run.Run(asked).go() == (1 if error else 0)
    said = capsys.readouterr().out
    command = f"python tests/random_programs/run.py --kind made.{kind} --seed 3 --case 7\n"
    assert (f"FAILED: {command}" in said, f"FAILED  {command}" in said) == (bool(error), bool(error))
    assert error in said
    assert f"made.{kind} 1 ({int(bool(error))} failed)" in said
