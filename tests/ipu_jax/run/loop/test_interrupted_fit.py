"""Test that wherever Ctrl-C interrupts `fit`, the feed stands where the state does: to go on gives the same bits."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, TrainOptions, fit, make_train_step
from ipu_jax.run.loop import fit as loop
from ipu_jax.steps import FitResult, StopRequest
from ipu_jax.training.data import feed as feeds
from ipu_jax.training.data import prefetch
from support.fitted import hearing_ctrl_c, normal, press
from support.trained import compiled_quickly

_compiled_quickly = compiled_quickly()

ROWS, UPDATES, SIZE = normal(0, 32, 3), 11, 4  # epochs of 8 updates; with 4 updates per call, the last one makes 3
QUIET: dict[str, Any] = {"progress": False, "say": lambda line: None}
SOURCES: dict[str, Callable[[], Any]] = {"array": lambda: ROWS, "iterator": lambda: iter([*ROWS, *ROWS])}
Line = tuple[CodeType, int]


def steps_of(k: int) -> Any:
    return make_train_step(
        lambda w, rows: jnp.mean((rows - w) ** 2), optax.sgd(0.1), TrainOptions(device_iterations=k, outputs="all")
    )


STEPS = {k: steps_of(k) for k in (1, 4)}


def feed_of(k: int, kind: str = "array", **options: Any) -> Feed:
    options |= {} if kind == "array" else {"items": "examples"}
    return Feed(SOURCES[kind](), step=STEPS[k], micro_batch=SIZE, **options)


def weights_after(k: int, feed: Feed, state: Any = None, updates: int = UPDATES) -> np.ndarray[Any, Any]:
    first = STEPS[k].init(jnp.zeros(3)) if state is None else state
    return np.asarray(fit(STEPS[k], first, feed, updates=updates, **QUIET).state.params)


def go_on(k: int, feed: Feed) -> np.ndarray[Any, Any]:
    """Return the weights after all updates, made from where an interrupted `fit` left state and feed."""
    last = FitResult.last
    assert last is not None
    assert last.updates == int(last.state.step)
    left = UPDATES - last.updates
    return weights_after(k, feed, last.state, left) if left else np.asarray(last.state.params)


def tracing(at_line: Callable[[Line], None], *modules: Any) -> Callable[[FrameType, str, Any], Any]:
    """Return a trace function that calls `at_line` before each line of these modules, from update 4 on."""
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and FitResult.last is not None and FitResult.last.updates >= 4:
            at_line((frame.f_code, frame.f_lineno))
        return trace

    return trace


def lines_of(k: int, kind: str) -> Iterator[Line]:
    """Yield the lines that the reading of batches and the calls of steps run through."""
    seen: dict[Line, None] = {}
    names = {"train", "call", "pieces", "epoch", "_next", "_read", "take", "put_back", "report_all_but", "heed"}
    sys.settrace(tracing(lambda line: seen.setdefault(line), loop, feeds, prefetch))
    try:
        weights_after(k, feed_of(k, kind))
    finally:
        sys.settrace(None)
    return (line for line in seen if line[0].co_name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "iterator"])
@pytest.mark.parametrize("k", [1, 4])
def test_an_interruption_before_any_line_skips_no_batch(k, kind):
    want, lines = weights_after(k, feed_of(k, kind)), [*lines_of(k, kind)]
    assert len(lines) > 40
    wrong, refused = list[str](), 0
    for line in lines:

        def interrupt(now: Line, line: Line = line) -> None:
            if now == line:
                sys.settrace(None)
                raise KeyboardInterrupt

        with feed_of(k, kind) as feed:
            sys.settrace(tracing(interrupt, loop, feeds, prefetch))
            try:
                with pytest.raises(KeyboardInterrupt):
                    weights_after(k, feed)
            finally:
                sys.settrace(None)
            try:
                is_same = np.array_equal(go_on(k, feed), want)
            except ValueError:  # what an iterator has given cannot be read again: that is said
                assert kind == "iterator"
                refused, is_same = refused + 1, True
            if not is_same:
                wrong.append(f"{line[0].co_name}:{line[1]}")
    assert not wrong
    assert refused < len(lines) // 2


def press_twice() -> None:
    """Press Ctrl-C twice, as seen by the main thread, which the second one interrupts here unless it is held."""
    press()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


class PressingRows:
    """Rows whose reader presses Ctrl-C twice in the read of the sixth update."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.reads += len(index)
        if self.reads - len(index) <= 6 * SIZE < self.reads:
            press_twice()
        return ROWS[index]


@pytest.mark.parametrize("moment", ["read", "call", "step", "losses"])
@pytest.mark.parametrize("k", [1, 4])
def test_two_presses_of_ctrl_c_skip_no_batch(k, moment, monkeypatch):
    want = weights_after(k, feed_of(k))
    source = PressingRows() if moment == "read" else ROWS

    def pressing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **options: Any) -> Any:
            results = usual(*args, **options) if moment == "step" else None  # which has used up the state before
            if FitResult.last is not None and FitResult.last.updates == 4 and not pressed:
                pressed.append(moment)
                press_twice()
            return usual(*args, **options) if results is None else results

        return function

    pressed: list[str] = []
    step = STEPS[k]
    if moment == "step":
        monkeypatch.setattr(
            step, "__class__", type("Pressing", (type(step),), {"__call__": pressing(type(step).__call__)})
        )
    elif moment != "read":
        name = {"call": "call", "losses": "report_all_but"}[moment]
        monkeypatch.setattr(loop, name, pressing(getattr(loop, name)))
    with hearing_ctrl_c(), Feed(source, step=step, micro_batch=SIZE, prefetch=0) as feed:
        with pytest.raises(KeyboardInterrupt):
            weights_after(k, feed)
        assert FitResult.last is not None
        assert FitResult.last.updates < UPDATES
        np.testing.assert_array_equal(go_on(k, feed), want)


def test_a_feed_that_never_answers_can_be_interrupted(monkeypatch):
    answers, answered, is_stuck = threading.Event(), list[bool](), threading.Event()

    class Stuck(PressingRows):
        def __getitem__(self, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            self.reads += 1
            if self.reads > 6:
                is_stuck.set()
                answered.append(answers.wait(60))
            return ROWS[index]

    want, handle, handled = weights_after(1, feed_of(1)), StopRequest._raise_at_the_second, threading.Event()

    def handle_and_say(*args: Any) -> None:
        handle(*args)
        handled.set()

    def press_from_another_thread() -> None:
        assert is_stuck.wait(60)
        made = None
        while FitResult.last is not None and made != FitResult.last.updates:  # until the read is waited for
            made = FitResult.last.updates
            time.sleep(0.5)
        press()
        assert handled.wait(60)  # by the main thread: two presses before that are one
        time.sleep(0.5)  # until that thread waits again: a signal on its way there is heard with the next one
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StopRequest, "_raise_at_the_second", handle_and_say)
    with hearing_ctrl_c(), Feed(Stuck(), step=STEPS[1], micro_batch=SIZE) as feed:
        threading.Thread(target=press_from_another_thread, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            weights_after(1, feed)
        assert not answered
        answers.set()
        np.testing.assert_array_equal(go_on(1, feed), want)
