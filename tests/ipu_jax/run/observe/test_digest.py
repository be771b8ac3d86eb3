"""Test what a page shows of a run's events, against events and figures written by hand."""

from ipu_jax.run.observe.runs.digest import Digest

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
