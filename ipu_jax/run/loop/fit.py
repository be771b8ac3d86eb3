"""Train to the end: the loop around a `TrainStep`, with losses, checkpoints, evaluation, logs and signals.

feed --batch--> step, step, step ...     one call runs, the next one waits, the host reads the one before
                  |-- losses             about 20 lines, the bar, the log
                  |-- a save is due      checkpoints
                  |-- SIGTERM, Ctrl-C    save, say so, and stop
end of an epoch   |-- evaluate           a line, the log
end, or failure   `-- report             a page

`ipu_jax.fit` checks its arguments (`checked_fit.py`), and then calls this `fit`. All names of ipu_jax in this file are
public, so it also runs elsewhere: whoever needs another loop copies it, and changes the copy.
"""

import contextlib
import dataclasses
import inspect
import os
import statistics
import threading
import time
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

import ipu_jax

_Path = str | os.PathLike[str]
_LAST: Final = "The last state is ipu_jax.steps.FitResult.last.state"

_compiled: "weakref.WeakSet[ipu_jax.steps.TrainStep]" = weakref.WeakSet()


@dataclasses.dataclass
class Training:
    """Hold what a training run works with, and how far it has come."""

    step: "ipu_jax.steps.TrainStep"
    feed: "ipu_jax.Feed"
    result: "ipu_jax.steps.FitResult"
    goal: int | None  # the number of updates at the end; None for epochs of a stream
    end: tuple[int, int] | None  # the epoch and position of the feed at the end; None if `updates` says when it ends
    evaluate: Callable[[Any], Mapping[str, Any]] | None
    say: Callable[[str], object]
    lines: "ipu_jax.observe.LossLines"
    bar: "ipu_jax.cli.Bar" = dataclasses.field(init=False)
    log: "ipu_jax.observe.RunLog | None" = None
    event: Callable[..., object] = lambda *_, **__: None  # writes to the log, if there is one
    checkpoints: "ipu_jax.Checkpoints | None" = None
    saves_epochs: bool = False
    recording: "ipu_jax.observe.Recording | None" = None
    stop: "ipu_jax.steps.StopRequest | None" = None
    begun: int = 0  # the updates before this run
    reported: int = 0  # the updates whose losses are known
    saved: int | None = None  # the updates of the last checkpoint, if there is one
    seen: tuple[Any, int] = None, 0  # the feed's position and the number of updates after the last whole call
    pending: deque[list[tuple[Any, int]]] = dataclasses.field(default_factory=deque)  # outputs and updates per call
    speeds: list[float] = dataclasses.field(default_factory=list)  # samples per second of each call
    untimed: int = 1  # how many of the next calls have no speed of their own
    clock: float = 0.0


