"""Test `fit` against plain loops on one device: what it trains, prints, saves, and leaves behind when it is stopped.

Its file runs as a copy in a user's folder, too: public names only, and the same training.
"""

import ast
import contextlib
import importlib.util
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ipu_jax
from ipu_jax import Checkpoints, Feed, fit
from ipu_jax.observe import RunLog, RunLogWarning, trace
from ipu_jax.run.loop import checked_fit
from ipu_jax.steps import FitResult, NonFiniteLossError
from support import public_api
from support.fitted import (
    B,
    D,
    Lines,
    M,
    assert_same_weights,
    hearing_ctrl_c,
    make_step,
    normal,
    press,
    shared_step,
    twin,
    weights,
)
from support.trained import compiled_quickly

_compiled_quickly = compiled_quickly()


@pytest.mark.fast("1-1-1", "4-2-1.6")
@pytest.mark.parametrize(("k", "ipus", "epochs"), [(1, 1, 1), (3, 2, 2), (4, 2, 1.6)])
def test_a_training_is_the_one_of_a_plain_loop(k, ipus, epochs):
    """7 updates per epoch: neither 3 nor 4 divides them, and 1.6 epochs end inside a call."""
    rows, updates = normal(2, 7 * M * B + 2, D), round(7 * epochs)
    expected, end = twin(rows[: 7 * M * B], updates)
    step = shared_step(k, ipus=ipus)
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
        assert (len(feed), feed.updates_per_epoch) == (-(-7 // k), 7)
        result = fit(step, step.init(weights()), feed, epochs=epochs, say=Lines())
        np.testing.assert_allclose(result.losses, expected, rtol=1e-4)
        assert (result.updates, result.stopped, int(result.state.step)) == (updates, None, updates)
        assert_same_weights(step, result.state, end)
        # a second call goes on behind the last update, also inside an epoch
        again = fit(step, result.state, feed, updates=3, say=Lines())
    np.testing.assert_allclose(again.losses, twin(rows[: 7 * M * B], updates + 3, updates)[0], rtol=1e-4)


def test_lines_evaluations_and_the_log(tmp_path):
    step, lines, seen = make_step(2), Lines(), []
    rows = normal(3, 10 * M * B, D)

    def evaluate(state):
        seen.append(int(state.step))
        return {"accuracy": seen[-1] / 100, "error": 0.25}

    log = tmp_path / "run.jsonl"
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
        result = fit(step, step.init(weights()), feed, epochs=1.5, evaluate=evaluate, log=log, say=lines)
    losses, _ = twin(rows, 15)
    assert seen == [10, 15]
    assert result.evaluations == [(10, {"accuracy": 0.1, "error": 0.25}), (15, {"accuracy": 0.15, "error": 0.25})]
    assert repr(result).endswith(", test accuracy 15.00%, test error 0.25)")
    assert lines[0].startswith("Compiled in ")
    assert lines[1] == f"Epoch 0.2, Mean loss: {np.mean(losses[:2]):.3f}"
    assert lines[6] == "Epoch 1.0, Test accuracy: 10.00%, Test error: 0.25"
    assert lines[-3] == f"Epoch 1.5, Mean loss: {losses[14]:.3f}"
    assert lines[-2] == "Epoch 1.5, Test accuracy: 15.00%, Test error: 0.25"
    assert lines[-1].startswith("15 updates in ")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] != "losses"] == [
        "start", "compiled", "evaluated", "evaluated", "end",
    ]  # fmt: skip
    assert (events[0]["samples_per_update"], events[0]["total_updates"]) == (M * B, 15)
    logged = [loss for event in events if event["event"] == "losses" for loss in event["losses"]]
    np.testing.assert_allclose(logged, losses, rtol=1e-4)


