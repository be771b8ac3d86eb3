"""Fill a terminal with a picture that is drawn again and again, and give the terminal back as it was.

    q, Ctrl-C, SIGTERM, SIGHUP   end it
    Ctrl-Z                       the terminal is the shell's until `fg`
    another size                 the picture is drawn anew at once

Nothing here imports jax.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_REST_OF_LINE: Final = "\x1b[K"
_REST: Final = "\x1b[J"
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUIT: Final = b"qQ"


def show(picture: Callable[[int], Sequence[str]], seconds: float) -> int:
    """Draw a picture every few seconds until the user has seen enough; return the exit status.

    Args:
        picture: returns the lines for a width. They may have colours, and are not wider.
        seconds: between two pictures.

    Returns:
        0 after q, or 128 + the number of the signal that ended it.
    """
    with _signals() as heard, _terminal() as terminal:
        while True:
            size = shutil.get_terminal_size()
            lines = picture(size.columns)[: size.lines]
            terminal.write(_HOME + "\n".join(f"{line}{_REST_OF_LINE}" for line in lines) + _REST)
            for event in _events(heard, terminal.keys, seconds):
                if isinstance(event, bytes):
                    if any(key in _QUIT for key in event):
                        return 0
                elif event in _ENDING:
                    return 128 + event
                elif event == signal.SIGTSTP:
                    terminal.leave()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    terminal.enter()


class _Terminal:
    """The terminal on stdout, and the keys of stdin if that is a terminal, too."""

    def __init__(self):
        self.keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: Any = None

    def enter(self) -> None:
        if self.keys is not None:
            self._before = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys)
        self.write(_ENTER)

    def leave(self) -> None:
        if self.keys is not None and self._before is not None:
            with contextlib.suppress(termios.error):  # it has been hung up
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._before)
            self._before = None
        self.write(_LEAVE)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _terminal() -> Iterator[_Terminal]:
    terminal = _Terminal()
    terminal.enter()
    try:
        yield terminal
    finally:
        terminal.leave()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a pipe from which the numbers of signals are read, one byte each, in place of what they do otherwise.

    `ipu_jax.tools.process` ends a command at Ctrl-C within a thread, which would leave the terminal as it is now. The
    system's handler writes the numbers, since a signal that another thread receives does not end a wait of this one.
    """
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)

    def hear(number: int, frame: FrameType | None) -> None:
        """Do nothing: without a handler of Python's, nothing would be written."""

    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup, or a shell in the background, has asked for this
            signal.signal(number, hear)
    try:
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)


def _events(heard: int, keys: int | None, seconds: float) -> list[signal.Signals | bytes]:
    """Return the signals and keys that come, or nothing if none do in so many seconds."""
    ready, _, _ = select.select([heard] if keys is None else [heard, keys], [], [], seconds)
    events: list[signal.Signals | bytes] = []
    if heard in ready:
        events += [signal.Signals(number) for number in os.read(heard, 64)]
    if keys in ready and keys is not None:
        try:
            typed = os.read(keys, 64)
        except OSError:
            typed = b""
        events.append(typed or signal.SIGHUP)  # nothing: the terminal has gone
    return events
