"""Test when and what is saved, that the next steps may go on meanwhile, and what is refused by name."""

import functools
import gc
import itertools
import shutil
import threading
import time
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ipu_jax import Checkpoints, TrainOptions, make_train_step
from ipu_jax.distributed.processes import beacons, listener, record
from ipu_jax.io import CheckpointError
from ipu_jax.steps import TrainState
from ipu_jax.training.checkpoints import _all_instances, _seal
from ipu_jax.training.checkpoints._all_instances import Due
from ipu_jax.training.checkpoints._store import Store
from support.small_problems import product_loss, product_rows, product_weights
from support.trained import bits

WEIGHTS = product_weights()


@functools.cache
def step_of(optimizer: Any = None, **options: Any) -> Any:
    return make_train_step(product_loss, optimizer or optax.adam(0.1), TrainOptions(**options))


SGD = optax.sgd(0.1)


@pytest.fixture
def slow_disk(monkeypatch):
    """Let the background wait before it writes, until the event is set."""
    may_write, wait = threading.Event(), Store.wait
    monkeypatch.setattr(Store, "wait", lambda self, check: (may_write.wait(60), wait(self, check)))
    return may_write


# when


@pytest.mark.parametrize(
    ("every", "resumed", "iterations", "saved"),
    [(4, 0, 1, [4, 8]), (4, 0, 3, [6, 9, 12]), (1, 0, 2, [2, 4, 6]), (100, 150, 10, [200, 300])],
)
def test_a_save_is_due_when_a_multiple_of_its_number_of_updates_is_reached_or_passed(every, resumed, iterations, saved):
    due, found = Due(every, None), []
    due.restart(resumed)
    while len(found) < len(saved):
        if due.after(iterations):
            assert due.step is not None
            found.append(due.step)
            due.restart(due.step)
    assert found == saved


def test_minutes_are_those_since_the_last_save():
    now = itertools.count(0, 20)
    due = Due(None, 1, clock=lambda: next(now))
    due.restart(0)  # at 20 s
    assert [due.after(1) for _ in range(3)] == [False, False, True]
    due.restart(3)  # at 100 s
    assert [due.after(1) for _ in range(3)] == [False, False, True]


def test_several_instances_ask_the_first_one_a_few_times_only(monkeypatch):
    """A step takes 0.1 s, and a save is due every 60 s: 600 calls."""
    calls, asked = itertools.count(), []
    monkeypatch.setattr(_all_instances.popdist, "get_num_instances", lambda: 2)
    monkeypatch.setattr(_all_instances.popdist, "broadcast", lambda wait: asked.append(wait) or wait)
    at = 0
    due = Due(None, 1, clock=lambda: 0.1 * at)
    due.restart(0)
    for at in calls:
        if at and due.after(1):
            break
    assert 600 <= at <= 603
    assert len(asked) <= 10


@pytest.mark.parametrize(
    ("saves", "keep", "kept", "is_resumed"),
    [
        ([100, 300, 150], 1, [150], True),
        ([9, 10, 2], 2, [2, 10], False),
        ([5, 6, 5], 3, [5, 6], False),
        ([5, 6, 7, 5], 2, [5, 7], True),
        ([3, 0], 3, [0, 3], False),
    ],
)
def test_the_last_checkpoint_is_what_was_saved_last_whatever_its_step(tmp_path, saves, keep, kept, is_resumed):
    """Each save has its own weights. Resumed: another program makes each, and resumed the first of all by its path."""
    step, folder = step_of(SGD), tmp_path / "new" / "runs"
    like = step.init(WEIGHTS)
    whole, first = step.whole(like), folder / f"step-{saves[0]}"
    for program in [[number] for number in range(len(saves))] if is_resumed else [range(len(saves))]:
        with Checkpoints(folder, step, keep=keep) as checkpoints:
            if first.exists():
                checkpoints.restore(like, resume=first)
            for number in program:
                weights = {**WEIGHTS, "v": np.full(3, number, np.float32)}
                checkpoints.save(step.restore({**whole, "params": weights, "step": saves[number]}), now=True)
                checkpoints.wait()
                assert checkpoints.last == saves[number]
    assert sorted(int(path.name.split("-")[1].split(".")[0]) for path in folder.iterdir()) == sorted(kept)
    with Checkpoints(folder, step) as checkpoints:
        for rank, each in enumerate(kept):
            found = checkpoints.restore(like, resume="must")
            assert found is not None
            last = max(number for number, at in enumerate(saves) if at == each)
            assert (found.step, found.state.params["v"].tolist()) == (each, [last] * 3)
            if rank + 1 < len(kept):  # without this one, the one that was saved before it is the last
                found.path.rename(tmp_path / f"elsewhere {rank}")


