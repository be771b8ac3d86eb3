"""Test `fit` with several updates per call, across changes of the batch, over streams, and at its end."""

import json
import signal
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, TrainOptions, fit, make_train_step
from ipu_jax.observe import RunLog
from ipu_jax.options import DynamicScale
from ipu_jax.steps import FitResult
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
    trained_on,
    twin,
    weights,
)
from support.streams import StatefulItems
from support.trained import compiled_quickly

SIZE = M * B


_compiled_quickly = compiled_quickly()


def events_of(log, name):
    return [event for event in log.events if event["event"] == name]


# skipped updates

OUTPUTS = ["final", "all", "sum", 2]


@pytest.mark.fast("final")
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_training_in_which_every_update_overflows_says_so(outputs):
    """At a scale of 2^24 every gradient is infinite in float16, and the scale cannot get smaller."""
    scale = DynamicScale(initial=2.0**24, smallest=2.0**24)
    options = {"loss_scale": scale, "precision": "16.32", "half": "float16", "device_iterations": 4}
    step = make_train_step(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), TrainOptions(outputs=outputs, **options)
    )
    lines, first = Lines(), np.ones(3, np.float32)
    with Feed(np.full((32, 3), 9, np.float32), step=step, micro_batch=2) as feed, RunLog() as log:
        result = fit(step, step.init(first), feed, say=lines, log=log)
    assert (result.updates, result.skipped, result.nonfinite) == (16, 16, 0)
    np.testing.assert_array_equal(step.whole(result.state)["params"], first)
    assert sum(event["count"] for event in events_of(log, "skipped")) == 16
    assert [line.rpartition(", ")[2] for line in lines if "Mean" in line] == ["4 of 4 updates skipped"] * 4
    assert lines[-1].endswith("; skipped 16 updates")


@pytest.mark.fast("all")
@pytest.mark.parametrize(
    ("outputs", "number"), [("all", 5), (2, 3), ("final", 2), ("sum", 2)], ids=["all", "2", "final", "sum"]
)
def test_a_loss_that_is_not_finite_is_said_once_and_counted(outputs, number):
    """NaN in update 3 of 8, counted from 0, spoils the weights: the losses of updates 3 to 7 are NaN."""
    rows = normal(1, 8 * SIZE, D)
    rows[3 * SIZE] = np.nan
    step, lines = make_step(4 if outputs in ("final", "sum") else 2, 1, outputs=outputs), Lines()
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, RunLog() as log:
        result = fit(step, step.init(weights()), feed, say=lines, log=log)
    assert (result.updates, result.nonfinite, log.digest.nonfinite) == (8, number, number)
    (said,) = [line for line in lines if "on_nonfinite" in line]
    assert 'TrainOptions(on_nonfinite="stop")' in said
    assert "first 4 updates" in said
    assert lines[-1].endswith(f"losses that are not finite: {number}")
    assert f"{number} not finite" in repr(result)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_the_updates_that_are_not_finite_are_counted(outputs):
    """NaN in updates 1, 5, 6 and 9 of 10, counted from 0; the last call makes 2 of 4."""
    bad, rows = [1, 5, 6, 9], normal(1, 10 * SIZE, D)
    rows[[n * SIZE for n in bad]] = np.nan
    step, lines = make_step(4, 1, on_nonfinite="skip", outputs=outputs), Lines()
    with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(step, step.init(weights()), feed, say=lines)
    assert (result.updates, result.skipped, result.nonfinite) == (10, len(bad), 0)
    assert [line.rpartition(", ")[2] for line in lines if "skipped" in line and "Mean" in line] == [
        "1 of 4 updates skipped",
        "2 of 4 updates skipped",
        "1 of 2 updates skipped",
    ]
    assert lines[-1].endswith("; skipped 4 updates")
    good = [rows[n * SIZE : (n + 1) * SIZE] for n in range(10) if n not in bad]
    assert_same_weights(step, result.state, trained_on(good)[1])


