"""Offer `fit`, and refuse arguments of it that cannot work, before anything is compiled.

step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(device_iterations=10, outputs="all"))
feed = Feed(data, step=step, micro_batch=16)
result = fit(step, step.init(weights), feed, epochs=2, evaluate=accuracy, checkpoints="runs/x", log="run.jsonl")

The loop itself is in `fit.py`.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ipu_jax.base.annotations import Json, Tree
from ipu_jax.base.checks import as_int, check_count, check_positive, in_line
from ipu_jax.base.cli.output_paths import check_file, writable_folder
from ipu_jax.base.decorators import public
from ipu_jax.base.showing import counted
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.distributed import popdist
from ipu_jax.run.loop import fit as loop
from ipu_jax.run.observe.profiled import asked
from ipu_jax.run.observe.runs.digest import figure_in_words
from ipu_jax.run.observe.runs.log import ADDED_TO_START, NAMES_OF_EVENTS, RunLog, check_log
from ipu_jax.run.observe.tracing.recording import Recording
from ipu_jax.training.checkpoints.checkpoints import Checkpoints
from ipu_jax.training.data.feed import Feed
from ipu_jax.training.update.evaluation import Evaluation
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

Evaluate = Callable[[TrainState], Mapping[str, float]]
Path_ = str | os.PathLike[str]
Say = Callable[[str], object]

NAMES_OF_START: Final = ("step", "ipus", "replicas", "samples_per_update", "updates_per_epoch", "total_updates")
"""What the loop itself writes into the log's first event."""
_FIGURES: Final = (*NAMES_OF_EVENTS, "updates", "epoch")
_PATHS: Final = (str, os.PathLike)
_TYPES: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "checkpoints": ((*_PATHS, Checkpoints), "a folder or Checkpoints"),
    "resume": (_PATHS, "'auto', 'must', 'never' or the path of a checkpoint"),
    "log": ((*_PATHS, RunLog), "a file or a RunLog"),
    "notes": ((Mapping,), "plain data by name, such as {'seed': 3}"),
    "tensorboard": (_PATHS, "a folder"),
    "trace": ((*_PATHS, Recording), "a folder or a Recording"),
    "report": (_PATHS, "a file such as run.html"),
    "title": ((str,), "a text"),
}


@dataclasses.dataclass
class FitResult:
    """Hold the results of a training run.

    Attributes:
        state: the state after the last update.
        updates: the number of updates that it has made, including updates before a resume.
        losses: float32, the losses that the calls of this run returned: of each update under
            `TrainOptions(outputs="all")`, of every call's last update under "final", the mean of a call under "sum".
        evaluations: for each call of `evaluate`, the number of updates and the returned figures.
        skipped: the number of updates that were not made, because they overflowed or were not finite. They count in
            `updates`.
        nonfinite: how many of `losses` are not finite although their updates were made: above 0, the training failed.
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
    nonfinite: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    report: Path | None = None

    def __repr__(self) -> str:
        last = f", last loss {self.losses[-1]:.4g}" if len(self.losses) else ""
        figures = self.evaluations[-1][1] if self.evaluations else {}
        found = "".join(f", test {name} {figure_in_words(name, value)}" for name, value in figures.items())
        stopped = f", stopped by {self.stopped}" if self.stopped else ""
        nonfinite = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return f"FitResult({counted(self.updates, 'update')}{last}{nonfinite}{found}{stopped})"


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
    notes: Mapping[str, Json] | None = None,
    tensorboard: Path_ | None = None,
    trace: Recording | Path_ | None = None,
    report: Path_ | None = None,
    print_every: int | None = None,
    progress: bool | None = None,
    say: Say = print,
    title: str = "Training",
) -> FitResult:
    """Train with the batches of a feed until all updates are made, SIGTERM or Ctrl-C comes, or an update is not finite.

    While it runs, it prints the mean loss about 20 times, in a long run 20 times per hour, and draws a bar on a
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
            from the feed's current position: a training run that is resumed with another number of examples per update
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
    arguments = {**locals()}  # a copy, which a debugger does not change
    arguments["trace"], arguments["report"] = asked(trace, report)
    _check(**arguments)
    if evaluate is not None:
        arguments["evaluate"] = lambda state: _figures_of(evaluate(state))
    return loop.fit(**arguments)


def _check(step: Any, state: Tree, feed: Any, epochs: Any, updates: Any, **others: Any) -> None:
    """Check that state and feed belong to the step and are enough for the training; and all other arguments.

    Raises:
        ValueError: one of them does not.
    """
    _check_step_and_feed(step, state, feed)
    _check_types(others)
    if isinstance(others["evaluate"], Evaluation):
        others["evaluate"].check(state)
        _check_names("evaluate's figures", others["evaluate"].names, _FIGURES)
    log, report, resume, tensorboard = (others[name] for name in ("log", "report", "resume", "tensorboard"))
    if others["checkpoints"] is None and resume not in ("auto", "never"):
        raise ValueError(f"resume={resume!r} needs checkpoints: give checkpoints=, or leave resume out")
    every = others["print_every"]
    if every is not None and (as_int(every) is None or every < 0):
        raise ValueError(f"print_every={every!r} is not a number of updates: give an int, or 0 to print no losses")
    if tensorboard is not None and isinstance(log, RunLog):
        raise ValueError("tensorboard= is given, and a RunLog: give the folder to the RunLog")
    _check_names("notes", others["notes"] or {}, (*NAMES_OF_EVENTS, *ADDED_TO_START, *NAMES_OF_START))
    _check_end(feed, epochs, updates)
    if popdist.get_instance_index() == 0:  # last, since it may make a folder
        if report is not None:
            check_file("report", Path(report), (".html",))
        if isinstance(log, _PATHS):
            check_log(log)
        if tensorboard is not None:
            writable_folder("tensorboard", tensorboard)