def fit(
    step: "ipu_jax.steps.TrainStep", state: "ipu_jax.steps.TrainState", feed: "ipu_jax.Feed", **given: Any
) -> "ipu_jax.steps.FitResult":
    """Train, with the arguments, the result and the errors of `ipu_jax.fit`."""
    bound = inspect.signature(ipu_jax.fit).bind(step, state, feed, **given)
    bound.apply_defaults()
    asked = types.SimpleNamespace(**bound.arguments)
    shown = ipu_jax.cli.shows_progress(asked.progress)
    log, checkpoints, say = asked.log, asked.checkpoints, asked.say
    recording = ipu_jax.observe.trace(asked.trace) if isinstance(asked.trace, str | os.PathLike) else asked.trace
    if ipu_jax.popdist.get_instance_index():  # the first one prints, and writes files
        shown, say, log, asked.tensorboard, asked.report = False, len, None, None, None
    result = ipu_jax.steps.FitResult.last = ipu_jax.steps.FitResult(state, int(state.step))
    lines = ipu_jax.observe.LossLines(feed.updates_per_epoch, say, call=feed.device_iterations, every=asked.print_every)
    ends = goal_of(feed, result.updates, asked.epochs, asked.updates)
    run = Training(step, feed, result, *ends, asked.evaluate, say, lines)
    with contextlib.ExitStack() as context:
        is_told = asked.tensorboard is not None or asked.report is not None  # from a log
        if isinstance(log, str | os.PathLike) or (log is None and is_told):
            log = context.enter_context(ipu_jax.observe.RunLog(log, tensorboard=asked.tensorboard))
        if log is not None:
            run.log, run.event = log, log.event
        if asked.report is not None:
            # the last to be done: the events are complete, and a signal ends the process as usual
            context.callback(write_page, run, Path(asked.report), asked.title, recording)
        if threading.current_thread() is threading.main_thread():  # which alone can have signal handlers
            run.stop = context.enter_context(ipu_jax.steps.StopRequest(interrupts=True))
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = context.enter_context(ipu_jax.Checkpoints(checkpoints, step, minutes=10.0))
            run.saves_epochs = True
        run.checkpoints, run.recording = checkpoints, recording
        context.enter_context(contextlib.nullcontext() if recording is None else recording)
        try:
            begin(run, asked.resume, asked.notes or {})
            with ipu_jax.cli.Bar(asked.title, run.goal, run.begun, feed.examples_per_update, shown=shown) as run.bar:
                train(run)
            if run.saves_epochs and checkpoints is not None:
                checkpoints.close()  # seal the checkpoint before the last line says that it is saved
            say_the_end(run)
        except BaseException as error:
            break_off(run, error)
            raise
    if result.stopped is None and ipu_jax.popdist.all_reduce(int(run.stop is not None and run.stop.asked), "sum"):
        result.stopped = "SIGTERM" if run.stop is None else run.stop.by
    if result.stopped == "Ctrl-C":
        error = KeyboardInterrupt()
        error.add_note(_LAST)
        raise error
    ipu_jax.steps.FitResult.last = None
    return result


def goal_of(
    feed: "ipu_jax.Feed", made: int, epochs: float | None, updates: int | None
) -> tuple[int | None, tuple[int, int] | None]:
    """Return the updates at the end of a run that begins after `made`, and the feed's epoch and position there.

    Epochs count in the data: a resumed run ends at the same example, however many examples an update then has.
    """
    if updates is not None:
        return made + updates, None
    epochs = 1 if epochs is None else epochs
    if feed.updates_per_epoch is None:
        return None, (feed.position.epoch + int(epochs), 0)
    updates = max(1, round(epochs * feed.updates_per_epoch))
    return made + updates, feed.position_after(updates)


def begin(run: Training, resume: _Path, notes: Mapping[str, Any]) -> None:
    """Log what is trained, and continue from a checkpoint, if there is one."""
    feed, first = run.feed, run.result.updates
    if run.log is not None:
        sizes = {"samples_per_update": feed.examples_per_update, "updates_per_epoch": feed.updates_per_epoch}
        places = {"ipus": getattr(run.step.model, "ipus", 1), "replicas": run.step.model.replicas}
        run.log.start(step=repr(run.step), **places, **sizes, total_updates=run.goal, **notes)
    if run.checkpoints is not None:
        restore(run, run.checkpoints, resume)
    run.begun = run.reported = read = run.result.updates
    following = feed.position.epoch + 1
    if feed.updates_per_epoch is not None and (left := feed.updates_to(following, 0)) is not None:
        read = following * feed.updates_per_epoch - left
    run.lines.begin(read, None if run.goal is None else run.goal - first)
    run.seen, run.clock = (feed.position, run.begun), time.perf_counter()


