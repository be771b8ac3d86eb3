"""Test the verdict on a run, the advice and the figures, on logs and timelines whose answers can be told by hand."""

import pytest

from ipu_jax.core.schedules import make_schedule
from ipu_jax.run.observe.runs._verdict import advice_on, bubbles, loss_means, verdict_of
from ipu_jax.run.observe.runs.digest import Digest
from ipu_jax.run.observe.tracing._assembling import planned
from ipu_jax.run.observe.tracing.timeline import Kind, Slice, Step, Timeline
from ipu_jax.run.observe.tracing.trace_report import make_report, median_costs


def log(losses, *others):
    return [{"event": "start"}, {"event": "losses", "updates": len(losses), "losses": losses}, *others]


END = {"event": "end", "reason": "all updates were made"}
FIRST, LAST = "(mean of the first 4)", "(of the last 4)"
FALLING = [4.0 / k for k in range(1, 41)]
NOISE = [2.0 + 0.1 * (-1) ** k for k in range(40)]


def measured(accuracy, **notes):
    """Return the log of a run that should reach 96%."""
    start, *others = log(FALLING, {"event": "evaluated", "updates": 40, "accuracy": accuracy}, END)
    return [start | {"expected": {"accuracy": 0.96, "F1": "high"}} | notes, *others]


def test_of_very_many_losses_each_counts_in_the_means():
    """A digest holds means of four of them."""
    means = loss_means(Digest(log([4.0 - k / 10_000 for k in range(40_000)])))
    assert means is not None
    assert [mean.size for mean in means] == [3_999, 3_997]  # a thousand means each
    assert means[0].value == pytest.approx(4.0 - 0.1999, rel=1e-9)


@pytest.mark.parametrize(
    ("events", "level", "sentences"),
    [
        (log(FALLING, END), "good", ["Finished.", f"The loss fell from 2.08 {FIRST} to 0.104 {LAST}."]),
        (log(FALLING[::-1], END), "bad", ["Finished.", f"The loss rose from 0.104 {FIRST} to 2.08 {LAST}."]),
        (log(NOISE, END), "fair", ["Finished.", f"The loss did not fall: from 2 {FIRST} to 2 {LAST}."]),
        (log(FALLING), "fair", ["The log has no end: the run is still going, or it was killed."]),
        (log(FALLING, {"event": "failed", "error": "disk full"}), "bad", ["Failed: disk full"]),
        (log(FALLING, {"event": "stopped", "reason": "SIGTERM: after 9"}), "fair", ["SIGTERM: after 9."]),
        (log([*FALLING, "nan"], END), "bad", ["Some losses are not finite."]),
        (log([*FALLING, "inf", *FALLING[-9:]], END), "bad", ["Some losses are not finite."]),
        (
            log([*FALLING, "nan", 0.1], {"event": "skipped", "count": 1}, END),
            "fair",
            ["Some losses are not finite, of updates that were skipped.", "1 of 42 updates were skipped."],
        ),
        (
            log([*FALLING, "nan"], {"event": "skipped", "count": 1}, END),
            "bad",
            ["Some losses are not finite.", "1 of 41 updates were skipped."],
        ),
        (log(FALLING, {"event": "skipped", "count": 8}, END), "fair", ["8 of 40 updates were skipped."]),
        (log(FALLING, *log(FALLING, END)), "good", ["It was restarted once."]),
        (
            log(
                FALLING,
                {"event": "evaluated", "updates": 20, "accuracy": 0.9},
                {"event": "evaluated", "updates": 40, "accuracy": 0.8},
                END,
            ),
            "good",
            ["Accuracy 80.00%, at best 90.00% after 20 updates."],
        ),
        (measured(0.97), "good", ["Accuracy 97.00%."]),
        (measured(0.91), "fair", ["Accuracy 91.00%: less than the 96.00% that is expected."]),
        (measured(0.91, expected="all of them"), "good", ["Accuracy 91.00%."]),
        ([], "fair", ["The log has no end: the run is still going, or it was killed."]),
    ],
)
def test_a_run_is_judged(events, level, sentences):
    found = verdict_of(Digest(events))
    assert found[0] == level
    assert set(sentences) <= set(found[1])


def traced(name, micro_batches, forward, wait=0.0, **placed):
    """Return a timeline in which stage s ran F in forward[s] seconds and B in twice as many, and then waited."""
    schedule = make_schedule(name, gradient_accumulation=micro_batches, **placed)
    slices, end = list[Slice](), 0.0
    for stage, ipu in enumerate(schedule.placement):
        assert ipu is not None, "these stages are local"
        clock = 0.0
        kinds: tuple[tuple[Kind, float], ...] = (("F", forward[stage]), ("B", 2 * forward[stage]))
        for m in range(micro_batches):
            for kind, cost in kinds:
                name = f"{stage}{kind}{m}"
                slices.append(Slice(0, 0, ipu, 0, kind, name, clock, clock + cost, None, (stage,), m))
                clock += cost
        slices.append(Slice(0, 0, ipu, 0, "exchange", "exchange y", clock, clock + wait))
        end = max(end, clock + wait)
    steps = tuple(Step(0, 0, ipu, 0, 0.0, end) for ipu in range(schedule.ipus))
    plan = planned(schedule, median_costs(slices), steps, slices)
    return Timeline(schedule, tuple("abcdefgh"[: len(forward)]), True, steps, tuple(slices), plan)


