"""Test what --log-file, --tensorboard and --report write, for a training that is stopped and goes on."""

import json
import os
import signal
import time

import pytest

from ipu_jax import Checkpoints
from mnist_example import data, model
from mnist_example.data import synthetic_mnist
from mnist_example.run_sharded_mnist import main

TINY = ["--pipeline-mode", "concurrent", "--synthetic-data", "--batch-size", "4", "--gradient-accumulation-count", "5"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))
    monkeypatch.setattr(model, "HIDDEN", 24)
    monkeypatch.setattr(model, "FEATURES", 12)


def test_a_training_that_was_stopped_and_resumed_is_one_log_and_one_page(tmp_path, monkeypatch, capsys):
    log, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    flags = [*TINY, "--epochs", "1", "--repeat-count", "2", "--checkpoint-dir", str(tmp_path / "saved")]
    flags += ["--log-file", str(log), "--report", str(page), "--tensorboard", str(tmp_path / "board")]
    usual = Checkpoints.due

    def stopping(self, state, updates):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return usual(self, state, updates)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "due", stopping)
        assert main(flags) == 0
    assert main(flags) == 0
    assert capsys.readouterr().out.count(f"Report: {page}\n") == 2

    events = [json.loads(line) for line in log.read_text().splitlines()]
    names = [event["event"] for event in events]
    first = ["start", "compiled", "losses", "saved", "stopped"]
    assert names == [*first, "start", "resumed", "compiled", "losses", "losses", "saved", "evaluated", "end"]
    assert [event["updates"] for event in events if event["event"] == "losses"] == [2, 4, 5]
    assert sum(len(event.get("losses", [])) for event in events) == 5
    start = events[5]
    assert (start["ipus"], start["replicas"], start["samples_per_update"], start["total_updates"]) == (2, 1, 20, 5)
    assert start["flags"]["repeat-count"] == 2
    assert start["versions"]["jax"]
    assert all(event["samples_per_second"] > 0 for event in events if event["event"] == "losses")
    text = page.read_text()
    assert "grouped, as planned" in text
    assert "SIGTERM: stopped after 2 updates" in text
    assert len(list((tmp_path / "board").iterdir())) == 2


def test_a_training_that_diverges_leaves_its_page(tmp_path, capsys):
    page = tmp_path / "run.html"
    assert main([*TINY, "--epochs", "2", "--learning-rate", "1e30", "--report", str(page)]) == 1
    assert "failed" in page.read_text()
    assert "is not finite" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--report", "run.txt"], "--report run.txt is no HTML file: give a name that ends in .html"),
        (["--log-file", "missing/run.jsonl"], "--log-file missing/run.jsonl: there is no folder missing"),
        (["--report", "a.html", "--compare"], "--report is about one training, and --compare makes two: give "),
    ],
)
def test_what_cannot_be_written_is_refused(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        main([*TINY, *flags])
    assert refused.value.code == 2
    assert f"run-sharded-mnist: {message}" in capsys.readouterr().err


def test_a_log_of_something_else_is_refused(tmp_path, capsys):
    notes = tmp_path / "notes.jsonl"
    notes.write_text("hello\n")
    with pytest.raises(SystemExit) as refused:
        main([*TINY, "--log-file", str(notes)])
    assert refused.value.code == 2
    assert "holds no log of a run, see line 1" in capsys.readouterr().err
    assert notes.read_text() == "hello\n"