def restore(run: Training, checkpoints: "ipu_jax.Checkpoints", resume: _Path) -> None:
    """Continue from a checkpoint, if there is one."""
    checkpoints.lock()
    try:
        found = checkpoints.restore(run.result.state, resume=resume)
    except ValueError as error:  # the checkpoint is of another run
        raise ipu_jax.io.CheckpointError(str(error)) from error
    if found is None:
        return
    run.result.state, run.result.updates, run.saved = found.state, found.step, found.step
    if found.feed is not None:
        run.feed.restore(found.feed)
        if run.end is not None and (left := run.feed.updates_to(*run.end)) is not None:
            run.goal = found.step + left
    if isinstance(found.extra, dict) and (of_fit := found.extra.get("fit")):
        run.result.skipped = of_fit["skipped"]
        run.lines.restore(of_fit["lines"])
    onto = "" if found.topology == "same" else ", onto other IPUs or other places of the stages"
    run.say(f"Resumed from {found.path}, after {found.step:,} updates{onto}")
    run.event("resumed", updates=found.step, path=str(found.path), total_updates=run.goal)


def train(run: Training) -> None:
    """Make the remaining updates, until the goal is reached or the training must stop."""
    feed, result = run.feed, run.result
    if is_over(run):
        evaluate_now(run)
    else:
        heed(run)
    while not is_over(run):
        begun = time.perf_counter()
        for batch in feed.epoch():
            call(run, batch)
            run.seen = feed.position, result.updates
            if is_over(run):
                break
        report_all_but(run, 0)
        run.step.check(result.state)
        result.seconds += time.perf_counter() - begun
        if result.stopped is not None:
            break
        if not is_over(run) and feed.epochs is not None and feed.position.epoch >= feed.epochs:
            result.stopped = "the end of the feed"
        if run.saves_epochs or is_over(run):
            save(run)  # before the last line is printed: a longer run would not print it
        if is_over(run):
            run.lines.end()
        evaluate_now(run)
        if not is_over(run):
            heed(run)
    if run.recording is not None:
        finish_trace(run, run.recording)


def is_over(run: Training) -> bool:
    """Return whether the goal is reached, or the training must stop."""
    is_reached = run.goal is not None and run.result.updates >= run.goal
    is_read = run.goal is None and run.end is not None and run.feed.position.epoch >= run.end[0]
    return is_reached or is_read or run.result.stopped is not None


def call(run: Training, batch: "ipu_jax.io.FeedBatch") -> None:
    """Make the updates of a batch, at most as many as remain, and save or stop if it is time."""
    result = run.result
    left = batch.updates if run.goal is None else min(batch.updates, run.goal - result.updates)
    outputs: list[tuple[Any, int]] = []
    for made in pieces(run, left):
        begun, is_new = time.perf_counter(), result.updates == run.begun and run.step not in _compiled
        after = result.updates + len(made)
        if is_new:
            run.bar.show("Compiling")
        # the call reuses the buffers of the last state
        with contextlib.nullcontext() if run.stop is None else run.stop.uninterrupted():
            # in one statement, so that no Ctrl-C leaves the state of an update that is not counted
            (result.state, of_call), result.updates = run.step(result.state, batch, updates=made), after
        seconds = time.perf_counter() - begun
        if is_new and seconds >= 0.05:  # else it was compiled outside of `fit`
            _compiled.add(run.step)
            run.say(f"Compiled in {seconds:.1f} s")
            run.event("compiled", compile_seconds=round(seconds, 3))
        outputs.append((of_call, len(made)))
    run.pending.append(outputs)
    report_all_but(run, 1)
    if left < batch.updates:
        run.feed.put_back(batch, left)  # the next training continues there
    is_due = run.checkpoints is not None and run.checkpoints.due(result.state, left)
    heed(run)
    if is_due:
        save(run)


def break_off(run: Training, error: BaseException) -> None:
    """Say why the training ends early. Put back the updates of a batch that the state has not seen."""
    result, batch, (position, updates) = run.result, run.feed.last, run.seen
    if isinstance(error, ipu_jax.steps.NonFiniteLossError):  # the calls in flight changed nothing
        result.updates = int(result.state.step)
    made = result.updates - updates
    if batch is not None and position not in (None, run.feed.position) and 0 <= made < batch.updates:
        run.feed.put_back(batch, made)
    error.add_note(_LAST)
    if isinstance(error, KeyboardInterrupt):
        result.stopped = "Ctrl-C"
        run.say = len if run.stop and run.stop.asked else run.say  # a second one ends at once: in the log only
        say_the_end(run)
    else:
        run.event("failed", error=" ".join(str(error).split()) or type(error).__name__)