@pytest.mark.fast("2-Ctrl-C-2-10")
@pytest.mark.parametrize(
    ("number", "name", "k", "per_epoch"),
    # a line is of one call or, of 20 updates per epoch, of two, and the training is stopped between them
    [(signal.SIGTERM, "SIGTERM", 1, 20), (signal.SIGINT, "Ctrl-C", 2, 10)],
)
def test_a_signal_saves_and_the_same_call_goes_on(tmp_path, number, name, k, per_epoch):
    rows = normal(4, per_epoch * M * B, D)
    expected, end = twin(rows, 2 * per_epoch)
    step, said, log = shared_step(k), Lines(), tmp_path / "log"

    def signalled(line):
        said(line)
        if line.startswith("Epoch 0.4"):
            press(number)

    def run(say, **recorded: Any):
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
            return fit(step, step.init(weights()), feed, epochs=2, say=say, **recorded)

    recorded = {"checkpoints": tmp_path / "run", "log": log}
    with hearing_ctrl_c():
        if name == "Ctrl-C":
            with pytest.raises(KeyboardInterrupt):
                run(signalled, **recorded)
            first = FitResult.last
        else:
            first = run(signalled, **recorded)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert first is not None
    assert first.stopped == name
    assert 4 <= first.updates < per_epoch
    assert k == 2 or first.updates % 2 == 1
    assert_same_weights(step, first.state, twin(rows, first.updates)[1])
    assert said[-1].startswith(
        f"{name}: stopped after {first.updates} of {2 * per_epoch} updates; saved in {tmp_path / 'run'}: "
    )

    second = Lines()
    result = run(second, **recorded)
    assert second[0].startswith(f"Resumed from {tmp_path / 'run'}")
    np.testing.assert_allclose([*first.losses, *result.losses], expected, rtol=1e-4)
    assert_same_weights(step, result.state, end)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(len(event["losses"]) for event in events if event["event"] == "losses") == 2 * per_epoch
    whole = Lines()
    run(whole)
    of_losses = lambda lines: [line for line in lines if "Mean loss" in line]
    assert of_losses(said) + of_losses(second) == of_losses(whole)
    third = Lines()
    assert run(third, **recorded).losses.size == 0
    assert third[-1] == f"{2 * per_epoch} updates had been made"


@pytest.mark.slow
def test_an_error_leaves_the_last_state(tmp_path):
    rows = normal(5, 6 * M * B, D)
    rows[4 * M * B + 1, 0] = np.nan
    step = make_step(on_nonfinite="stop")
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, RunLog(tmp_path / "log") as log:
        with pytest.raises(NonFiniteLossError, match="update 5, replica 0, micro-batch 0") as raised:
            fit(step, step.init(weights()), feed, log=log, say=Lines())
        assert "ipu_jax.steps.FitResult.last.state" in "".join(raised.value.__notes__)
        assert FitResult.last is not None
        assert_same_weights(step, FitResult.last.state, twin(rows, 4)[1])
        assert log.events[-1]["event"] == "failed"
        fit(
            step, step.restore(step.whole(FitResult.last.state)), feed, updates=1, log=log, say=Lines()
        )  # both stay open
    assert FitResult.last is None


def test_a_stream_is_trained_on_epoch_by_epoch():
    rows = normal(7, 5 * M * B, D)
    step, lines = shared_step(2), Lines()
    batches = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    with Feed(batches, items="batches", step=step, micro_batch=B) as feed:
        result = fit(step, step.init(weights()), feed, epochs=2, evaluate=lambda state: {"x": 1}, say=lines)
        assert feed
        with pytest.raises(TypeError, match="a stream does not say how many"):
            len(feed)
        with pytest.raises(ValueError, match=r"epochs=0\.5, but a stream .* give an int, or updates="):
            fit(step, result.state, feed, epochs=0.5)
    np.testing.assert_allclose(result.losses, twin(rows, 10)[0], rtol=1e-4)
    assert lines.count("Update 5, Test x: 1") == 1


@pytest.mark.slow
def test_a_trace_is_of_three_updates_whatever_a_call_makes(tmp_path):
    rows = normal(8, 12 * M * B, D)
    step, lines = make_step(6), Lines()
    recording = trace(tmp_path)
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
        result = fit(step, step.init(weights()), feed, trace=recording, say=lines)
    np.testing.assert_allclose(result.losses, twin(rows, 12)[0], rtol=1e-4)
    assert {each.step for each in recording.timeline.steps} == {0, 1, 2}
    assert any(f"Trace: {recording.path}" in line for line in lines)