@pytest.mark.slow
def test_skipped_updates_of_before_are_remembered_at_a_resume(tmp_path):
    rows = normal(1, 8 * SIZE, D)
    rows[[0, 5 * SIZE]] = np.nan
    step = make_step(2, 1, on_nonfinite="skip")

    def run(updates):
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fit(step, step.init(weights()), feed, updates=updates, checkpoints=tmp_path / "run", say=Lines())

    assert [run(updates).skipped for updates in (4, 8)] == [1, 2]


# another number of examples per update after a resume: 100 examples, after 20 updates of 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "replicas", "m", "k", "left"),
    # of an epoch of 100 examples, 16 updates of 6 fit; then from example 24 of epoch 1 on, and all of epoch 2
    [
        (20, 2, 2, 1, [(24, 12, 6), (0, 12, 8)]),
        (20, 1, 4, 3, [(24, 12, 6), (0, 12, 8)]),
        (20, 1, 1, 1, [(24, 3, 25), (0, 3, 33)]),
        (20, 1, 3, 4, [(24, 9, 8), (0, 9, 11)]),
        (16, 1, 4, 1, [(0, 12, 8), (0, 12, 8)]),
        (16, 2, 1, 2, [(0, 6, 16), (0, 6, 16)]),
    ],
)
def test_epochs_count_in_the_data_whatever_an_update_takes(tmp_path, first, replicas, m, k, left):
    rows = normal(2, 100, D)

    def run(step, **until: Any):
        log = tmp_path / "log"
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
            result = fit(step, step.init(weights()), feed, checkpoints=tmp_path / "run", log=log, say=Lines(), **until)
            return result, feed.state()

    before, _ = run(shared_step(), updates=first)
    step = shared_step(k, m, replication_factor=replicas)
    result, position = run(step, epochs=3)
    parts = [(n % 16 * 6, 6) for n in range(first)]
    parts += [(at + n * size, size) for at, size, count in left for n in range(count)]
    losses, end = trained_on([rows[at : at + size] for at, size in parts])
    assert result.updates == len(parts)
    np.testing.assert_allclose([*before.losses, *result.losses], losses, rtol=1e-4)
    assert_same_weights(step, result.state, end)
    assert (position["epoch"], position["position"]) == (3, 0)
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "losses"]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 3.0
    assert [event["total_updates"] for event in events if event["event"] == "resumed"] == [len(parts)]
    again, _ = run(step, epochs=3)
    assert (again.updates, again.losses.size) == (len(parts), 0)


@pytest.mark.slow
def test_each_epoch_is_saved_whatever_an_update_takes(tmp_path):
    """After 20 updates of 6, the epochs of 100 examples end after 26 and 34 updates, no multiples of 8."""
    rows, saved = normal(2, 100, D), []
    cases: list[Any] = [(shared_step(), {"updates": 20}), (shared_step(1, 4, replication_factor=1), {"epochs": 3})]
    for step, until in cases:
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed, RunLog() as log:
            fit(step, step.init(weights()), feed, checkpoints=tmp_path / "run", log=log, say=Lines(), **until)
            saved.append([event["updates"] for event in events_of(log, "saved")])
    assert saved == [[16, 20], [26, 34]]


@pytest.mark.parametrize(("parts", "made"), [((0.78, 0.24), [5, 7]), ((0.01, 0.01, 1), [1, 2, 9]), ((2.5,), [18])])
def test_parts_of_epochs_are_rounded_to_updates(parts, made):
    """Epochs of 7 updates: 0.78 of one are 5.46 updates, 0.24 are 1.68, and 2.5 are 17.5, which rounds to even."""
    step, found = shared_step(3), []
    with Feed(normal(8, 7 * SIZE, D), step=step, micro_batch=B) as feed:
        state = step.init(weights())
        for epochs in parts:
            result = fit(step, state, feed, epochs=epochs, say=Lines())
            state = result.state
            found.append(result.updates)
        assert feed.state()["position"] == made[-1] % 7 * SIZE
    assert found == made


# trainings that end inside a call


SOURCES = {
    "function": lambda batches: lambda epoch: iter(batches),
    "list": lambda batches: batches,
    "iterator with a state": StatefulItems,
    "iterator": iter,
    "array": lambda batches: np.concatenate(batches),
}