def heed(run: Training) -> None:
    """Save, and remember to stop, if a signal has come. All instances ask equally often."""
    if run.stop is not None and run.stop.due():
        run.result.stopped = run.stop.by
        save(run)


def pieces(run: Training, count: int) -> Iterator[range]:
    """Yield the updates of a call in one piece. Before a trace is recorded: one update, then the traced updates."""
    first = 0
    while first < count:
        length, made = count - first, run.result.updates - run.begun
        if run.recording is not None and not run.recording.is_recorded:
            length = min(length, max(0, run.recording.steps + 1 - made) if made else 1) or length
        yield range(first, first + length)
        first += length
        if run.recording is not None and run.recording.is_recorded:
            finish_trace(run, run.recording)


def report_all_but(run: Training, waiting: int) -> None:
    """Wait for all calls but the last `waiting`, and report their losses."""
    while len(run.pending) > waiting:
        outputs = run.pending.popleft()
        each = [losses_and_skips(run, *piece) for piece in outputs]
        losses = np.concatenate([losses for losses, _ in each], dtype=np.float32)
        count, skipped = sum(count for _, count in outputs), sum(int(skips.sum()) for _, skips in each)
        nonfinite = sum(int(np.sum(~np.isfinite(losses) & (skips == 0))) for losses, skips in each)
        run.reported += count
        if nonfinite and not run.result.nonfinite:
            mend = 'TrainOptions(on_nonfinite="stop") stops there, and names what made it so'
            run.say(f"A loss among the first {in_words(run.reported)} is not finite: {mend}")
        run.result.nonfinite += nonfinite
        run.result.losses = np.concatenate([run.result.losses, losses], dtype=np.float32)
        run.result.skipped += skipped
        run.lines.add(losses, count, skipped)
        run.bar.move(run.reported, run.lines.where() + (f", loss {losses[-1]:.4g}" if len(losses) else ""))
        now = time.perf_counter()
        speed, run.clock = count * run.feed.examples_per_update / max(now - run.clock, 1e-9), now
        speeds = {} if run.untimed else {"samples_per_second": round(speed, 1)}
        run.speeds += speeds.values()
        run.untimed = max(0, run.untimed - 1)
        run.event("losses", updates=run.reported, epoch=run.lines.epoch, losses=losses.tolist(), **speeds)
        if skipped:
            run.event("skipped", updates=run.reported, count=skipped, reason="overflows, or not finite")


def losses_and_skips(run: Training, outputs: "ipu_jax.steps.StepOutputs", count: int) -> tuple[Any, Any]:
    """Wait for updates of a call; return their losses, (losses,), and how many updates of each loss were skipped."""
    while not outputs.loss.is_ready():
        time.sleep(0.002)  # inside XLA, no signal handler would run until the call ends
    if outputs.nonfinite is not None and np.any(np.asarray(outputs.nonfinite)):
        run.step.check(run.result.state)  # raises if it stops the training, before its line is printed
    losses, options = np.atleast_1d(np.asarray(outputs.loss, np.float32)), run.step.options
    losses = losses / count if options.outputs == "sum" else losses
    return losses, np.zeros(1, int) if outputs.skipped is None else np.asarray(outputs.skipped)


def save(run: Training) -> None:
    """Save now, unless this state is already saved."""
    updates = run.result.updates
    if run.checkpoints is None or updates in (run.begun, run.saved):
        return
    report_all_but(run, 0)
    extra = {"fit": {"lines": run.lines.state(), "skipped": run.result.skipped}}
    if run.checkpoints.save(run.result.state, run.feed, extra=extra, now=True):
        run.saved = updates
        run.event("saved", updates=updates, folder=str(run.checkpoints.folder))