def advice(timeline, events=()):
    return advice_on(Digest(events), timeline, make_report(timeline))


def test_few_micro_batches_are_named_with_the_bubbles_before_and_after():
    # gpipe on 4 IPUs with even stages: (S-1) / (M+S-1) is 3/7 for M = 4 and 3/19 for M = 16
    first = advice(traced("gpipe", 4, [1e-3] * 4, ipus=4))[0]
    assert "gradient_accumulation=16 instead of 4" in first
    assert "falls from 43% to 16%" in first


def test_a_better_schedule_is_named():
    found = advice(traced("sequential", 64, [1e-3] * 2, ipus=2))
    # one stage at a time keeps half of the IPUs idle: 1 - 1/2; any pipeline's bubble is at most 1/65
    assert any("Another schedule" in each and "falls from 50% to 2%" in each for each in found)


def test_a_layer_to_move_is_named():
    found = advice(traced("1f1b", 64, [2e-3, 2e-3, 1e-3], placement=(0, 0, 1), ipus=2))
    assert any("slowest stage is a" in each and "move 'b' from IPU 0 to IPU 1" in each for each in found)


def test_a_well_filled_pipeline_gets_no_advice_on_its_schedule():
    found = advice(traced("1f1b", 128, [1e-3] * 2, ipus=2))
    assert not any("micro-batches: with" in each or "Another schedule" in each for each in found)


@pytest.mark.parametrize(("seconds", "is_idle"), [(2e-4, False), (5e-5, True)])
def test_an_ipu_with_nothing_to_do_is_named(seconds, is_idle):
    found = advice(traced("1f1b", 8, [1e-3, seconds], ipus=2))
    assert any("on IPU 1: take fewer IPUs" in each for each in found) == is_idle


@pytest.mark.parametrize(("share", "level"), [(1.0, "good"), (0.3, "good"), (0.1, "fair")])
def test_a_run_whose_ipus_are_mostly_idle_is_not_called_good(share, level):
    # two of three IPUs are busy in this share of the step: the mean bubble is 0%, 47% and 60%
    report = make_report(traced("1f1b", 64, [1e-3, share * 1e-3, share * 1e-3], ipus=3))
    found, sentences = verdict_of(Digest(log(FALLING, END)), report)
    assert found == level
    assert any("ran no task for 60%" in each for each in sentences) == (level == "fair")


def test_waiting_beyond_the_plan_is_named():
    timeline = traced("1f1b", 64, [1e-3, 1e-4], ipus=2)
    planned_bubble, _ = bubbles(make_report(timeline))
    # IPU 0 is busy in all of the step, IPU 1 in a tenth of it: nearly nothing but the plan's own waiting
    assert planned_bubble == pytest.approx(0.45, abs=0.02)
    assert not any("is in the plan" in each for each in advice(timeline))
    slow = [one for one in timeline.slices if one.kind != "exchange"]
    late = [Slice(**{**vars(one), "start": 3 * one.start, "end": 2 * one.start + one.end}) for one in slow]
    spread = Timeline(timeline.schedule, timeline.stages, True, timeline.steps, tuple(late), timeline.plan)
    assert any("is in the plan" in each for each in advice(spread))
    assert any("ran no task" in each for each in verdict_of(Digest(log(FALLING, END)), make_report(spread))[1])


def test_without_a_trace_the_advice_is_to_record_one_and_long_compilation_is_named():
    events = [
        {"event": "start", "seconds": 0.0},
        {"event": "compiled", "seconds": 60.0},
        {"event": "end", "seconds": 80.0},
    ]
    found = advice_on(Digest(events), None, None)
    assert "trace" in found[0]
    assert "Compiling took 1 min 0 s of 1 min 20 s" in found[1]
    failed = log(FALLING, {"event": "failed", "error": "disk full"})
    assert not any("trace" in each for each in advice_on(Digest(failed), None, None))
    rising = advice_on(Digest(log(FALLING[::-1], END)), None, None)
    assert "lower the learning rate" in rising[0]


# figures, facts and phases

