"""Test that a strange log gives a page or a ValueError, that notes never cost the page, and that a log stays small."""

import itertools
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, fit, make_train_step
from ipu_jax.observe import RunLog, write_report
from ipu_jax.run.observe.runs import digest, log
from ipu_jax.run.observe.runs.digest import Curve, Digest

WHOLE: list[dict[str, Any]] = [
    {
        "event": "start",
        "time": "2026-05-04T10:00:00.000+00:00",
        "seconds": 0.0,
        "command": ["train"],
        "flags": {"lr": 0.5},
        "defaults": {"lr": 0.1},
        "versions": {"jax": "0.10.2"},
        "model": "mlp",
        "ipus": 4,
        "total_updates": 4,
        "updates_per_epoch": 2,
    },
    {"event": "compiled", "seconds": 1.0, "compile_seconds": 0.9},
    {"event": "losses", "seconds": 2.0, "updates": 2, "epoch": 1.0, "losses": [2.0, 1.0], "samples_per_second": 9.5},
    {"event": "speed", "updates": 2, "samples_per_second": 9.5},
    {"event": "evaluated", "seconds": 3.0, "updates": 2, "accuracy": 0.5, "loss": 1.5},
    {"event": "saved", "seconds": 4.0, "updates": 2, "folder": "runs/x"},
    {"event": "skipped", "updates": 2, "count": 1, "reason": "overflows"},
    {"event": "resumed", "updates": 2, "path": "runs/x/step-2", "total_updates": 4},
    {"event": "stopped", "reason": "SIGTERM"},
    {"event": "failed", "error": "the disk is full"},
    {"event": "end", "reason": "all updates were made"},
]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


STRANGE: list[Any] = [
    *(None, True, 0, -1, 3, 10**400, -(10**5000), 1e308, -1e-320, math.nan, math.inf, "", "x", "\ud800", "nan"),
    *([], [1], ["x"], [None], [[1.0]], [10**400], [{}], [math.inf, 1], [True], {}, {"a": 1}, {1: {2: [3]}}),
    *(nested(30), nested(5000), b"x", {3}, 1j, object, np.float32(3), np.ones(2), np.array("x")),
]


PARTS = 4


def strange_logs() -> Iterator[list[Any]]:
    for number, event in enumerate(WHOLE):
        before, after = WHOLE[:1] * bool(number), WHOLE[-1:]
        for key in (*event, "flags", "losses", "updates", "count", 3):
            yield [*before, {other: each for other, each in event.items() if other != key}, *after]
            for value in STRANGE:
                yield [*before, {**event, key: value}, *after]
    for event in STRANGE:
        yield [event]
        yield [*WHOLE, event, *WHOLE]


def is_answered(path: Path, events: Any) -> bool:
    """Return whether there is a page; a ValueError is an answer, too. Anything else is raised."""
    path.unlink(missing_ok=True)
    try:
        write_report(path, events)
    except ValueError:
        return False
    return "</html>" in path.read_text("utf-8")


@pytest.mark.fast("1")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_strange_log_gives_a_page_or_a_value_error(part, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda handle: None)  # there are thousands
    monkeypatch.setattr("ipu_jax.run.observe.runs.html_parts._file", lambda name: PAGE if name == "frame.html" else "")
    logs = itertools.islice(strange_logs(), part, None, PARTS)
    found = [is_answered(tmp_path / "run.html", events) for events in logs]
    assert len(found) > 2000 / PARTS
    # refused is only what is not a sequence of events
    assert 20 / PARTS < found.count(False) < 500 / PARTS


