"""Train to the end: the loop around a `TrainStep`, with losses, checkpoints, evaluation, logs and signals.

step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(device_iterations=10, outputs="all"))
feed = Feed(data, step=step, micro_batch=16)
result = fit(step, step.init(weights), feed, epochs=2, evaluate=accuracy, checkpoints="runs/x", log="run.jsonl")

feed --batch--> step, step, step ...     one call runs, the next one waits, the host reads the one before
                  |-- losses             about 20 lines, the bar, the log
                  |-- a save is due      checkpoints
                  |-- SIGTERM, Ctrl-C    save, say so, and stop
end of an epoch   |-- evaluate           a line, the log
end, or failure   `-- report             a page
"""

import collections
import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ipu_jax.base.cli.progress import Bar, shows_progress
from ipu_jax.base.doors import public
from ipu_jax.base.showing import counted
from ipu_jax.distributed import popdist
from ipu_jax.distributed.stopping import StopRequest
from ipu_jax.run.loop._goal import FACTS, Goal, check_arguments, figures_of, goal_of
from ipu_jax.run.loop.lines import LossLines, Say
from ipu_jax.run.observe.profiled import asked, write_page
from ipu_jax.run.observe.runs.log import RunLog, figure_in_words
from ipu_jax.run.observe.tracing.recording import Recording
from ipu_jax.run.observe.tracing.recording import trace as recorded
from ipu_jax.run.observe.tracing.timeline import TraceError
from ipu_jax.training.checkpoints.checkpoints import CheckpointError, Checkpoints
from ipu_jax.training.data.batch import FeedBatch
from ipu_jax.training.data.feed import Feed
from ipu_jax.training.update.nonfinite import NonFiniteLossError
from ipu_jax.training.update.state import StepOutputs, TrainState
from ipu_jax.training.update.step import TrainStep

Evaluate = Callable[[TrainState], Mapping[str, float]]
Path_ = str | os.PathLike[str]

_SAVE_MINUTES: Final = 10.0
_CALLS_AHEAD: Final = 1
_POLL_SECONDS: Final = 0.002
_EVALUATION_SECONDS: Final = 1800.0
_END_OF_FEED: Final = "the end of the feed"
_LAST: Final = "The last state is ipu_jax.steps.FitResult.last.state"

_compiled: "weakref.WeakSet[TrainStep]" = weakref.WeakSet()