# Killed after 6 updates, of which 4 were saved; resumed, and ended after 7.
EVENTS = [
    {"event": "start", "time": "2026-05-04T10:00:00.000+00:00", "ipus": 2, "command": ["train"], "flags": {"lr": 0.5}},
    {"event": "losses", "updates": 2, "losses": [8.0, 7.0], "samples_per_second": 10.0},
    {"event": "losses", "updates": 4, "losses": [6.0, 5.0], "samples_per_second": 30.0},
    {"event": "saved", "time": "2026-05-04T10:01:00.000+00:00", "updates": 2, "path": "runs/step-2"},
    {"event": "saved", "time": "2026-05-04T10:01:00.000+00:00", "updates": 4, "path": "runs/step-4"},
    {"event": "losses", "updates": 6, "losses": [4.0, 3.0], "samples_per_second": 90.0},
    {"event": "accuracy", "updates": 6, "accuracy": 0.1},
    {
        "event": "start",
        "time": "2026-05-04T10:02:00.000+00:00",
        "ipus": 4,
        "command": ["train", "--lr"],
        "flags": {"lr": 0.25, "seed": 3, "quick": False, "plot": None},
        "defaults": {"lr": 0.5, "seed": 3, "quick": False, "plot": None},
        "data": "digits",
        "updates_per_epoch": 7,
    },
    {"event": "resumed", "time": "2026-05-04T10:02:01.000+00:00", "updates": 4, "path": "runs/step-4"},
    {"event": "losses", "updates": 6, "losses": [4.0, "nan"], "samples_per_second": 20.0},
    {"event": "skipped", "time": "2026-05-04T10:02:02.000+00:00", "updates": 6, "stage": "head"},
    {"event": "losses", "updates": 7, "losses": [2.0], "samples_per_second": 20.0},
    {"event": "evaluated", "seconds": 9.0, "updates": 7, "epoch": 1.0, "loss": 2.5, "accuracy": 0.5, "f1": 3},
    {"event": "end", "time": "2026-05-04T10:03:00.000+00:00", "status": 0},
]


def test_what_was_computed_again_after_a_resume_counts_once_and_every_evaluated_figure_is_a_curve():
    assert Digest(EVENTS).drawn(100) == {
        "loss": [[1, 8.0], [2, 7.0], [3, 6.0], [4, 5.0], [5, 4.0], [7, 2.0]],  # update 6 has none that can be drawn
        "accuracy": [[7, 0.5]],
        "test loss": [[7, 2.5]],
        "f1": [[7, 3]],
        "samples per second": [[2, 10.0], [4, 30.0], [6, 20.0], [7, 20.0]],
    }


def test_the_figures_and_the_facts_at_the_top():
    assert Digest(EVENTS).figures() == {
        "updates": "7 (1 epoch)",
        "accuracy": "50.00%",
        "test loss": "2.5",
        "f1": "3",
        "last loss": "2",
        "samples per second": "20 (median)",
    }
    assert Digest([]).figures() == {}
    assert Digest(EVENTS).head == {
        "started": "2026-05-04 10:00:00 UTC",
        "data": "digits",
        "IPUs of a replica": "4",
        "seed": "3",
        "command": "train --lr",
    }
    assert Digest([]).head == {}
    half = [{"event": "start", "total_updates": 1200}, {"event": "losses", "updates": 1000, "losses": [1.0]}]
    assert Digest(half).figures()["updates"] == "1,000 of 1,200"


def test_only_flags_that_differ_from_their_defaults_are_given():
    assert Digest(EVENTS).flags == ({"lr": "0.25"}, {"seed": "3", "quick": "no"})
    assert Digest(EVENTS[:1]).flags == ({"lr": "0.5"}, {})  # without defaults nobody knows


def test_an_event_ends_the_phase_that_it_is_about():
    events = [
        {"event": "start", "seconds": 3.0},
        {"event": "compiled", "seconds": 5.0},
        {"event": "losses", "seconds": 9.0},
        {"event": "saved", "seconds": 9.5},
        {"event": "start", "seconds": 1.0},  # a clock of its own
        {"event": "compiled", "seconds": 2.0},
        {"event": "losses", "seconds": 6.0},
        {"event": "evaluated", "seconds": 16.0},
        {"event": "end", "seconds": 16.0},
    ]
    assert Digest(events).phases() == {"compiling": 3.0, "training": 8.0, "evaluating": 10.0, "saving": 0.5}
    assert Digest(events).figures()["duration"] == "21.5 s"


def test_the_history_names_an_attempt_that_was_killed():
    assert Digest(EVENTS).rows == [
        ("2026-05-04 10:00:00", "start", "attempt 1; train"),
        ("2026-05-04 10:01:00", "saved", "2 times, the last one after 4 updates; runs/step-4"),
        ("", "lost", "the attempt before this one ended without a word, as a killed one does"),
        ("2026-05-04 10:02:00", "start", "attempt 2; train --lr"),
        ("2026-05-04 10:02:01", "resumed", "after 4 updates; from runs/step-4"),
        ("2026-05-04 10:02:02", "skipped", "after 6 updates; stage head"),
        ("2026-05-04 10:03:00", "end", "status 0"),
    ]