def _check_step_and_feed(step: Any, state: Tree, feed: Any) -> None:
    if not isinstance(step, TrainStep):
        raise ValueError(f"step={in_line(step)} is not a training step: make it with make_train_step(...)")
    step.check_state(state)
    if not isinstance(feed, Feed):
        raise ValueError(f"feed={type(feed).__name__} is not a Feed: give Feed(data, step=step, micro_batch=...)")
    if feed.device_iterations != step.options.device_iterations:
        raise ValueError(
            f"the feed has device_iterations={feed.device_iterations}, but the step {step.options.device_iterations}: "
            "make it with Feed(data, step=step, ...)"
        )
    if set(feed.mesh.devices.flat) != set(step.mesh.devices.flat):
        sizes = [f"{mesh.devices.size} devices from {mesh.devices.flat[0]} on" for mesh in (feed.mesh, step.mesh)]
        raise ValueError(
            f"the feed's mesh has {sizes[0]}, but the step's {sizes[1]}: make the feed with Feed(data, step=step, ...)"
        )


def _check_types(others: Mapping[str, Any]) -> None:
    for name, (types, rule) in _TYPES.items():
        value, is_needed = others[name], name in ("resume", "title")
        if not isinstance(value, types) and (is_needed or value is not None):
            raise ValueError(f"{name}={value!r} is of the wrong type: give {rule}")
        if value == "" and name != "title":
            raise ValueError(f"{name}='' is empty: give {rule}")
    if isinstance(others["evaluate"], Forward):
        raise ValueError(
            "evaluate= is a Forward, which takes a batch, not a state: give its mean over a data set, "
            "Evaluation(forward, data), from ipu_jax.steps"
        )
    for name, mend in {
        "evaluate": "a function of a state that returns a dict",
        "say": "a function of a line, such as print, or lambda line: None to print nothing",
    }.items():
        if (others[name] is not None or name == "say") and (reason := _not_of_one_argument(others[name])):
            raise ValueError(f"{name}={others[name]!r} {reason}: give {mend}")


def _check_end(feed: Feed, epochs: Any, updates: Any) -> None:
    """Raise `ValueError` if `epochs` or `updates` is invalid, or the feed ends before the training."""
    argument = f"epochs={1 if epochs is None else epochs}" if updates is None else f"updates={updates}"
    if updates is not None:
        check_count("updates", updates)
        if epochs is not None:
            raise ValueError(f"epochs={epochs!r} and updates={updates!r} are both given: give one of them")
    elif epochs is not None and check_positive("epochs", epochs) != int(epochs) and feed.examples is None:
        raise ValueError(f"epochs={epochs!r}, but a stream does not say how long one is: give an int, or updates=")
    goal, end = loop.goal_of(feed, 0, epochs, updates)
    if end is None and goal is not None:
        end = feed.position_after(goal)
    if end is not None and feed.epochs is not None and end > (feed.epochs, 0):
        at = f"example {end[1]} of epoch {end[0]}" if end[1] else f"the start of epoch {end[0]}"
        raise ValueError(
            f"{argument} ends at {at} of the feed (from 0), but the feed was made with epochs={feed.epochs}: make it "
            "without epochs=, or train less"
        )
    if goal is None and end is not None and end[0] > feed.position.epoch + 1:
        feed.check_epoch(end[0] - 1)


def _not_of_one_argument(function: Any) -> str | None:
    """Return why something is not a function of one argument; None if it is, or does not say what it takes."""
    if not callable(function):
        return "cannot be called"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "is async or a generator: a call would do nothing"
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        return f"cannot be called with one argument ({error})"
    except ValueError:  # some functions that are not written in Python
        return None
    return None


def _figures_of(found: Json) -> dict[str, float]:
    """Return the figures that a user's `evaluate` returned, as numbers by name.

    Raises:
        ValueError: it returned something else.

    >>> _figures_of({"accuracy": np.float32(0.5)})
    {'accuracy': 0.5}
    """
    mend = "return figures by name, such as {'accuracy': 0.97}"
    if not isinstance(found, Mapping):
        raise ValueError(f"evaluate returned {found!r}: {mend}")
    _check_names("evaluate's figures", found, _FIGURES)
    for name, value in found.items():
        array = np.asarray(value)
        is_number = jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "biu"
        if array.ndim or not is_number:
            raise ValueError(f"evaluate returned {value!r} for {name!r}, which is not one number: {mend}")
    return {name: float(value) for name, value in found.items()}


def _check_names(what: str, names: Iterable[Any], taken: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(name, str) or name in taken:
            raise ValueError(
                f"{what} have the name {name!r}, which is not a string, or has another meaning in the log: "
                "choose another name"
            )
