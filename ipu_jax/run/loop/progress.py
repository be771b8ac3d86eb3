"""Show the progress of a training: a bar on a terminal, and lines that stay when the bar disappears.

Epoch 0.1, Mean loss: 2.103
Epoch 0.2, Mean loss: 1.544
━━━━━━━━━━━━━━━ 412/1875 updates 5,310 samples/s 0:00:05 left: 0:00:17
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Say = Callable[[str], object]


class Bar:
    """Shows a bar of updates, samples per second and time left below the printed lines, during a `with` block.

    Args:
        title: the text left of the bar.
        total: updates of the training; None if unknown.
        done: updates that were made before.
        samples: examples per update.
        shown: whether to draw a bar.
    """

    def __init__(self, title: str, total: int | None, done: int, samples: int, *, shown: bool):
        self._bar: Any = None
        self._samples, self._rates = samples, ""
        if shown:
            from rich import progress  # an extra

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("updates"),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("left:"),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=_console(), transient=True)
            self._task = self._bar.add_task(title, total=total, completed=done, rate="")

    def __enter__(self) -> "Bar":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def move(self, updates: int) -> None:
        """Show that this many updates have been made in total."""
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            rate = "" if speed is None else f"{speed * self._samples:,.0f} samples/s"
            self._bar.update(self._task, completed=updates, rate=rate)


@contextlib.contextmanager
def spinner(text: str, *, shown: bool) -> Iterator[None]:
    """Show a text after a rotating line. Any terminal can show it."""
    with _console().status(text, spinner="line") if shown else contextlib.nullcontext():
        yield


def shows_progress(wanted: bool | None) -> bool:
    """Return whether to draw a bar: by default on a terminal, also on poprun's, if rich is installed.

    Raises:
        ValueError: a bar is wanted, and rich is not installed.
    """
    has_rich = importlib.util.find_spec("rich") is not None
    if wanted and not has_rich:
        raise ValueError("progress=True draws with rich, which is not installed: pip install rich, or leave it out")
    return has_rich and (sys.stdout.isatty() or _is_of_poprun() if wanted is None else wanted)


def _is_of_poprun() -> bool:
    """Return whether stdout is a pipe to poprun, and poprun's own stdout a terminal. Then poprun sets its width."""
    return "POPRUN_TERMINAL_WIDTH" in os.environ


def _console() -> Any:
    from rich.console import Console  # an extra

    if not _is_of_poprun():
        return Console()
    return Console(force_terminal=True, width=int(os.environ["POPRUN_TERMINAL_WIDTH"]))


class LossLines:
    """Prints the mean loss after each tenth of an epoch, or after every 100 updates of a stream.

    Args:
        updates_per_epoch: weight updates per epoch; None if unknown.
        say: prints a line.
    """

    def __init__(self, updates_per_epoch: int | None, say: Say):
        self._per_epoch, self._say = updates_per_epoch, say
        self._printed = 0
        self._losses: list[float] = []
        self._made = self._skipped = 0

    def add(self, losses: npt.NDArray[Any], made: int, skipped: int, updates: int) -> None:
        """Add the losses of a call, and print a line if it is time.

        Args:
            losses: (n,), of some or all of the call's updates.
            made: the number of the call's updates.
            skipped: how many of them were skipped.
            updates: the number of updates of the training after the call, or for lines with epochs, of the data.
        """
        self._losses += losses.tolist()
        self._made += made
        self._skipped += skipped
        marks = updates // 100 if self._per_epoch is None else 10 * updates // self._per_epoch
        if marks > self._printed:
            self._printed = marks
            self._print(f"Update {updates:,}" if self._per_epoch is None else f"Epoch {marks / 10:.1f}")

    def end(self, updates: int) -> None:
        """Print a line for the losses since the last line, if there are any; the training ends here."""
        if not self._losses:
            return
        if self._per_epoch is None:
            self._print(f"Update {updates:,}")
            return
        epoch = updates / self._per_epoch
        has_tenths = round(10 * epoch) != self._printed or not self._printed
        self._print(f"Epoch {epoch:.1f}" if has_tenths else f"Epoch {epoch:.2f}")

    def state(self) -> dict[str, Any]:
        """Return, as plain data, everything that the next line depends on."""
        # JSON has no NaN: None is read as NaN
        losses = [loss if np.isfinite(loss) else None for loss in self._losses]
        return {"printed": self._printed, "losses": losses, "made": self._made, "skipped": self._skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned: the next line is the same as without a restart."""
        self._printed, self._made, self._skipped = state["printed"], state["made"], state["skipped"]
        self._losses = [np.nan if loss is None else loss for loss in state["losses"]]

    def _print(self, where: str) -> None:
        losses = np.array(self._losses, np.float32)
        skipped = f", {self._skipped} of {self._made} updates skipped" if self._skipped else ""
        finite = losses[np.isfinite(losses)]
        mean = f"{finite.mean():.3f}" if len(finite) else "not finite"
        self._say(f"{where}, Mean loss: {mean}{skipped}")
        self._losses, self._made, self._skipped = [], 0, 0