@pytest.mark.slow
def test_calls_that_compile_or_are_traced_have_no_speed(tmp_path):
    step, lines, log = make_step(1), Lines(), RunLog()
    with Feed(normal(8, 8 * M * B, D), step=step, micro_batch=B) as feed:
        result = fit(step, step.init(weights()), feed, trace=tmp_path, log=log, say=lines)
        one = fit(step, step.init(weights()), feed, updates=1, say=lines)
    speeds = {event["updates"]: "samples_per_second" in event for event in log.events if event["event"] == "losses"}
    # the first compiles; the third runs while the fourth, the last that is traced, is waited for
    assert speeds == {1: False, 2: True, 3: False, 4: False, 5: True, 6: True, 7: True, 8: True}
    (last,) = [line for line in lines if line.startswith("8 updates in ")]
    assert result.seconds > 0
    assert last.partition(" s, ")[2] == log.digest.figures()["samples per second"].replace(" (", " samples/s (")
    assert one.updates == 1
    assert re.fullmatch(r"1 update in [\d.]+ s", lines[-1])


def test_checkpoints_of_ones_own_stay_open_and_it_trains_in_any_thread(tmp_path):
    rows, results = normal(9, 4 * M * B, D), []
    step = shared_step()
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, Checkpoints(tmp_path, step, every=1) as mine:
        train = lambda: results.append(fit(step, step.init(weights()), feed, checkpoints=mine, say=Lines()))
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        mine.save(results[0].state, feed, extra="more", now=True)
    assert mine.last == 4


@pytest.mark.parametrize("moment", ["restore", "feed", "evaluate"])
def test_ctrl_c_before_the_first_step_leaves_the_state(moment, tmp_path, monkeypatch):
    """While a checkpoint is read, no step follows; while the first step is prepared, or an epoch is evaluated, none."""
    rows, step, lines = normal(9, 4 * M * B, D), shared_step(2), Lines()

    def press_at(name):
        if name == moment:
            press()

    usual = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", lambda *args, **given: press_at("restore") or usual(*args, **given))
    evaluate = lambda state: press_at("evaluate") or {}
    with hearing_ctrl_c(), Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
        batches = feed.epoch
        monkeypatch.setattr(feed, "epoch", lambda: press_at("feed") or batches())
        with pytest.raises(KeyboardInterrupt) as raised:
            fit(step, step.init(weights()), feed, epochs=3, evaluate=evaluate, checkpoints=tmp_path, say=lines)
    last, updates = FitResult.last, {"restore": 0, "feed": 2, "evaluate": 4}[moment]
    assert last is not None
    assert (last.updates, last.stopped) == (updates, "Ctrl-C")
    assert_same_weights(step, last.state, twin(rows, updates)[1])
    saved = f"saved in {tmp_path}: the same call goes on from there" if updates else "nothing was saved"
    assert lines[-1] == f"Ctrl-C: stopped after {updates} of 12 updates; {saved}"
    assert raised.value.__notes__ == ["The last state is ipu_jax.steps.FitResult.last.state"]


def test_a_ctrl_c_that_does_not_wait_says_what_is_saved():
    """After a second Ctrl-C, or outside the main thread, there is only the exception."""
    rows, step, lines = normal(9, 4 * M * B, D), shared_step(2), Lines()

    def evaluate(state):
        raise KeyboardInterrupt

    with Feed(rows, step=step, micro_batch=B) as feed, RunLog() as log, pytest.raises(KeyboardInterrupt):
        fit(step, step.init(weights()), feed, evaluate=evaluate, log=log, say=lines)
    assert lines[-1] == "Ctrl-C: stopped after 4 of 4 updates; nothing was saved"
    assert log.events[-1]["event"] == "stopped"


def test_a_second_training_compiles_nothing_and_does_not_say_so():
    rows, step, lines = normal(9, 4 * M * B, D), make_step(2), Lines()

    class Slow(type(step)):  # on a busy machine, a call takes as long as a small program's compilation
        def __call__(self, *args, **options):
            time.sleep(0.1)
            return super().__call__(*args, **options)

    with Feed(rows, step=step, micro_batch=B) as feed:
        state = fit(step, step.init(weights()), feed, say=lines, print_every=0).state
        step.__class__ = Slow
        fit(step, state, feed, say=lines, print_every=3)
    ends = "4 updates in", "8 updates, 4 of"
    starts = ["Compiled in", ends[0], "Epoch 1.5, Mean loss", "Epoch 2.0, Mean loss", ends[1]]
    assert len(lines) == len(starts)
    assert not [line for line, start in zip(lines, starts, strict=True) if not line.startswith(start)]