def feed_of(kind, rows, step):
    batches = [rows[at : at + 7] for at in range(0, len(rows), 7)]
    more: dict[str, Any] = {"shuffle": False} if kind == "array" else {"items": "batches"}
    return Feed(SOURCES[kind](batches), step=step, micro_batch=B, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_calls_of_a_few_updates_read_every_example_once(kind):
    """Epochs of 14 updates, calls of 5 updates, and trainings of 3, 1, 6 and 3 updates."""
    rows, step = normal(3, 14 * SIZE + 2, D), shared_step(5)
    losses = []
    with feed_of(kind, rows, step) as feed:
        state = step.init(weights())
        for updates in (3, 1, 6, 3):
            result = fit(step, state, feed, updates=updates, say=Lines())
            state = result.state
            losses += result.losses.tolist()
    expected, end = twin(rows, 13)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same_weights(step, state, end)


@pytest.mark.fast("iterator with a state")
@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "iterator"])
def test_a_training_that_stopped_inside_a_call_is_resumed_to_the_bit(kind, tmp_path):
    rows, step = normal(3, 10 * SIZE + 2, D), shared_step(5)

    def run(updates, folder):
        with feed_of(kind, rows, step) as feed:
            return fit(step, step.init(weights()), feed, updates=updates, checkpoints=folder, say=Lines())

    for updates in (7, 14, 24):
        result = run(updates, tmp_path / "parts")
    whole = run(24, tmp_path / "whole")
    for a, b in zip(jax.tree.leaves(result.state.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same_weights(step, whole.state, twin(rows, 24)[1])


# the end


def test_a_feed_that_ends_before_the_training_is_no_end_of_the_training(tmp_path):
    """A stream is over when it is over: nobody knows it before."""
    rows, step, lines, seen = normal(4, 5 * SIZE, D), shared_step(2), Lines(), []
    with Feed(lambda epoch: iter(rows), items="examples", step=step, micro_batch=B, epochs=1) as feed, RunLog() as log:
        given = {"evaluate": lambda state: seen.append(int(state.step)) or {}, "checkpoints": tmp_path / "run"}
        result = fit(step, step.init(weights()), feed, updates=9, log=log, say=lines, **given)
    assert (result.updates, result.stopped, seen) == (5, "the end of the feed", [5])
    assert lines[-1].startswith("the end of the feed: stopped after 5 of 9 updates; saved in")
    assert [event["event"] for event in log.events][-2:] == ["evaluated", "stopped"]


@pytest.mark.fast("12 updates in-15", "the evaluation-2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["12 updates in", "Epoch 2.0, Mean loss", "the evaluation"])
def test_a_signal_after_the_last_update_is_not_lost(moment, number, tmp_path):
    rows, step = normal(5, 6 * SIZE, D), shared_step(2)

    def send(now):
        if now == moment:
            press(number)

    def evaluate(state):
        send("the evaluation" if int(state.step) == 12 else "")
        return {}

    def run():
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
            given = {"evaluate": evaluate, "checkpoints": tmp_path / "run", "epochs": 2}
            return fit(step, step.init(weights()), feed, say=lambda line: send(line[: len(moment)]), **given)

    with hearing_ctrl_c():
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                run()
            result = FitResult.last
        else:
            result = run()
    assert result is not None
    assert (result.updates, result.stopped) == (12, {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number])
    assert_same_weights(step, result.state, twin(rows, 12)[1])


# figures


def test_any_number_is_a_figure():
    numbers = [1, True, 0.5, np.float32(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), np.int64(3)]
    figures = {f"name{n}": figure for n, figure in enumerate(numbers)}
    step = shared_step()
    with Feed(normal(0, SIZE, D), step=step, micro_batch=B) as feed, RunLog() as log:
        given = {"evaluate": lambda state: figures, "epochs": np.int64(1), "log": log}
        result = fit(step, step.init(weights()), feed, say=Lines(), notes={"name1": "mine"}, **given)
    assert result.evaluations == [(1, {name: float(figure) for name, figure in figures.items()})]
