"""Show how far a command has come: a bar below the lines that it prints, on a terminal or in a notebook.

Training ━━━━━━━━━━━━━━━ 412/1875 updates Epoch 0.22, loss 0.412 5,310 samples/s 0:00:05 left: 0:00:17

Nothing here imports jax.
"""

import importlib.util
import io
import os
import sys
import time
from typing import Any, Final

from ipu_jax.base import facts
from ipu_jax.base.status import is_notebook

_SECONDS: Final = 0.2
"""Between two drawings in a notebook."""


class Bar:
    """Shows a bar of updates, samples per second and time left below the printed lines, during a `with` block.

    The process says for `ipu-monitor` how many updates it plans, whether or not the bar is shown.

    Args:
        title: the text left of the bar.
        total: updates of the training; None if unknown.
        done: updates that were made before.
        samples: examples per update.
        shown: whether to draw a bar.
    """

    def __init__(self, title: str, total: int | None, done: int, samples: int, *, shown: bool):
        self._bar: Any = None
        self._cell: Any = None
        self._samples, self._text, self._drawn, self._is_wide = samples, "", 0.0, False
        self._planned = None if total is None else max(0, total - done)
        if shown:
            from rich import progress  # only a bar needs it

            console = _console()
            self._is_wide = console.width >= 110
            columns = (
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(max(4, min(40, console.width - (102 if self._is_wide else 75)))),
                progress.MofNCompleteColumn(),
                progress.TextColumn("updates"),
                progress.TextColumn("{task.fields[text]}", markup=False),
                *([progress.TimeElapsedColumn()] if self._is_wide else []),
                progress.TextColumn("left:"),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(title, total=total, completed=done, text="")

    def __enter__(self) -> "Bar":
        facts.say(lambda listener: listener.planned(self._planned))
        if self._bar is not None and is_notebook():
            self._cell = importlib.import_module("IPython.display").display(self._picture(), raw=True, display_id=True)
        elif self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        facts.say(lambda listener: listener.planned(None))
        if self._cell is not None:
            self._cell.update(self._picture(), raw=True)
        elif self._bar is not None:
            self._bar.stop()

    def move(self, updates: int, text: str = "") -> None:
        """Show that this many updates have been made in total, and a text, such as the epoch and the loss."""
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            rate = "" if speed is None or (text and not self._is_wide) else f"{speed * self._samples:,.0f} samples/s"
            self._text = f"{text} {rate}".strip()
            self._bar.update(self._task, completed=updates)
            self.show()

    def show(self, text: str = "") -> None:
        """Show a text, such as "Compiling"; by default again what `move` has shown."""
        if self._bar is not None:
            self._bar.update(self._task, text=text or self._text)
        if self._cell is not None and time.monotonic() - self._drawn >= _SECONDS:
            self._cell.update(self._picture(), raw=True)
            self._drawn = time.monotonic()

    def _picture(self) -> dict[str, str]:
        """Return the bar as a notebook shows it: one line of plain text, which is drawn anew in its place."""
        self._bar.console.file = file = io.StringIO()
        self._bar.console.print(self._bar.get_renderable())
        return {"text/plain": file.getvalue().strip()}


def shows_progress(wanted: bool | None) -> bool:
    """Return whether to draw a bar: by default on a terminal, also poprun's, and in a notebook, if rich is installed.

    Raises:
        ValueError: `wanted` is not a bool; or a bar is wanted, and rich is not installed.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"progress={wanted!r} is not a bool: give True or False, or leave it out")
    has_rich = importlib.util.find_spec("rich") is not None
    if wanted and not has_rich:
        raise ValueError("progress=True draws with rich, which is not installed: pip install rich, or leave it out")
    return has_rich and (sys.stdout.isatty() or _is_of_poprun() or is_notebook() if wanted is None else wanted)


def _is_of_poprun() -> bool:
    """Return whether stdout is a pipe to poprun, and poprun's own stdout a terminal. Then poprun sets its width."""
    return "POPRUN_TERMINAL_WIDTH" in os.environ


def _console() -> Any:
    from rich.console import Console  # only a bar needs it

    if is_notebook():
        return Console(width=110, force_jupyter=False, color_system=None, force_terminal=False)
    if not _is_of_poprun():
        return Console()
    return Console(force_terminal=True, width=int(os.environ["POPRUN_TERMINAL_WIDTH"]))