@pytest.mark.fast("well", "by Ctrl-C")
@pytest.mark.parametrize("ends", ["well", "by an error", "by Ctrl-C", "with a folder in place of the page"])
def test_a_page_is_written_however_it_ends(ends, tmp_path):
    rows, step, page = normal(9, 4 * M * B, D), shared_step(2), tmp_path / "run.html"

    def evaluate(state):
        if ends == "by an error":
            raise OSError("the disk is full")
        if ends == "by Ctrl-C":
            raise KeyboardInterrupt
        if ends.startswith("with a folder"):
            page.mkdir()
        return {"accuracy": float("nan")}

    expected = {"by an error": pytest.raises(OSError, match="is full"), "by Ctrl-C": pytest.raises(KeyboardInterrupt)}
    failing = pytest.warns(RunLogWarning, match=r"report .*run\.html was not written")
    expected["with a folder in place of the page"] = failing
    with expected.get(ends, contextlib.nullcontext()), Feed(rows, step=step, micro_batch=B) as feed:
        fit(step, step.init(weights()), feed, evaluate=evaluate, report=page, title="Mine", say=Lines())
    if ends.startswith("by"):
        last = FitResult.last
        assert last is not None
        assert last.updates == int(last.state.step) == 4
    if page.is_file():
        text = page.read_text()
        holds = {"well": "all updates were made", "by an error": "the disk is full", "by Ctrl-C": "stopped after 4"}
        assert not [one for one in ("Mine", "grouped, by ticks", '"loss":[[1,', holds[ends]) if one not in text]
    else:
        assert page.is_dir()


FILE = public_api.ROOT / "ipu_jax/run/loop/fit.py"
MODULES = (*public_api.SUBJECTS, "popdist", "cli")


def test_its_file_uses_public_names_only_and_is_short():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 420
    tree = ast.parse(text)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert {each.partition(".")[0] for each in imported} - sys.stdlib_module_names == {"ipu_jax", "jax", "numpy"}
    # also in annotations, which are texts
    used = re.findall(rf"\bipu_jax\.(?:(?:{'|'.join(MODULES)})\.)?\w+", text)
    assert {"ipu_jax.Feed", "ipu_jax.observe.write_report", "ipu_jax.steps.StepOutputs"} <= {*used}
    public = {f"ipu_jax.{name}" for name in ipu_jax.__all__}
    public |= {f"ipu_jax.{module}.{name}" for module in MODULES for name in getattr(ipu_jax, module).__all__}
    assert {*used} <= public
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not [name for name in attributes if re.match("_[^_]", name)]
    (of_data,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [node for node in ast.walk(of_data) if isinstance(node, ast.FunctionDef)]


@pytest.fixture
def my_fit(tmp_path):
    """Return the module of a copy in another folder, under another name."""
    path = tmp_path / "my_fit.py"
    path.write_bytes(FILE.read_bytes())
    spec = importlib.util.spec_from_file_location("my_fit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_fit"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["my_fit"]


@pytest.mark.slow
def test_a_copy_trains_evaluates_saves_logs_draws_and_resumes(my_fit, tmp_path):
    rows, step = normal(2, 6 * M * B, D), make_step(2)

    def run(**more):
        lines = Lines()
        files = {"checkpoints": tmp_path / "saved", "log": tmp_path / "log", "report": tmp_path / "run.html"}
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
            evaluate = lambda state: {"accuracy": int(state.step) / 100}
            result = my_fit.fit(step, step.init(weights()), feed, evaluate=evaluate, say=lines, **files, **more)
        return result, lines

    assert Path(my_fit.__file__).parent == tmp_path
    first, _ = run(epochs=1, trace=tmp_path / "trace", notes={"seed": 3})
    second, lines = run(epochs=2)
    losses, end = twin(rows, 12)
    np.testing.assert_allclose([*first.losses, *second.losses], losses, rtol=1e-4)
    assert_same_weights(step, second.state, end)
    assert isinstance(second, FitResult)
    assert second.evaluations == [(12, {"accuracy": 0.12})]
    assert (tmp_path / "trace/trace.json.gz").is_file()
    assert "all updates were made" in (tmp_path / "run.html").read_text()
    assert lines[0] == f"Resumed from {tmp_path}/saved/step-6, after 6 updates"
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {event["event"] for event in events} >= {"start", "compiled", "losses", "evaluated", "saved", "resumed"}
    assert set(events[0]) >= {*checked_fit.NAMES_OF_START, "seed"}
