"""Decide when a training ends, and refuse arguments of `fit` that cannot work, before anything is compiled.

Epochs are counted in the data: a training of 3 epochs that starts at example 0 of epoch 0 ends at example 0 of epoch 3,
however many examples an update has, before a resume and after it.
"""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ipu_jax.base.checks import as_int, check_count, check_positive, in_line
from ipu_jax.base.cli.places import check_file, writable_folder
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.runs.log import FACTS_OF_START, NAMES_OF_EVENTS, RunLog, check_log
from ipu_jax.run.observe.tracing.recording import Recording
from ipu_jax.training.checkpoints.checkpoints import Checkpoints
from ipu_jax.training.data.feed import Feed
from ipu_jax.training.data.order import Position
from ipu_jax.training.update.step import TrainStep

FACTS: Final = ("step", "ipus", "replicas", "samples_per_update", "updates_per_epoch", "total_updates")
"""What `fit` itself writes into the log's first event."""

_FIGURES_OF_FIT: Final = (*NAMES_OF_EVENTS, "updates", "epoch")


@dataclasses.dataclass(frozen=True)
class Goal:
    """Hold when a training ends.

    Attributes:
        updates: the state's number of updates at the end; None for epochs of a stream.
        position: the position of the feed at the end, for epochs of any other feed.
        epoch: the epoch of a stream before which the training ends.
    """

    updates: int | None = None
    position: Position | None = None
    epoch: int | None = None

    def resumed(self, feed: Feed, updates: int) -> "Goal":
        """Return the goal for a state with this many updates, and a feed at the position that belongs to the state."""
        if self.position is None or feed.order is None:
            return self
        left = feed.order.updates_between(feed.position, self.position)
        return dataclasses.replace(self, updates=updates + left)


def goal_of(feed: Feed, made: int, epochs: float | None, updates: int | None) -> Goal:
    """Return when a training ends that begins at the feed's position, with a state after `made` updates.

    Raises:
        ValueError: `epochs` or `updates` is invalid, or the feed ends before.
    """
    order = feed.order
    if updates is not None:
        if epochs is not None:
            raise ValueError(f"epochs={epochs!r} and updates={updates!r} are both given: give one of them")
        count = check_count("updates", updates)
        _check_end(feed, f"updates={updates}", None if order is None else order.later(feed.position, count))
        return Goal(made + count)
    epochs = 1 if epochs is None else check_positive("epochs", epochs)
    if order is not None:
        count = max(1, round(epochs * order.updates_per_epoch))
        end = order.later(feed.position, count)
        _check_end(feed, f"epochs={epochs}", end)
        return Goal(made + count, end)
    if epochs != int(epochs):
        raise ValueError(f"epochs={epochs!r}, but a stream does not say how long one is: give an int, or updates=")
    end = Position(feed.position.epoch + int(epochs), 0)
    _check_end(feed, f"epochs={epochs}", end)
    if epochs > 1:
        feed.check_epoch(end.epoch - 1)
    return Goal(epoch=end.epoch)


def _check_end(feed: Feed, argument: str, end: Position | None) -> None:
    """Raise `ValueError` if the feed has fewer epochs than a training needs that ends at `end`."""
    if end is None or feed.epochs is None or (end.epoch, end.position) <= (feed.epochs, 0):
        return
    at = f"example {end.position} of epoch {end.epoch}" if end.position else f"the start of epoch {end.epoch}"
    raise ValueError(
        f"{argument} ends at {at} of the feed (from 0), but the feed was made with epochs={feed.epochs}: make it "
        "without epochs=, or train less"
    )


def check_arguments(step: Any, state: Any, feed: Any, **others: Any) -> None:
    """Check the types of `fit`'s arguments, and that state and feed belong to the step.

    Raises:
        ValueError: one of them does not.
    """
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
    paths = (str, os.PathLike)
    rules: dict[str, tuple[tuple[type, ...], str]] = {
        "checkpoints": ((*paths, Checkpoints), "a folder or Checkpoints"),
        "resume": (paths, "'auto', 'must', 'never' or the path of a checkpoint"),
        "log": ((*paths, RunLog), "a file or a RunLog"),
        "notes": ((Mapping,), "plain data by name, such as {'seed': 3}"),
        "tensorboard": (paths, "a folder"),
        "trace": ((*paths, Recording), "a folder or a Recording"),
        "report": (paths, "a file such as run.html"),
        "title": ((str,), "a text"),
    }
    for name, (types, rule) in rules.items():
        is_left_out = others[name] is None and name not in ("resume", "title")
        if not is_left_out and not isinstance(others[name], types):
            raise ValueError(f"{name}={others[name]!r} is of the wrong type: give {rule}")
        if others[name] == "" and name != "title":
            raise ValueError(f"{name}='' is empty: give {rule}")
    for name, mend in {
        "evaluate": "a function of a state that returns a dict",
        "say": "a function of a line, such as print, or lambda line: None to print nothing",
    }.items():
        if (others[name] is not None or name == "say") and (reason := _not_of_one_argument(others[name])):
            raise ValueError(f"{name}={others[name]!r} {reason}: give {mend}")
    if others["checkpoints"] is None and others["resume"] not in ("auto", "never"):
        raise ValueError(f"resume={others['resume']!r} needs checkpoints: give checkpoints=, or leave resume out")
    every = others["print_every"]
    if every is not None and (as_int(every) is None or every < 0):
        raise ValueError(f"print_every={every!r} is not a number of updates: give an int, or 0 to print no losses")
    if popdist.get_instance_index() == 0:
        if others["report"] is not None:
            check_file("report", Path(others["report"]), (".html",))
        if isinstance(others["log"], paths):
            check_log(others["log"])
        if others["tensorboard"] is not None:
            writable_folder("tensorboard", others["tensorboard"])
    if others["tensorboard"] is not None and isinstance(others["log"], RunLog):
        raise ValueError("tensorboard= is given, and a RunLog: give the folder to the RunLog")
    _check_names("notes", others["notes"] or {}, (*NAMES_OF_EVENTS, *FACTS_OF_START, *FACTS))


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


def figures_of(found: Any) -> dict[str, float]:
    """Return the figures that a user's `evaluate` returned, as numbers by name.

    Raises:
        ValueError: it returned something else.

    >>> figures_of({"accuracy": np.float32(0.5)})
    {'accuracy': 0.5}
    """
    mend = "return figures by name, such as {'accuracy': 0.97}"
    if not isinstance(found, Mapping):
        raise ValueError(f"evaluate returned {found!r}: {mend}")
    _check_names("evaluate's figures", found, _FIGURES_OF_FIT)
    for name, value in found.items():
        array = np.asarray(value)
        is_number = jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "biu"
        if array.ndim or not is_number:
            raise ValueError(f"evaluate returned {value!r} for {name!r}, which is not one number: {mend}")
    return {name: float(value) for name, value in found.items()}


def _check_names(what: str, by_name: Mapping[Any, Any], taken: tuple[str, ...]) -> None:
    for name in by_name:
        if not isinstance(name, str) or name in taken:
            raise ValueError(
                f"{what} have the name {name!r}, which is no text or has another meaning in the log: "
                "choose another name"
            )
