"""Test the log of a run: what is written, what is read again, and what becomes of a file that cannot be written."""

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from ipu_jax.run.observe.runs.log import RunLog, RunLogWarning
from support.refusals import refusals, refused


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.event("start", command=["train", "--fast"], flags={"epochs": 3.0})
        first = lines(path)
        log.event("losses", updates=np.int32(2), losses=np.array([0.5, 0.25], np.float32))
        log.event("end", loss=math.nan, of=None, done=True)
    found = lines(path)
    assert found[:1] == first
    assert [each["event"] for each in found] == ["start", "losses", "end"]
    assert (found[0]["command"], found[0]["flags"]) == (["train", "--fast"], {"epochs": 3.0})
    assert (found[1]["updates"], found[1]["losses"]) == (2, [0.5, 0.25])
    assert (found[2]["loss"], found[2]["of"], found[2]["done"]) == ("nan", None, True)
    assert found == log.events
    assert 0 <= found[0]["seconds"] <= found[2]["seconds"] < 60
    assert found[0]["time"].endswith("+00:00")


def test_a_log_goes_on_after_a_kill_that_cut_its_last_line(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.event("start")
        log.event("losses", updates=1, losses=[2.0])
    path.write_bytes(path.read_bytes()[:-7])
    with RunLog(path) as log:
        assert [each["event"] for each in log.events] == ["start"]
        log.event("start")
    assert [each["event"] for each in lines(path)] == ["start", "start"]


NO_PATH: Any = 3


@refusals(
    (lambda at: RunLog(at), "is a folder", "give a file, such as /"),
    (lambda at: RunLog(at / "none" / "run.jsonl"), "there is no folder", "make it, or give another file"),
    (lambda _: RunLog(NO_PATH), "log=3", "is not a path", "such as run.jsonl"),
    (lambda _: RunLog().start(command="x"), "'command'", "choose another name"),
    (lambda _: RunLog(tensorboard=__file__), "test_run_log.py is not a folder", "a name that is free"),
)
def test_what_a_log_cannot_be_written_to_is_refused(tmp_path, call, holds):
    with refused(*holds):
        call(tmp_path)


def test_a_program_that_is_a_package_is_named_as_it_is_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/mnist_example/__main__.py", "--epochs", "1"])
    log = RunLog()
    log.start()
    assert log.events[0]["command"] == ["python -m mnist_example", "--epochs", "1"]


def test_a_full_disk_ends_the_log_and_not_the_run():
    log = RunLog("/dev/full")
    with pytest.warns(
        RunLogWarning, match=r"/dev/full cannot be written any more \(No space left on device\): the run"
    ):
        log.event("start")
    log.event("end")  # no second warning
    assert [each["event"] for each in log.events] == ["start", "end"]
    log.close()


def test_tensorboard_gets_each_loss_at_its_update(tmp_path):
    with RunLog(tensorboard=tmp_path) as log:
        log.event("start")
        log.event("losses", updates=3, losses=[3.0, 2.5], samples_per_second=100.0)
        log.event("accuracy", updates=3, accuracy=0.75)
        log.event("evaluated", updates=3, epoch=1.0, loss=2.0, error=0.25, bad=math.nan)
    (file,) = tmp_path.iterdir()
    content, found = file.read_bytes(), []
    while content:  # each record: its length in 8 bytes, 4 of a checksum, the record, 4 of a checksum
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])  # pyright: ignore[reportAttributeAccessIssue]
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    assert found[:4] == [("loss", 2, 3.0), ("loss", 3, 2.5), ("samples_per_second", 3, 100.0), ("accuracy", 3, 0.75)]
    assert sorted(found[4:]) == [("error", 3, 0.25), ("test_loss", 3, 2.0)]


def test_a_run_that_is_restarted_at_once_keeps_the_tensorboard_file_before(tmp_path):
    for _ in range(3):
        with RunLog(tensorboard=tmp_path) as log:
            log.event("losses", updates=1, losses=[3.0])
    assert len(list(tmp_path.iterdir())) == 3


def test_without_tensorboardx_the_mend_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboardX, which is not installed: pip install 'ipu-jax\[tensorboard\]'"):
        RunLog(tensorboard=tmp_path)