PAGE = (
    "<html><!--CSS--><!--DATA--><!--VERDICT--><!--FIGURES--><!--HEAD--><!--PHASES--><!--HISTORY--><!--FLAGS--></html>"
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"event": "losses", "updates": 2, "losses": 3}', "event 2, 'losses', has losses='3'"),
        (b'{"event": "saved", "updates": 1e999}', "event 2, 'saved', has updates='inf'"),
        (b'{"event": "losses", "updates": 2, "losses": [NaN, 1e999]}', "Some losses are not finite"),
        (b'{"event": "mine", "updates": "x", "losses": {}}', "Finished."),
        (b'{"event": "mine", "\xff": "\xc3"}', "Finished."),
        (b'{"event": "mine", "deep": ' + b"[" * 60 + b"]" * 60 + b"}", "Finished."),
    ],
)
def test_a_line_that_others_wrote_gives_a_page_that_says_what_was_left_out(line, words, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event": "start"}\n' + line + b'\n{"event": "end"}\n{"event": "lo')
    with RunLog(path) as read:
        text = write_report(tmp_path / "run.html", read).read_text("utf-8").replace("&#x27;", "'")
        assert words in text
        assert len(read.events) == 3


@pytest.mark.parametrize(
    "content",
    [
        b'{"event": 3}\n',
        b'{"event": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"event": "losses", "updates": ' + b"9" * 5000 + b"}\n",
        b"\x00\xff\n",
        b"no line end",
        b"hello\n",
        b"[1]\n",
        b'{"event": "start"}\n{"other": 1}\n',
    ],
)
def test_a_file_that_is_no_log_is_refused_and_left_alone(content, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} is not the log of a run, see line \d: give another file, or remove"):
        RunLog(path)
    assert path.read_bytes() == content


NOTES: list[dict[str, Any]] = [
    *({"flags": value} for value in (["--lr", "3"], "--lr 3", {"lr": 3}, 3, None, [], {"a": {"b": [1]}})),
    *({"flags": {"lr": 3}, "defaults": value} for value in ([1], "x", 3, None, {"lr": 3})),
    *({name: "x"} for name in ("updates", "losses", "total", "samples", "samples_per_second", "count", "self", "name")),
    *({name: [3]} for name in ("updates", "losses", "total", "samples", "count", "model", "seed", "schedule")),
    {"deep": nested(5000), "huge": 10**5000, "half": "\ud800", "nan": math.nan, "array": np.ones(2)},
]


def test_no_notes_cost_the_page(tmp_path, recwarn):
    step = make_train_step(lambda w, rows: jnp.mean((rows - w) ** 2), optax.sgd(0.25))
    for number, notes in enumerate(NOTES):
        feed = Feed(np.ones((8, 3), np.float32), step=step, micro_batch=4, prefetch=0)
        files: dict[str, Any] = {"report": tmp_path / f"{number}.html", "tensorboard": tmp_path / "board"}
        say = lambda line: None
        result = fit(step, step.init(jnp.zeros(3)), feed, notes=notes, progress=False, say=say, **files)
        assert result.report is not None, notes
        text = result.report.read_text("utf-8")
        assert "Finished." in text
        assert "could not be read" not in text
        for value in ("--lr 3",) if notes.get("flags") in (["--lr", "3"], "--lr 3") else ():
            assert f"<th scope='row'>flags</th><td>{value}</td>" in text
    assert not [warning for warning in recwarn if "report" in str(warning.message)]


def logged(log: RunLog, first: int, last: int) -> None:
    for updates in range(first, last):
        log.event("losses", updates=updates, epoch=updates / 100, losses=[1 / updates] * 1, samples_per_second=100.5)
        if updates % 10 == 0:
            log.event("saved", updates=updates, folder="runs/x")
            log.event("skipped", updates=updates, count=1)
            log.event("evaluated", updates=updates, accuracy=0.5, loss=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [True, False])
def test_a_log_stays_as_small_as_it_is(has_file, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_MOST_POINTS", 100)
    monkeypatch.setattr(digest, "_MOST_ROWS", 40)
    monkeypatch.setattr(log, "_MOST_KEPT", 20_000)
    with RunLog(tmp_path / "run.jsonl" if has_file else None) as written:
        tracemalloc.start()
        try:
            logged(written, 1, 400)
            before = tracemalloc.get_traced_memory()[0]
            logged(written, 400, 2000)
            growth = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert growth < 120_000  # of 2,080 events, which are 0.3 MB as text
        text = write_report(tmp_path / "run.html", written).read_text("utf-8")
        assert "199 of 1,999 updates were skipped" in text
        assert "left out" in text
        assert (len(written.events) == written.digest.events == 1999 + 3 * 199) == has_file
        assert written.events[-1]["updates"] == 1999
    if has_file:
        lines = (tmp_path / "run.jsonl").read_text().splitlines()
        with RunLog(tmp_path / "run.jsonl") as read:
            assert [json.loads(line) for line in lines] == written.events == read.events


def test_a_long_curve_is_of_means_and_has_its_last_value(monkeypatch):
    monkeypatch.setattr(digest, "_MOST_POINTS", 4)
    curve = Curve()
    for updates in range(1, 15):
        curve.add(updates, float(updates))
    # of 4 updates each: 1 to 3, 4 to 7, 8 to 11, 12 to 14
    assert curve.points() == [(3, 2.0), (7, 5.5), (11, 9.5), (14, 13.0)]
    assert curve.last == (14, 14.0)
    curve.forget_after(9)
    assert [updates for updates, _ in curve.points()] == [3, 7, 11]
    short = Digest([{"event": "losses", "updates": 3, "losses": [3.0, 2.0, 1.0]}, {"event": "resumed", "updates": 2}])
    assert short.drawn(1)["loss"] == [[2, 2.5]]
    assert short.curves["loss"].points() == [(1, 3.0), (2, 2.0)]
    assert short.figures()["last loss"] == "2"
