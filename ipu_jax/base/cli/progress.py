"""Show how far a command has come: a bar on a terminal, below the lines that it prints.

━━━━━━━━━━━━━━━ 412/1875 updates 5,310 samples/s 0:00:05 left: 0:00:17

Nothing here imports jax.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any


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
            from rich import progress  # only a bar needs it

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
    from rich.console import Console  # only a bar needs it

    if not _is_of_poprun():
        return Console()
    return Console(force_terminal=True, width=int(os.environ["POPRUN_TERMINAL_WIDTH"]))
