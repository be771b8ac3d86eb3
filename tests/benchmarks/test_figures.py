"""Test what `make bench` concludes from figures: bounds, ratios of rounds, and differences of results."""

import numpy as np
import pytest

from figures import Bounds, Cost, Costs, Figures, Program, largest_relative_difference, side_by_side


def test_figures_outside_their_bounds_fail_the_check_by_name(capsys: pytest.CaptureFixture[str]):
    figures, unchecked = Figures("", ["--check"]), Figures("", [])
    unchecked.add("cost", 2.0, 1.0)
    figures.add("cost", 1.02, 1.03)
    figures.add("speed-up", 0.97, at_least=0.97)
    figures.add("told", 7.0)
    figures.add_spread("steady", Costs([Cost(10, 1), Cost(100, 2), Cost(11, 3)]))  # the median over the least
    assert (figures.status(), unchecked.status()) == (0, 0)
    figures.add("memory", 1.10, 1.05)
    figures.add("slow", 0.96, 1.05, at_least=0.97)
    figures.add("no number", float("nan"), 1.0)
    figures.add("no number either", float("nan"), at_least=1.0)
    figures.add_spread("other", Costs([Cost(10, 1), Cost(12, 2), Cost(100, 3)]))
    assert figures.status() == 1
    printed = capsys.readouterr()
    short = ("memory", "slow", "no number", "no number either", "median / least step time, other")
    assert printed.err == f"falls short: {'; '.join(short)}\n"
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert lines[:2] == ["cost 2 <= 1 FALLS SHORT", "cost 1.02 <= 1.03"]
    assert lines[6] == "slow 0.96 >= 0.97 and <= 1.05 FALLS SHORT"


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    ours = Costs([Cost(1, 9), Cost(80, 8), Cost(3, 1)])
    theirs = Costs([Cost(2, 3), Cost(100, 2), Cost(1, 2)])
    assert ours / theirs == Cost(0.8, 3)  # of 0.5, 0.8, 3 and of 3, 4, 0.5; of the medians 1.5 and 4
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _ = ours / Costs(theirs.calls[:2])


def test_a_call_s_rounds_are_its_own_and_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * clock[0])
    seconds = {"a": iter([100.0, 1.0, 2.0]), "b": iter([200.0, 10.0, 30.0])}

    def run(name: str) -> None:
        clock[0] += next(seconds[name])

    costs = side_by_side(lambda: run("a"), lambda: run("b"), rounds=2, warm_up=1)
    assert [cost.calls for cost in costs] == [[Cost(1, 2), Cost(2, 4)], [Cost(10, 20), Cost(30, 60)]]


class Step:
    """A stand-in for a compiled step that adds `error`."""

    def __init__(self, temporary: int, error: float = 0.0):
        self.error, self.temp_size_in_bytes = error, temporary

    def memory_analysis(self) -> "Step":
        return self

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x + self.error


def test_programs_stand_beside_the_unsharded_one(capsys: pytest.CaptureFixture[str]):
    figures = Figures("", ["--check"])
    figures.add_beside_unsharded(
        "model",
        Program(Step(100), (np.array(4.0),)),
        {
            "ours": Program(Step(50), (np.array(2.0),), comparable=lambda result: 2 * result),
            "wrong": Program(Step(200, error=1.0), (np.array(4.0),)),
        },
        {"ours": Bounds(bytes=0.4)},
        most_difference=0.1,
        rounds=3,
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if "difference" in line or "bytes" in line] == [
        "loss and gradients / unsharded, model, ours, relative difference 0 <= 0.1",
        "loss and gradients / unsharded, model, wrong, relative difference 0.25 <= 0.1 FALLS SHORT",
        "temporary bytes an IPU / unsharded, model, ours 0.5 <= 0.4 FALLS SHORT",
        "temporary bytes an IPU / unsharded, model, wrong 2",
    ]
    assert figures.status() == 1


def test_the_difference_is_relative_to_the_leaf():
    found, expected = [np.array([10.0, 11.0]), np.array(1.5)], [np.array([10.0, 10.0]), np.array(1.0)]
    assert largest_relative_difference(found[:1], expected[:1]) == pytest.approx(0.1)
    assert largest_relative_difference(found, expected) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"\(2, 1\).* and \[\(2,\)\] are expected: compare like"):
        largest_relative_difference([np.ones((2, 1))], [np.ones(2)])
    without = [np.array([1.0, 2.0])] * 3
    for place in range(3):  # NaN differs in whichever leaf it is
        spoilt = [*without[:place], np.array([1.0, np.nan]), *without[place + 1 :]]
        assert np.isnan(largest_relative_difference(spoilt, without))
        assert np.isnan(largest_relative_difference(without, spoilt))