@dataclasses.dataclass
class FitResult:
    """Hold the results of a training.

    Attributes:
        state: the state after the last update.
        updates: the number of updates that it has made, including updates before a resume.
        losses: float32, the losses that the calls of this run returned: of each update under
            `TrainOptions(outputs="all")`, of every call's last update under "final", the mean of a call under "sum".
        evaluations: for each call of `evaluate`, the number of updates and the returned figures.
        skipped: the number of updates that were not made, because they overflowed or were not finite. They count in
            `updates`.
        seconds: the time that the updates took, with the compilation, without evaluations.
        stopped: "SIGTERM" or "Ctrl-C" if one of them came before `fit` returned; "the end of the feed" if the feed
            ended before the training; else None.
        report: the page about the run, if one was asked for and could be written.
        last: on the class: the result so far of a `fit` that did not return, such as after Ctrl-C; else None.
    """

    last: ClassVar["FitResult | None"] = None

    state: TrainState
    updates: int
    losses: npt.NDArray[np.float32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    evaluations: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    report: Path | None = None

    def __repr__(self) -> str:
        last = f", last loss {self.losses[-1]:.4g}" if len(self.losses) else ""
        figures = self.evaluations[-1][1] if self.evaluations else {}
        found = "".join(f", test {name} {figure_in_words(name, value)}" for name, value in figures.items())
        stopped = f", stopped by {self.stopped}" if self.stopped else ""
        return f"FitResult({counted(self.updates, 'update')}{last}{found}{stopped})"


@public
def fit(
    step: TrainStep,
    state: TrainState,
    feed: Feed,
    *,
    epochs: float | None = None,
    updates: int | None = None,
    evaluate: Evaluate | None = None,
    checkpoints: Checkpoints | Path_ | None = None,
    resume: Path_ = "auto",
    log: RunLog | Path_ | None = None,
    notes: Mapping[str, Any] | None = None,
    tensorboard: Path_ | None = None,
    trace: Recording | Path_ | None = None,
    report: Path_ | None = None,
    print_every: int | None = None,
    progress: bool | None = None,
    say: Say = print,
    title: str = "Training",
) -> FitResult:
    """Train with the batches of a feed until all updates are made, SIGTERM or Ctrl-C comes, or an update is not finite.

    While it runs, it prints the mean loss about 20 times, in a long training 20 times per hour, and draws a bar on a
    terminal and in a notebook. At SIGTERM or the first Ctrl-C it waits for the calls in flight, saves, and says how far
    it came and what is saved. Then it returns after SIGTERM, and raises KeyboardInterrupt after Ctrl-C. This holds for
    signals in the last evaluation and the last save, too. After Ctrl-C, or any other error, the last state is in
    `FitResult.last`, until the next `fit`.

    Across several instances, all of them make the same call; the first one prints and writes the log.

    Communicates what the step communicates, with checkpoints what `Checkpoints` communicates, and at the end a number
    per instance.

    Args:
        step: from `make_train_step`. Give it `TrainOptions(outputs="all")` to see the loss of each update of a call.
        state: from `step.init`, or from a result. Its buffers are reused.
        feed: from `Feed(..., step=step)`. It is read from its current position.
        epochs: train this many epochs, or a fraction; 1 by default. An integer for a stream. They count in the data,
            from the feed's current position: a training that is resumed with another number of examples per update
            ends at the same example.
        updates: train this many updates, instead of epochs.
        evaluate: called with the state at the end of each epoch and of the training; returns figures by name, such as
            `{"accuracy": 0.97}`. A figure that is NaN is reported and ends nothing.
        checkpoints: save to this folder, at the end of each epoch, every ten minutes and at the end; or your own
            `Checkpoints`, which stay open.
        resume: what to resume from, as `Checkpoints.restore` takes it: "auto" for the last checkpoint, if there is one.
        log: append to this file, one line of JSON per call; or your own `RunLog`, which stays open.
        notes: plain data for the first event of the log, such as flags.
        tensorboard: write TensorBoard's files to this folder; not with your own `RunLog`.
        trace: record three updates early in the training, as `trace` does, to this folder; or a `Recording`. By
            default the folder `IPU_JAX_TRACE` of the environment, if there is one.
        report: write a page about the run to this .html file at the end, also after an error or a signal, as
            `write_report` does. By default the file `IPU_JAX_REPORT` of the environment, if there is one.
        print_every: print the mean loss after this many updates; 0 to print no losses.
        progress: whether to draw a bar; by default on a terminal and in a notebook.
        say: prints a line.
        title: the title of the bar and of the page.

    Returns:
        The last state, losses, evaluations and times.

    Raises:
        ValueError: an argument is invalid, or contradicts another. Nothing is compiled by then.
        NonFiniteLossError: under `TrainOptions(on_nonfinite=)`.
        CheckpointError: a checkpoint cannot be restored or saved.
        KeyboardInterrupt: after Ctrl-C.

    >>> import jax.numpy as jnp, optax
    >>> from ipu_jax import TrainOptions, make_train_step
    >>> step = make_train_step(lambda w, rows: jnp.mean((rows - w) ** 2), optax.sgd(0.25))
    >>> feed = Feed(np.ones((8, 3), np.float32), step=step, micro_batch=4)
    >>> fit(step, step.init(jnp.zeros(3)), feed, epochs=2, progress=False, say=lambda line: None)
    FitResult(4 updates, last loss 0.3349)
    """
    trace, report = asked(trace, report)
    check_arguments(
        step,
        state,
        feed,
        evaluate=evaluate,
        checkpoints=checkpoints,
        resume=resume,
        log=log,
        notes=notes,
        tensorboard=tensorboard,
        trace=trace,
        report=report,
        print_every=print_every,
        say=say,
        title=title,
    )
    goal = goal_of(feed, int(state.step), epochs, updates)
    is_first = popdist.get_instance_index() == 0
    shown = shows_progress(progress) and is_first
    recording = recorded(trace) if isinstance(trace, str | os.PathLike) else trace
    result = FitResult.last = FitResult(state, int(state.step))
    with contextlib.ExitStack() as context:
        events: RunLog | None = None
        if not is_first:
            say = len
        elif isinstance(log, RunLog):
            events = log
        elif log is not None or tensorboard is not None or report is not None:
            events = context.enter_context(RunLog(log, tensorboard=tensorboard))
        if report is not None and events is not None:
            # the last to be done: the events are complete, and a signal ends the process as usual
            context.callback(write_page, report, events.events, step, feed, result, title, recording, say)
        # only the main thread can have signal handlers
        is_main = threading.current_thread() is threading.main_thread()
        stop = context.enter_context(StopRequest(interrupts=True)) if is_main else None
        own: Checkpoints | None = None
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = own = context.enter_context(Checkpoints(checkpoints, step, minutes=_SAVE_MINUTES))
        if recording is not None:
            context.enter_context(recording)
        lines = LossLines(feed.updates_per_epoch, say, call=feed.device_iterations, every=print_every)
        loop = _Loop(
            step, feed, result, goal, evaluate, checkpoints, own is not None, events, recording, stop, say, lines
        )
        try:
            loop.begin(resume, notes or {})
            with Bar(title, loop.goal.updates, result.updates, feed.examples_per_update, shown=shown) as loop.bar:
                loop.train()
            if own is not None:
                own.close()  # seal the checkpoint before the last line says that it is saved
            loop.end()
        except BaseException as error:
            if isinstance(error, NonFiniteLossError):  # the calls in flight changed nothing
                result.updates = int(result.state.step)
            error.add_note(_LAST)
            if isinstance(error, KeyboardInterrupt):
                result.stopped = "Ctrl-C"
                loop.say = len if stop is not None and stop.asked else say  # a second one ends at once: in the log only
                loop.stop_early()
            else:
                loop.event("failed", error=" ".join(str(error).split()) or type(error).__name__)
            raise
    if result.stopped is None and popdist.all_reduce(int(stop is not None and stop.asked), "sum"):
        result.stopped = "SIGTERM" if stop is None else stop.by
    if result.stopped == "Ctrl-C":
        error = KeyboardInterrupt()
        error.add_note(_LAST)
        raise error
    FitResult.last = None
    return result


@dataclasses.dataclass
class _Loop:
    """Hold the state of a training while it runs; `fit` documents its arguments."""

    step: TrainStep
    feed: Feed
    result: FitResult
    goal: Goal
    evaluate: Evaluate | None
    checkpoints: Checkpoints | None
    saves_epochs: bool
    log: RunLog | None
    recording: Recording | None
    stop: StopRequest | None
    say: Say
    lines: LossLines

    def __post_init__(self) -> None:
        self.bar = Bar("", None, 0, 0, shown=False)
        self._pending: collections.deque[list[tuple[StepOutputs, int]]] = collections.deque()
        self._begun = self._saved = self._reported = self.result.updates
        self._before_feed = 0  # add it to the state's updates for the feed's updates, from the start of epoch 0
        self._traced, self._untimed, self._is_compiled, self._is_on_disk = 0, 0, False, False
        self._clock, self._first = time.perf_counter(), (0, 0.0)  # updates and seconds of the call that compiled

    def event(self, name: str, /, **values: Any) -> None:
        """Write an event to the log, if there is one."""
        if self.log is not None:
            self.log.event(name, **values)

    def begin(self, resume: Path_, notes: Mapping[str, Any]) -> None:
        """Log what is trained, and resume from a checkpoint if there is one."""
        feed, model, first = self.feed, self.step.model, self.result.updates
        if self.log is not None:
            sizes = (feed.examples_per_update, feed.updates_per_epoch, self.goal.updates)
            facts = (repr(self.step), getattr(model, "ipus", 1), model.replicas, *sizes)
            self.log.start(**dict(zip(FACTS, facts, strict=True)), **notes)
        if self.checkpoints is not None:
            self._resume(self.checkpoints, resume)
        if feed.order is not None and feed.updates_per_epoch is not None:
            left, epochs = feed.order.updates_from(feed.position.position), feed.position.epoch + 1
            self._before_feed = epochs * feed.updates_per_epoch - left - self.result.updates
        length = None if self.goal.updates is None else self.goal.updates - first
        self.lines.begin(self._of_data(), length)

    def _resume(self, checkpoints: Checkpoints, resume: Path_) -> None:
        checkpoints.lock()
        try:
            found = checkpoints.restore(self.result.state, resume=resume)
        except ValueError as error:  # the checkpoint is of another training
            raise CheckpointError(str(error)) from error
        if found is None:
            return
        self.result.state, self.result.updates = found.state, found.step
        self._begun = self._saved = self._reported = found.step
        self._is_on_disk = True
        if found.feed is not None:
            self.feed.restore(found.feed)
            self.goal = self.goal.resumed(self.feed, found.step)
        of_fit = found.extra.get("fit") if isinstance(found.extra, dict) else None
        if of_fit:
            self.result.skipped = of_fit["skipped"]
            self.lines.restore(of_fit["lines"])
        onto = "" if found.topology == "same" else ", onto other IPUs or other places of the stages"
        self.say(f"Resumed from {found.path}, after {found.step:,} updates{onto}")
        self.event("resumed", updates=found.step, path=str(found.path), total_updates=self.goal.updates)

    def train(self) -> None:
        """Make the remaining updates, until the goal is reached or the training must stop."""
        if self._is_over():
            self._evaluate()
        else:
            self._heed()
        while not self._is_over():
            begun = time.perf_counter()
            for batch in self.feed.epoch():
                self._call(batch)
                if self._is_over():
                    break
            self._report_all_but(0)
            self.step.check(self.result.state)
            self.result.seconds += time.perf_counter() - begun
            if self.result.stopped is not None:
                break
            if not self._is_over() and self.feed.epochs is not None and self.feed.position.epoch >= self.feed.epochs:
                self.result.stopped = _END_OF_FEED
            if self.saves_epochs or self._is_over():
                self._save()  # before the last line is printed: a longer training would not print it
            if self._is_over():
                self.lines.end(self._of_data())
            self._evaluate()
            if not self._is_over():
                self._heed()
        self._finish_trace()

    def _is_over(self) -> bool:
        if self.result.stopped is not None:
            return True
        if self.goal.updates is not None:
            return self.result.updates >= self.goal.updates
        assert self.goal.epoch is not None
        return self.feed.position.epoch >= self.goal.epoch

    def _call(self, batch: FeedBatch) -> None:
        """Make the updates of a batch, at most as many as remain, and save or stop if it is time."""
        result, left = self.result, batch.updates
        if self.goal.updates is not None:
            left = min(left, self.goal.updates - result.updates)
        pieces: list[tuple[StepOutputs, int]] = []
        for made in self._pieces(left):
            begun = time.perf_counter()
            # the call reuses the buffers of the last state
            holding = contextlib.nullcontext() if self.stop is None else self.stop.uninterrupted()
            if is_new := not self._is_compiled and self.step not in _compiled:
                self.bar.show("Compiling")
            with holding:
                result.state, outputs = self.step(result.state, batch, updates=made)
                result.updates += len(made)
            seconds = time.perf_counter() - begun
            if is_new and seconds >= 0.05:  # else it was compiled outside of `fit`
                _compiled.add(self.step)
                self.say(f"Compiled in {seconds:.1f} s")
                self.event("compiled", compile_seconds=round(seconds, 3))
                self._first = len(made), seconds
            if not self._is_compiled:
                self._is_compiled, self._untimed = True, 1
            pieces.append((outputs, len(made)))
        self._pending.append(pieces)
        self._report_all_but(_CALLS_AHEAD)
        if left < batch.updates:
            self.feed.put_back(batch, left)  # the next training continues there
        is_due = self.checkpoints is not None and self.checkpoints.due(result.state, left)
        self._heed()
        if is_due:
            self._save()

    def _heed(self) -> None:
        """Save, and remember to stop, if a signal has come. All instances ask equally often."""
        if self.stop is not None and self.stop.due():
            self.result.stopped = self.stop.by
            self._save()

    def _pieces(self, count: int) -> Iterator[range]:
        """Yield the updates of a call in one piece. Before a trace is recorded: one update, then the traced updates."""
        first = 0
        while first < count:
            length = count - first
            if self.recording is not None and not self.recording.is_recorded:
                length = min(length, self.recording.steps - self._traced if self._is_compiled else 1) or length
                self._traced += length if self._is_compiled else 0
            yield range(first, first + length)
            first += length
            if self.recording is not None and self.recording.is_recorded:
                self._finish_trace()

    def _report_all_but(self, waiting: int) -> None:
        """Wait for all calls but the last `waiting`, and report their losses."""
        result = self.result
        while len(self._pending) > waiting:
            pieces = self._pending.popleft()
            losses = np.concatenate([self._losses_of(*piece) for piece in pieces], dtype=np.float32)
            count = sum(count for _, count in pieces)
            skipped = sum(int(np.sum(np.asarray(made.skipped))) for made, _ in pieces if made.skipped is not None)
            self._reported += count
            result.losses = np.concatenate([result.losses, losses], dtype=np.float32)
            result.skipped += skipped
            self.lines.add(losses, count, skipped, self._of_data())
            of_loss = f", loss {losses[-1]:.4g}" if len(losses) else ""
            self.bar.move(self._reported, self.lines.where(self._of_data()) + of_loss)
            now = time.perf_counter()
            speed, self._clock = count * self.feed.examples_per_update / max(now - self._clock, 1e-9), now
            speeds = {} if self._untimed else {"samples_per_second": round(speed, 1)}
            self._untimed = max(0, self._untimed - 1)
            self.event("losses", updates=self._reported, epoch=self._epoch(), losses=losses.tolist(), **speeds)
            if skipped:
                self.event("skipped", updates=self._reported, count=skipped, reason="overflows, or not finite")

    def _losses_of(self, outputs: StepOutputs, count: int) -> npt.NDArray[Any]:
        """Wait for updates of a call, and return their losses, (losses,)."""
        while not outputs.loss.is_ready():
            time.sleep(_POLL_SECONDS)  # inside XLA, no signal handler would run until the call ends
        if outputs.nonfinite is not None and np.any(np.asarray(outputs.nonfinite)):
            self.step.check(self.result.state)  # raises if it stops the training, before its line is printed
        losses, options = np.atleast_1d(np.asarray(outputs.loss, np.float32)), self.step.options
        return losses / count if options.outputs == "sum" and options.device_iterations > 1 else losses

    def _of_data(self) -> int:
        """Return the number of updates that all losses so far are of, for a feed with epochs from its epoch 0 on."""
        return self._before_feed + self._reported

    def _epoch(self) -> float | None:
        per_epoch = self.feed.updates_per_epoch
        return None if per_epoch is None else self._of_data() / per_epoch

    def _save(self) -> None:
        """Save now, unless this state is already saved."""
        if self.checkpoints is None or self._saved == self.result.updates:
            return
        self._report_all_but(0)
        extra = {"fit": {"lines": self.lines.state(), "skipped": self.result.skipped}}
        if self.checkpoints.save(self.result.state, self.feed, extra=extra, now=True):
            self._saved, self._is_on_disk = self.result.updates, True
            self.event("saved", updates=self._saved, folder=str(self.checkpoints.folder))

    def _evaluate(self) -> None:
        """Evaluate the state and report the figures."""
        if self.evaluate is None:
            return
        self.bar.show("Evaluating")
        with popdist.busy("evaluating", _EVALUATION_SECONDS):
            found = figures_of(self.evaluate(self.result.state))
        self.bar.show()
        updates = self.result.updates
        self.result.evaluations.append((updates, found))
        if found and self.lines.shows_figures(self._of_data(), is_last=self._is_over()):
            figures = [f"Test {name}: {figure_in_words(name, value)}" for name, value in found.items()]
            self.say(", ".join([self.lines.where(self._of_data()), *figures]))
        self.event("evaluated", updates=updates, epoch=self._epoch(), **found)
        self._clock = time.perf_counter()

    def _finish_trace(self) -> None:
        recording, self.recording = self.recording, None
        if recording is None:
            return
        self._untimed = len(self._pending) + 1  # to finish takes a while: calls around it have no speed of their own
        try:
            recording.finish()
        except TraceError as error:
            self.say(f"There is no trace: {error}")
        else:
            self.say(f"{recording.report}\nTrace: {recording.path}, for https://ui.perfetto.dev")

    def end(self) -> None:
        """Print a summary of the training, and write it to the log."""
        result, made = self.result, self.result.updates - self._begun
        if result.stopped is not None:
            return self.stop_early()
        self.event("end", reason="all updates were made")
        line, (updates, seconds) = f"{counted(result.updates, 'update')} had been made", self._first
        if made:
            speed = (made - updates) * self.feed.examples_per_update / max(result.seconds - seconds, 1e-9)
            of_which = f", {made:,} of them" * (self._begun > 0)
            line = f"{counted(result.updates, 'update')}{of_which} in {result.seconds:.1f} s"
            line += f", {speed:,.0f} samples/s{' once compiled' * (updates > 0)}" * (made > updates)
        self.say(line + (f"; skipped {counted(result.skipped, 'update')}" if result.skipped else ""))

    def stop_early(self) -> None:
        """Say what ended the training early, after how many updates, and what is saved."""
        updates, goal, saved = self.result.updates, self.goal.updates, "nothing was saved"
        if self.checkpoints is not None and self._is_on_disk:
            after = "" if self._saved == updates else f" after {self._saved:,}"
            saved = f"saved{after} in {self.checkpoints.folder}: the same call goes on from there"
        made = counted(updates, "update") if goal is None else f"{updates:,} of {counted(goal, 'update')}"
        self.event("stopped", reason=(line := f"{self.result.stopped}: stopped after {made}; {saved}"))
        self.say(line)
