"""Show how far a training is: a bar on a terminal, and lines that stay when the bar has gone."""

import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.text import Text

from mnist_example.instances import is_first
from mnist_example.train import Call


def shows_progress(no_progress: bool) -> bool:
    """Return whether there is to be a bar: on a terminal, also poprun's, unless the flag --no-progress says no."""
    return (sys.stdout.isatty() or _of_poprun()) and is_first() and not no_progress


def _of_poprun() -> bool:
    """Return whether stdout is a pipe to poprun, and poprun's own a terminal; it says how wide."""
    return "POPRUN_TERMINAL_WIDTH" in os.environ


def _console() -> Console:
    if not _of_poprun():
        return Console()
    return Console(force_terminal=True, width=int(os.environ["POPRUN_TERMINAL_WIDTH"]))


class _Speed(ProgressColumn):
    """Images per second over the last half minute."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed * task.fields['images']:,.0f} images/s")


def progress_bar(*, shown: bool) -> Progress:
    """Return a bar of updates, images per second and time left below the printed lines, or none without `shown`.

    Its tasks need a field `images`, the images of an update.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates"),
        _Speed(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=_console(), disable=not shown, transient=True)


def spinner(text: str) -> Status:
    """Return a text with a turning line before it, which any terminal can show, as a context."""
    return _console().status(text, spinner="line")


class LossLines:
    """Prints the mean loss of a training whenever another tenth of an epoch is done, or less often if calls are longer.

    Args:
        updates_per_epoch: weight updates of an epoch.
    """

    def __init__(self, updates_per_epoch: int):
        self._updates_per_epoch, self._tenths = updates_per_epoch, 0
        self._losses: list[npt.NDArray[np.float32]] = []
        self._skipped = 0

    def add(self, call: Call) -> None:
        """Take in the next device call, and print a line if it ends in another tenth of an epoch."""
        self._losses.append(call.losses)
        self._skipped += call.skipped + len(call.nonfinite)
        tenths = 10 * call.updates // self._updates_per_epoch
        if tenths > self._tenths:
            self._tenths = tenths
            self._print(f"{tenths / 10:.1f}")

    def end(self, epoch: float) -> None:
        """Print a line for the calls since the last one, if there are any; the training ends with this epoch."""
        if sum(map(len, self._losses)):
            self._print(f"{epoch:.1f}" if round(10 * epoch) != self._tenths or not self._tenths else f"{epoch:.2f}")

    def state(self) -> dict[str, Any]:
        """Return what the next line depends on, as plain data."""
        # JSON has no NaN: None is read as one
        losses = [float(loss) if np.isfinite(loss) else None for call in self._losses for loss in call]
        return {"tenths": self._tenths, "losses": losses, "skipped": self._skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned: the next line is the one that would have come."""
        self._tenths, self._skipped = state["tenths"], state["skipped"]
        self._losses = [np.array(state["losses"], np.float32)]

    def _print(self, epoch: str) -> None:
        losses = np.concatenate(self._losses)
        skipped = f", {self._skipped} of {len(losses)} updates skipped" if self._skipped else ""
        finite = losses[np.isfinite(losses)]
        mean = f"{finite.mean():.3f}" if len(finite) else "not finite"
        say(f"Epoch {epoch}, Mean loss: {mean}{skipped}")
        self._losses, self._skipped = [], 0


def say(line: str) -> None:
    """Print a line at once, on the first instance only."""
    if is_first():
        print(line, flush=True)
