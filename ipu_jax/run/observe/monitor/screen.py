"""Fill a terminal with a picture that is redrawn repeatedly, and restore the terminal afterwards.

    q, Ctrl-C, SIGTERM, SIGHUP   end it
    other keys                   the caller's
    Ctrl-Z                       the terminal is the shell's until `fg`
    another size                 the picture is redrawn at once

Nothing here imports jax.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live

_HEARD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
_QUIT: Final = b"qQ"
_LISTEN: Final = 0.1
"""Seconds between checks for signals and for a new terminal size."""


def show(
    draw: Callable[..., tuple[RenderableType, RenderableType]],
    press: Callable[[str], bool],
    console: Console,
    seconds: float,
) -> int:
    """Draw a picture every few seconds until the user ends it; return the exit status.

    Args:
        draw: returns the picture and the last line of the screen; `anew=False` asks for the last picture again.
        press: takes a key that was pressed; returns whether to draw again.
        console: where to draw.
        seconds: between two pictures.

    Returns:
        0 after q, or 128 + the number of the signal that ended the display.
    """
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def redraw(*, anew: bool) -> None:
        picture, last_line = draw(anew=anew)
        layout = Layout()
        layout.split_column(Layout(picture), Layout(last_line, size=1))
        live.update(layout, refresh=True)

    def until_a_signal(heard: list[int]) -> int:
        """Draw until a signal comes, and return its number; 0 after q."""
        with _keys() as keys, live:
            due, size = 0.0, console.size
            while not heard:
                if time.monotonic() >= due or console.size != size:
                    due, size = time.monotonic() + seconds, console.size
                    redraw(anew=True)
                if select.select(keys, [], [], _LISTEN)[0]:
                    typed = b""
                    with contextlib.suppress(OSError):
                        typed = os.read(keys[0], 64)
                    if not typed:  # the terminal has gone
                        return signal.SIGHUP
                    if any(key in _QUIT for key in typed):
                        return 0
                    if any([press(key) for key in typed.decode(errors="replace")]):
                        redraw(anew=False)
            return heard.pop(0)

    with _signals() as heard:
        while (signal_number := until_a_signal(heard)) == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
    return 128 + signal_number if signal_number else 0


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield stdin in a list, set to deliver each key as it is pressed; an empty list if it is not a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield []
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield [keys]
    finally:
        with contextlib.suppress(termios.error):  # it has been hung up
            termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that collects the signals that arrive, instead of their usual effect.

    `ipu_jax.base.cli.process` ends a command at Ctrl-C from a thread, which would not restore the terminal.
    """
    heard: list[int] = []
    wakeup = signal.set_wakeup_fd(-1)
    before = {number: signal.getsignal(number) for number in _HEARD}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup, or a shell in the background, has asked for this
            signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup)
