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
from random_programs.worker import failure_of

SEED = 5
OF_LAYOUTS = 8  # 24 cases of it notice each of 22 faults that were made on purpose

# how many cases of each kind
CASES = {"ops": 36, "pipelines": 22, "schedules": 12, "training": 12, "functions": 21, "layouts": 60}
assert CASES.keys() == {*run.KINDS}


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
    for kind, count in CASES.items():
        for case in range(count):
            yield pytest.param(kind, case, id=f"{kind}-{case}")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), list(_cases()))
def test_random_programs_equal_dense_ones(worker, kind, case):
    print(f"python tests/random_programs/run.py --kind {kind} --seed {SEED} --case {case}")
    outcome = worker().run(kind, SEED, case, timeout=240)
    assert not outcome.error, f"--kind {kind} --seed {SEED} --case {case}\n{outcome.error}"


@pytest.mark.parametrize("case", range(24))
def test_weights_keep_their_bits_on_any_layout(case):
    error = failure_of("layouts", OF_LAYOUTS, case)
    assert not error, f"--kind layouts --seed {OF_LAYOUTS} --case {case}\n{error}"


def test_tables_are_judged_as_the_schedule_judges_them():
    """Judge many tables, valid and spoilt, without running them; the cases above run some."""
    accepted = refused = 0
    for case in range(40):
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
    assert min(accepted, refused) > 50


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
FAILED = {
    "wrong": "AssertionError: off by 7",
    "dies": "the process died with exit code -9",
    "hangs": "hangs: no end after 1 s",
}


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "timeout"), [(("wrong", "fine", "dies"), 200), (("hangs",), 1)], ids=["", "hangs"])
def test_the_run_outlives_its_cases_and_names_those_that_failed(tmp_path, monkeypatch, capsys, kinds, timeout):
    (tmp_path / "made").mkdir()
    for kind in kinds:
        (tmp_path / "made" / f"{kind}.py").write_text(
            "class Case:\n    def __init__(self, dice): self.number = dice.number()\n"
            f"    def __str__(self): return 'a case'\n    def check(self): {CASES_MADE_FOR_THIS[kind]}\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = argparse.Namespace(kind=tuple(f"made.{kind}" for kind in kinds), seed=3, case=7, first=0, timeout=timeout)
    assert run.Run(asked).go() == 1
    said = capsys.readouterr().out
    for kind in kinds:
        command, has_failed = f"run.py --kind made.{kind} --seed 3 --case 7\n", kind in FAILED
        assert (f"FAILED: python tests/random_programs/{command}" in said) == has_failed
        assert (f"FAILED  python tests/random_programs/{command}" in said) == has_failed
        assert FAILED.get(kind, "") in said
        assert f"made.{kind} 1 ({int(has_failed)} failed)" in said