def test_a_call_that_saves_nothing_waits_for_nothing(tmp_path):
    """It neither reads the state, whose step may not have run yet, nor writes."""
    step = step_of()
    with Checkpoints(tmp_path, step, every=1000) as checkpoints:
        checkpoints.restore(step.init(WEIGHTS))
        none: Any = None
        nothing = TrainState(params=none, optimizer=none, stages=none, scale=none, step=none, key=none)
        begin = time.thread_time()
        assert not any(checkpoints.save(nothing) for _ in range(500))
        assert (time.thread_time() - begin) / 500 < 1e-3
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_saves_leave_no_objects_in_memory(tmp_path):
    """Else thousands would grow: jax keeps each `eval_shape`, and tensorstore each answer about its counters."""
    step, saves = step_of(SGD, donate=False), 5
    state = step.init(WEIGHTS)
    with Checkpoints(tmp_path, step, keep=1) as checkpoints:

        def objects_after(count: int) -> int:
            nonlocal state
            for _ in range(count):
                state, _ = step(state, product_rows(1))
                checkpoints.save(state, now=True)
                checkpoints.wait()
            gc.collect()
            return len(gc.get_objects())

        before = objects_after(4)
        assert (objects_after(saves) - before) / saves < 5  # some caches fill up at first


# what


def test_the_next_steps_may_reuse_the_buffers_of_a_state_that_is_being_saved(tmp_path, slow_disk):
    """The background writes only after ten more steps, which donate the state that is being saved."""
    step = step_of()
    state, _ = step(step.init(WEIGHTS), product_rows(1))
    expected = jax.tree.map(np.array, step.whole(state))
    with Checkpoints(tmp_path, step) as checkpoints:
        assert checkpoints.save(state, now=True)
        for _ in range(10):
            state, _ = step(state, product_rows(1))
        jax.block_until_ready(state.params)
        assert checkpoints.last is None
        slow_disk.set()
    with Checkpoints(tmp_path, step) as checkpoints:
        found = checkpoints.restore(state)
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, step.whole(found.state), expected)
    assert found.step == 1 < int(state.step)


POSITION, EXTRA = {"epoch": 1, "position": 3}, {"rate": 0.1, "flags": ["a", {"b": None}], "on": 1}


@pytest.mark.fast("None-extra3-True", "position1-extra1-True", "position4-extra4-True", "position6-extra6-True")
@pytest.mark.parametrize(
    ("position", "extra", "is_written"),
    [
        ({"position": 3, "epoch": 1}, {"on": 1, "flags": ["a", {"b": None}], "rate": 0.1}, False),
        ({"epoch": 2, "position": 3}, EXTRA, True),
        ({"epoch": 1}, EXTRA, True),
        (None, EXTRA, True),
        (POSITION, {**EXTRA, "flags": ["a", {"b": False}]}, True),
        (POSITION, {**EXTRA, "on": True}, True),
        (POSITION, {**EXTRA, "on": 1.0}, True),
        (POSITION, None, True),
    ],
)
def test_the_same_state_with_another_position_or_extra_is_written_anew(tmp_path, position, extra, is_written):
    step = step_of()
    state = step.init(WEIGHTS)
    with Checkpoints(tmp_path, step) as checkpoints:
        assert checkpoints.save(state, POSITION, extra=EXTRA, now=True)
        checkpoints.wait()
        first = _seal.read_seal(tmp_path / "step-0")["number"]
        assert checkpoints.save(state, position, extra=extra, now=True)
    (path,) = tmp_path.iterdir()
    seal = _seal.read_seal(path)
    assert (path.name, seal["number"]) == (("step-0.2", first + 1) if is_written else ("step-0", first))
    assert seal["versions"].keys() == {"ipu_jax", "jax", "orbax-checkpoint", "optax"}
    with Checkpoints(tmp_path, step) as checkpoints:
        found = checkpoints.restore(state)
    assert found is not None
    assert (found.feed, found.extra) == (position, extra)


