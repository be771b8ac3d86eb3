"""Test what a page shows of a run's events, against events and figures written by hand."""

from ipu_jax.run.observe.runs import _facts

# Killed after 6 updates, of which 4 were saved; resumed, and ended after 7.
EVENTS = [
    {"event": "start", "time": "2026-05-04T10:00:00.000+00:00", "ipus": 2, "command": ["train"], "flags": {"lr": 0.5}},
    {"event": "losses", "updates": 2, "losses": [8.0, 7.0], "samples_per_second": 10.0},
    {"event": "losses", "updates": 4, "losses": [6.0, 5.0], "samples_per_second": 30.0},
    {"event": "saved", "time": "2026-05-04T10:01:00.000+00:00", "updates": 4, "path": "runs/step-4"},
    {"event": "losses", "updates": 6, "losses": [4.0, 3.0], "samples_per_second": 90.0},
    {"event": "accuracy", "updates": 6, "accuracy": 0.1},
    {"event": "start", "time": "2026-05-04T10:02:00.000+00:00", "ipus": 4, "command": ["train"], "flags": {"lr": 0.25}},
    {"event": "resumed", "time": "2026-05-04T10:02:01.000+00:00", "updates": 4},
    {"event": "losses", "updates": 6, "losses": [4.0, "nan"], "samples_per_second": 20.0},
    {"event": "skipped", "time": "2026-05-04T10:02:02.000+00:00", "updates": 6, "stage": "head"},
    {"event": "losses", "updates": 7, "losses": [2.0], "samples_per_second": 20.0},
    {"event": "accuracy", "updates": 7, "accuracy": 0.5},
    {"event": "end", "time": "2026-05-04T10:03:00.000+00:00", "status": 0},
]


def test_what_was_computed_again_after_a_resume_counts_once():
    assert _facts.curves(EVENTS, 100) == {
        "loss": [[1, 8.0], [2, 7.0], [3, 6.0], [4, 5.0], [5, 4.0], [7, 2.0]],  # update 6 has none that can be drawn
        "accuracy": [[7, 0.5]],
        "samples per second": [[2, 10.0], [4, 30.0], [6, 20.0], [7, 20.0]],
    }


def test_long_curves_are_means_of_neighbours():
    events = [{"event": "losses", "updates": 10, "losses": [float(k) for k in range(10)]}]
    assert _facts.curves(events, 4)["loss"] == [[3, 1.0], [6, 4.0], [9, 7.0], [10, 9.0]]


def test_the_figures_at_the_top():
    assert _facts.summary(EVENTS) == {
        "updates": "7",
        "last loss": "2.0000",
        "accuracy": "50.00%",
        "samples per second": "20 (median of the device calls)",
        "IPUs of a replica": "4",
        "starts": "2",
        "skipped updates": "1",
        "ended": "status 0",
    }
    assert _facts.summary(EVENTS[:5])["ended"] == "not yet, or without a word"
    assert _facts.summary([]) == {"ended": "not yet, or without a word"}
    assert _facts.flags(EVENTS) == {"lr": "0.25"}


def test_the_history_names_an_attempt_that_was_killed():
    assert _facts.history(EVENTS) == [
        ("2026-05-04 10:00:00", "start", "command train"),
        ("2026-05-04 10:01:00", "saved", "updates 4; runs/step-4"),
        ("", "lost", "the attempt before this one ended without a word, as a killed one does"),
        ("2026-05-04 10:02:00", "start", "command train"),
        ("2026-05-04 10:02:01", "resumed", "updates 4"),
        ("2026-05-04 10:02:02", "skipped", "updates 6; stage head"),
        ("2026-05-04 10:03:00", "end", "status 0"),
    ]
