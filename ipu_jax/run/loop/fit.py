"""Train to the end: the loop around a `TrainStep`, with losses, checkpoints, evaluation, logs and signals.

step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(device_iterations=10, outputs="all"))
feed = Feed(data, step=step, micro_batch=16)
result = fit(step, step.init(weights), feed, epochs=2, evaluate=accuracy, checkpoints="runs/x", log="run.jsonl")

feed --batch--> step, step, step ...     one call runs, the next one waits, the host reads the one before
                  |-- losses             a line per tenth of an epoch, the bar, the log
                  |-- a save is due      checkpoints
                  |-- SIGTERM, Ctrl-C    save, say so, and stop
end of an epoch   `-- evaluate           a line, the log
"""

import collections
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ipu_jax.base.cli.progress import Bar, shows_progress, spinner
from ipu_jax.base.doors import public
from ipu_jax.distributed import popdist
from ipu_jax.distributed.stopping import StopRequest
from ipu_jax.run.loop._goal import FACTS, Goal, check_arguments, figures_of, goal_of
from ipu_jax.run.loop.lines import LossLines, Say
from ipu_jax.run.observe.runs.log import RunLog
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

    def __repr__(self) -> str:
        last = f", last loss {self.losses[-1]:.4g}" if len(self.losses) else ""
        found = "".join(f", {name} {value:.4g}" for name, value in (self.evaluations or [(0, {})])[-1][1].items())
        return f"FitResult({self.updates:,} updates{last}{found}{f', stopped by {self.stopped}' * bool(self.stopped)})"


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
    progress: bool | None = None,
    say: Say = print,
    title: str = "Training",
) -> FitResult:
    """Train with the batches of a feed until all updates are made, SIGTERM or Ctrl-C comes, or an update is not finite.

    While it runs, it prints the mean loss ten times per epoch, and draws a bar on a terminal. At SIGTERM or the first
    Ctrl-C it waits for the calls in flight and saves. Then it returns after SIGTERM, and raises KeyboardInterrupt after
    Ctrl-C. This holds for signals in the last evaluation and the last save, too. After Ctrl-C, or any other error, the
    last state is in `FitResult.last`, until the next `fit`.

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
            `{"accuracy": 0.97}`.
        checkpoints: save to this folder, at the end of each epoch, every ten minutes and at the end; or your own
            `Checkpoints`, which stay open.
        resume: what to resume from, as `Checkpoints.restore` takes it: "auto" for the last checkpoint, if there is one.
        log: append to this file, one line of JSON per call; or your own `RunLog`, which stays open.
        notes: plain data for the first event of the log, such as flags.
        tensorboard: write TensorBoard's files to this folder; not with your own `RunLog`.
        trace: record three updates early in the training, as `trace` does, to this folder; or a `Recording`.
        progress: whether to draw a bar; by default on a terminal.
        say: prints a line.
        title: the title of the bar.

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
        say=say,
    )
    goal = goal_of(feed, int(state.step), epochs, updates)
    result = FitResult.last = FitResult(state, int(state.step))
    is_first = popdist.get_instance_index() == 0
    shown = shows_progress(progress) and is_first
    with contextlib.ExitStack() as context:
        # only the main thread can have signal handlers
        is_main = threading.current_thread() is threading.main_thread()
        stop = context.enter_context(StopRequest(interrupts=True)) if is_main else None
        own: Checkpoints | None = None
        if isinstance(checkpoints, str | os.PathLike):
            own = Checkpoints(checkpoints, step, minutes=_SAVE_MINUTES)
            checkpoints = context.enter_context(own)
        if (log is not None or tensorboard is not None) and not isinstance(log, RunLog):
            log = context.enter_context(RunLog(log, tensorboard=tensorboard)) if is_first else None
        recording = recorded(trace) if isinstance(trace, str | os.PathLike) else trace
        if recording is not None:
            context.enter_context(recording)
        saves_epochs = own is not None
        loop = _Loop(step, feed, result, goal, evaluate, checkpoints, saves_epochs, log, recording, stop, say, shown)
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
            error.add_note("The last state is ipu_jax.steps.FitResult.last.state")
            loop.event("failed", error=" ".join(str(error).split()) or type(error).__name__)
            raise
    if result.stopped is None and popdist.all_reduce(int(stop is not None and stop.asked), "sum"):
        result.stopped = "SIGTERM" if stop is None else stop.by
    if result.stopped == "Ctrl-C":
        raise KeyboardInterrupt
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
    print: Say
    shown: bool

    def __post_init__(self) -> None:
        self.bar = Bar("", None, 0, 0, shown=False)
        self._lines = LossLines(self.feed.updates_per_epoch, self.say)
        self._pending: collections.deque[list[tuple[StepOutputs, int]]] = collections.deque()
        self._begun = self._saved = self._reported = self.result.updates
        self._before_feed = 0  # add it to the state's updates for the feed's updates, from the start of epoch 0
        self._traced, self._is_compiled = 0, False
        self._clock = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line, on the first instance."""
        if popdist.get_instance_index() == 0:
            self.print(line)

    def event(self, name: str, /, **values: Any) -> None:
        """Write an event to the log, if there is one."""
        if self.log is not None and popdist.get_instance_index() == 0:
            self.log.event(name, **values)

    def begin(self, resume: Path_, notes: Mapping[str, Any]) -> None:
        """Log what is trained, and resume from a checkpoint if there is one."""
        feed, model = self.feed, self.step.model
        if self.log is not None:
            sizes = (feed.examples_per_update, feed.updates_per_epoch, self.goal.updates)
            facts = (repr(self.step), getattr(model, "ipus", 1), model.replicas, *sizes)
            self.log.start(**dict(zip(FACTS, facts, strict=True)), **notes)
        if self.checkpoints is not None:
            self._resume(self.checkpoints, resume)
        if feed.order is not None and feed.updates_per_epoch is not None:
            left, epochs = feed.order.updates_from(feed.position.position), feed.position.epoch + 1
            self._before_feed = epochs * feed.updates_per_epoch - left - self.result.updates

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
        if found.feed is not None:
            self.feed.restore(found.feed)
            self.goal = self.goal.resumed(self.feed, found.step)
        of_fit = found.extra.get("fit") if isinstance(found.extra, dict) else None
        if of_fit:
            self.result.skipped = of_fit["skipped"]
            self._lines.restore(of_fit["lines"])
        onto = "" if found.topology == "same" else ", onto other IPUs or other places of the stages"
        self.say(f"Resumed from {found.path}, after {found.step:,} updates{onto}")
        self.event("resumed", updates=found.step, path=str(found.path), total_updates=self.goal.updates)

    def train(self) -> None:
        """Make the remaining updates, until the goal is reached or the training must stop."""
        if self._is_over():
            self._evaluate()
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
                self._lines.end(self._before_feed + self._reported)
            self._evaluate()
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
            with spinner("Compiling", shown=self.shown and not self._is_compiled), holding:
                result.state, outputs = self.step(result.state, batch, updates=made)
                result.updates += len(made)
            if not self._is_compiled:
                self._is_compiled, seconds = True, time.perf_counter() - begun
                self.say(f"Compiled in {seconds:.1f} s")
                self.event("compiled", compile_seconds=round(seconds, 3))
                self._clock = time.perf_counter()
            pieces.append((outputs, len(made)))
        self._pending.append(pieces)
        self._report_all_but(_CALLS_AHEAD)
        if left < batch.updates:
            self.feed.put_back(batch, left)  # the next training continues there
        is_due = self.checkpoints is not None and self.checkpoints.due(result.state, left)
        if self.stop is not None and self.stop.due():
            result.stopped = self.stop.by
        if is_due or result.stopped is not None:
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
            count, skipped = sum(count for _, count in pieces), sum(_skipped(outputs) for outputs, _ in pieces)
            self._reported += count
            result.losses = np.concatenate([result.losses, losses], dtype=np.float32)
            result.skipped += skipped
            self._lines.add(losses, count, skipped, self._before_feed + self._reported)
            self.bar.move(self._reported)
            now = time.perf_counter()
            speed, self._clock = count * self.feed.examples_per_update / max(now - self._clock, 1e-9), now
            self.event(
                "losses",
                updates=self._reported,
                epoch=self._epoch(),
                losses=losses.tolist(),
                samples_per_second=round(speed, 1),
            )
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

    def _epoch(self) -> float | None:
        per_epoch = self.feed.updates_per_epoch
        return None if per_epoch is None else (self._before_feed + self._reported) / per_epoch

    def _save(self) -> None:
        """Save now, unless this state is already saved."""
        if self.checkpoints is None or self._saved == self.result.updates:
            return
        self._report_all_but(0)
        extra = {"fit": {"lines": self._lines.state(), "skipped": self.result.skipped}}
        if self.checkpoints.save(self.result.state, self.feed, extra=extra, now=True):
            self._saved = self.result.updates
            self.event("saved", updates=self._saved, folder=str(self.checkpoints.folder))

    def _evaluate(self) -> None:
        """Evaluate the state and report the figures."""
        if self.evaluate is None:
            return
        with popdist.busy("evaluating", _EVALUATION_SECONDS):
            found = figures_of(self.evaluate(self.result.state))
        updates, epoch = self.result.updates, self._epoch()
        self.result.evaluations.append((updates, found))
        figures = [f"Test {name}: {_figure(name, value)}" for name, value in found.items()]
        self.say(", ".join([f"Update {updates:,}" if epoch is None else f"Epoch {epoch:.1f}", *figures]))
        self.event("evaluated", updates=updates, epoch=epoch, **found)
        self._clock = time.perf_counter()

    def _finish_trace(self) -> None:
        recording, self.recording = self.recording, None
        if recording is None:
            return
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
            where = ""
            if self.checkpoints is not None and self._saved == result.updates:
                where = f", which are saved in {self.checkpoints.folder}: the same call goes on from there"
            held = "; the state is ipu_jax.steps.FitResult.last.state" if result.stopped == "Ctrl-C" else ""
            total = f" of {self.goal.updates:,}" if result.stopped == _END_OF_FEED and self.goal.updates else ""
            line = f"{result.stopped}: stopped after {result.updates:,}{total} updates{where}{held}"
            self.event("stopped", reason=line)
        else:
            self.event("end", reason="all updates were made")
            line = f"{result.updates:,} updates were made before"
            if made:
                speed = made * self.feed.examples_per_update / max(result.seconds, 1e-9)
                of_which = f", {made:,} of them" if self._begun else ""
                line = f"{result.updates:,} updates{of_which} in {result.seconds:.1f} s, {speed:,.0f} samples/s"
            line += f"; {result.skipped} updates were skipped" if result.skipped else ""
        self.say(line)


def _skipped(outputs: StepOutputs) -> int:
    """Return the number of updates of a call that were not made."""
    return 0 if outputs.skipped is None else int(np.sum(np.asarray(outputs.skipped)))


def _figure(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"