def test_a_checkpoint_that_was_removed_is_written_anew(tmp_path):
    step = step_of(SGD)
    state = step.init(WEIGHTS)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, POSITION, now=True)
        checkpoints.wait()
        shutil.rmtree(tmp_path / "step-0")
        assert checkpoints.save(state, POSITION, now=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_empty_arrays_and_keys_of_an_optimizer_are_restored(tmp_path):
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(0.1))
    weights = WEIGHTS | {"empty": np.zeros((0, 3), np.float32)}
    step, other = (step_of(optimizer, replication_factor=n, shard_optimizer=n > 1) for n in (2, 1))
    state = step.init(weights)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
    for again, topology in ((step, "same"), (other, "other")):
        with Checkpoints(tmp_path, again) as checkpoints:
            found = checkpoints.restore(again.init(weights))
        assert found is not None
        assert found.topology == topology
        assert bits(again.whole(found.state)["optimizer"]) == bits(step.whole(state)["optimizer"])


# the end


def test_the_last_save_is_waited_for_and_verified(tmp_path):
    step = step_of()
    checkpoints = Checkpoints(tmp_path, step)
    checkpoints.save(step.init(WEIGHTS), now=True)
    checkpoints.wait()
    index = tmp_path / "step-0" / "manifest.ocdbt"
    index.write_bytes(index.read_bytes()[:-1])
    wrong = r"it was written, but manifest.ocdbt has another size; restore\(\) finds the one before it$"
    with pytest.raises(CheckpointError, match=wrong):
        checkpoints.close()
    checkpoints.close()  # does nothing any more


def test_an_error_in_the_last_save_is_raised_at_the_end_and_hides_none_of_the_program(tmp_path, monkeypatch):
    step, wait = step_of(), Store.wait

    def fails(self: Any, check: Any) -> None:
        wait(self, check)
        raise OSError(5, "Input/output error")

    def program(error: Exception | None) -> None:
        with Checkpoints(tmp_path, step) as checkpoints:
            checkpoints.save(step.init(WEIGHTS), now=True)
            if error is not None:
                raise error

    monkeypatch.setattr(Store, "wait", fails)
    with pytest.raises(CheckpointError, match="Errno 5"):
        program(None)
    with pytest.raises(KeyError) as raised:
        program(KeyError("mine"))
    (note,) = raised.value.__notes__
    assert "step-0 failed, [Errno 5] Input/output error, of " in note


def test_poprun_is_told_that_a_save_is_no_stuck_step_and_no_compilation(tmp_path, monkeypatch):
    """Finding shapes traces a function: the beacon would say COMPILING until the next step, for which it may wait."""
    beacon, seen, phases, begin = beacons.Beacon(tmp_path / "beacon"), [], [], Store.begin
    enter, read = type(beacon).enter, lambda: (beacon.phase, beacons.read(tmp_path / "beacon"))
    monkeypatch.setattr(record, "current", lambda: beacon)
    monkeypatch.setattr(beacon, "enter", lambda phase, *rest: phases.append(phase) or enter(beacon, phase, *rest))
    monkeypatch.setattr(Store, "begin", lambda self, *a: (seen.append(read()), begin(self, *a)))
    compilations = listener._Compilations(beacon)
    jax.monitoring.register_event_duration_secs_listener(compilations)
    try:
        step = step_of()
        state = step.init(WEIGHTS)
        with Checkpoints(tmp_path / "runs", step) as checkpoints:
            checkpoints.save(state, now=True)
            beacon.finished()
            phases.clear()
            checkpoints.save(step.restore({**step.whole(state), "step": 1}), now=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(compilations)
    assert [phase for phase, _ in seen] == [beacons.Phase.BUSY] * 2
    assert {(reading.label, reading.limit) for _, reading in seen} == {("beginning a save", 600.0)}
    assert beacons.Phase.BUSY in phases
    assert beacons.Phase.COMPILING not in phases
    assert beacon.phase is beacons.Phase.STEPPING
