"""Test the benchmarks' printed lines and their exit status."""

import numpy as np
import pytest

from figures import Bounds, Cost, Costs, Figures, Program, largest_relative_difference, least, side_by_side


def test_a_figure_above_its_bound_fails_the_check_by_name(capsys: pytest.CaptureFixture[str]):
    figures = Figures("", ["--check"])
    figures.add("cost", 1.02, 1.03)
    assert figures.status() == 0
    figures.add("memory", 1.10, 1.05)
    assert figures.status() == 1
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["cost", "1.02", "<=", "1.03"],
        ["memory", "1.1", "<=", "1.05", "FALLS", "SHORT"],
    ]
    assert printed.err == "falls short: memory\n"


def test_a_figure_below_its_bound_fails_the_check_by_name(capsys: pytest.CaptureFixture[str]):
    figures = Figures("", ["--check"])
    figures.add("speed-up", 0.97, at_least=0.97)
    figures.add("agreement", 1.01, 1.05, at_least=0.95)
    assert figures.status() == 0
    figures.add("too slow", 0.96, at_least=0.97)
    assert figures.status() == 1
    printed = capsys.readouterr()
    assert [line.split("  ")[0] for line in printed.err.splitlines()] == ["falls short: too slow"]
    assert [" ".join(line.split()) for line in printed.out.splitlines()] == [
        "speed-up 0.97 >= 0.97",
        "agreement 1.01 >= 0.95 and <= 1.05",
        "too slow 0.96 >= 0.97 FALLS SHORT",
    ]


@pytest.mark.parametrize("bound", [{"at_most": 1.0}, {"at_least": 1.0}])
def test_not_a_number_falls_short(bound: dict[str, float]):
    figures = Figures("", ["--check"])
    figures.add("cost", float("nan"), **bound)
    assert figures.status() == 1


def test_without_check_the_status_is_0_and_a_figure_may_have_no_bound():
    figures = Figures("", [])
    figures.add("cost", 2.0, 1.0)
    figures.add("told", 2.0)
    assert figures.status() == 0


def test_a_script_may_have_flags_of_its_own():
    figures = Figures("", ["--only", "torch"], lambda parser: parser.add_argument("--only"))
    assert figures.args.only == "torch"


def test_the_least_of_clock_and_of_work_are_taken_apart():
    assert least([Cost(1.0, 4.0), Cost(2.0, 3.0)]) == Cost(1.0, 3.0)


def test_side_by_side_runs_each_call_in_every_round():
    counts = [0, 0]

    def call(k: int) -> int:
        counts[k] += 1
        return k

    costs = side_by_side(lambda: call(0), lambda: call(1), rounds=3)
    assert counts == [5, 5]
    assert [len(cost.calls) for cost in costs] == [3, 3]
    assert all(0 <= cost.wall < 1 for cost in costs)


def test_a_call_s_rounds_are_its_own_and_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * clock[0])
    seconds = {"a": iter([100.0, 1.0, 2.0]), "b": iter([200.0, 10.0, 30.0])}

    def run(name: str) -> None:
        clock[0] += next(seconds[name])

    costs = side_by_side(lambda: run("a"), lambda: run("b"), rounds=2, warm_up=1)
    assert [cost.calls for cost in costs] == [[Cost(1, 2), Cost(2, 4)], [Cost(10, 20), Cost(30, 60)]]


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    ours = Costs([Cost(1, 9), Cost(80, 8), Cost(3, 1)])
    theirs = Costs([Cost(2, 3), Cost(100, 2), Cost(1, 2)])
    assert ours / theirs == Cost(0.8, 3)  # of 0.5, 0.8, 3 and of 3, 4, 0.5; of the medians 1.5 and 4
    assert (ours.wall, ours.cpu) == (3, 8)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _ = ours / Costs(theirs.calls[:2])


def test_a_spread_is_the_median_over_the_least(capsys: pytest.CaptureFixture[str]):
    figures = Figures("", ["--check"])
    figures.add_spread("steady", Costs([Cost(10, 1), Cost(100, 2), Cost(11, 3)]))
    assert figures.status() == 0
    figures.add_spread("other", Costs([Cost(10, 1), Cost(12, 2), Cost(100, 3)]))
    assert figures.status() == 1
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "median / least step time, steady",
        "median / least step time, other",
    ]


class Step:
    """A stand-in for a compiled step: it adds `error`, and takes `seconds` on a clock of the test's."""

    def __init__(self, clock: list[float], seconds: float, temporary: int, error: float = 0.0):
        self.clock, self.seconds, self.error = clock, seconds, error
        self.temp_size_in_bytes = temporary

    def memory_analysis(self) -> "Step":
        return self

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.clock[0] += self.seconds
        return x + self.error


def test_programs_stand_beside_the_unsharded_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.process_time", lambda: 2 * clock[0])
    figures = Figures("", ["--check"])
    figures.add_beside_unsharded(
        "model",
        Program(Step(clock, 10, temporary=100), (np.array(4.0),)),
        {
            "ours": Program(Step(clock, 11, temporary=50), (np.array(2.0),), comparable=lambda result: 2 * result),
            "wrong": Program(Step(clock, 5, temporary=200, error=1.0), (np.array(4.0),)),
        },
        {"ours": Bounds(cpu=1.05, bytes=0.8)},
        most_difference=0.1,
        rounds=3,
    )
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "loss and gradients / unsharded, model, ours, relative difference 0 <= 0.1",
        "loss and gradients / unsharded, model, wrong, relative difference 0.25 <= 0.1 FALLS SHORT",
        "median / least step time, model, unsharded 1 <= 1.1",
        "CPU work / unsharded, model, ours 1.1 <= 1.05 FALLS SHORT",
        "step time / unsharded on both cores, model, ours 1.1",
        "temporary bytes an IPU / unsharded, model, ours 0.5 <= 0.8",
        "median / least step time, model, ours 1 <= 1.1",
        "CPU work / unsharded, model, wrong 0.5",
        "step time / unsharded on both cores, model, wrong 0.5",
        "temporary bytes an IPU / unsharded, model, wrong 2",
        "median / least step time, model, wrong 1 <= 1.1",
    ]
    assert figures.status() == 1


def test_the_difference_is_relative_to_the_leaf():
    assert largest_relative_difference([np.array([10.0, 11.0])], [np.array([10.0, 10.0])]) == pytest.approx(0.1)
    assert largest_relative_difference([np.array(1.0), np.array(6.0)], [np.array(1.0), np.array(5.0)]) == pytest.approx(
        0.2
    )


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("of_found", [True, False])
def test_not_a_number_differs_in_whichever_leaf_it_stands(place: int, of_found: bool):
    with_nan = [np.array([1.0, 2.0 if k != place else np.nan]) for k in range(3)]
    without = [np.array([1.0, 2.0])] * 3
    trees = (with_nan, without) if of_found else (without, with_nan)
    figures = Figures("", ["--check"])
    figures.add("difference", largest_relative_difference(*trees), 1e-5)
    assert figures.status() == 1


def test_a_difference_of_unlike_shapes_is_refused():
    with pytest.raises(
        ValueError, match=r"^the shapes found are \[\(2, 1\)\], and \[\(2,\)\] are expected: compare like"
    ):
        largest_relative_difference([np.ones((2, 1))], [np.ones(2)])