def evaluate_now(run: Training) -> None:
    """Evaluate the state and report the figures."""
    if run.evaluate is None:
        return
    run.bar.show("Evaluating")
    with ipu_jax.popdist.busy("evaluating", 1800):
        found = {name: float(value) for name, value in run.evaluate(run.result.state).items()}
    run.bar.show()
    run.result.evaluations.append((run.result.updates, found))
    run.lines.evaluated(found, is_last=is_over(run))
    run.event("evaluated", updates=run.result.updates, epoch=run.lines.epoch, **found)
    run.clock = time.perf_counter()


def finish_trace(run: Training, recording: "ipu_jax.observe.Recording") -> None:
    """Write the trace, and say what it shows."""
    run.recording = None
    run.untimed = len(run.pending) + 1  # to finish takes a while: calls around it have no speed of their own
    try:
        recording.finish()
    except ipu_jax.observe.TraceError as error:
        run.say(f"There is no trace: {error}")
    else:
        run.say(f"{recording.report}\nTrace: {recording.path}, for https://ui.perfetto.dev")


def say_the_end(run: Training) -> None:
    """Say how many updates were made, and how fast; if the training ended early, why, and what is saved."""
    result = run.result
    if result.stopped is not None:
        of_goal = in_words(result.updates) if run.goal is None else f"{result.updates:,} of {in_words(run.goal)}"
        saved = "nothing was saved"
        if run.checkpoints is not None and run.saved is not None:
            after = "" if run.saved == result.updates else f" after {run.saved:,}"
            saved = f"saved{after} in {run.checkpoints.folder}: the same call goes on from there"
        run.event("stopped", reason=(line := f"{result.stopped}: stopped after {of_goal}; {saved}"))
    else:
        line = f"{in_words(result.updates)} had been made"
        if made := result.updates - run.begun:
            of_which = f", {made:,} of them" * (run.begun > 0)
            line = f"{in_words(result.updates)}{of_which} in {result.seconds:.1f} s"
            line += f", {statistics.median(run.speeds):,.0f} samples/s (median)" if run.speeds else ""
        line += f"; skipped {in_words(result.skipped)}" * (result.skipped > 0)
        line += f"; losses that are not finite: {result.nonfinite:,}" * (result.nonfinite > 0)
        run.event("end", reason="all updates were made")
    run.say(line)


def in_words(updates: int) -> str:
    """Return a number of updates in words."""
    return f"{updates:,} update{'s' * (updates != 1)}"


def write_page(run: Training, path: Path, title: str, recording: "ipu_jax.observe.Recording | None") -> None:
    """Write the page about a run that has begun. If it cannot be written, there is a warning; nothing is raised."""
    feed, model, state = run.feed, run.step.model, run.result.state
    if run.log is None or not run.log.digest.events:
        return
    shown: dict[str, Any] = {"title": title, "schedules": {}}
    try:
        with contextlib.suppress(ipu_jax.observe.TraceError):  # it has recorded nothing
            shown["timeline"] = None if recording is None else recording.timeline
        if hasattr(model, "report"):  # a pipeline
            with contextlib.suppress(Exception):  # such as a state that a failed call used up
                first = int(feed.device_iterations > 1)
                like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype), feed.like)
                key = jax.random.key(0) if run.step.random else None
                needs = model.report(state.params, like, state.stages, key, compile=False)
                shown["schedules"][f"{needs.schedule}, by ticks"] = needs.timetable
                shown["memory"] = ipu_jax.observe.memory_of(needs, state)
                shown["schedules"]["Bytes of each IPU over the ticks"] = needs.to_svg()
        with ipu_jax.popdist.busy("writing a report"):
            run.result.report = ipu_jax.observe.write_report(path, run.log, **shown)
        run.say(f"Report: {path}")
    except Exception as error:  # a fault in the page must not discard the training
        reason = ipu_jax.cli.reason_of(error)
        warnings.warn(f"report {path} was not written ({reason})", ipu_jax.observe.RunLogWarning, stacklevel=2)
