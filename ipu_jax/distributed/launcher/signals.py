"""Catch the signals that a user or a scheduler sends to poprun, and wake up its loop.

A signal that was already ignored when poprun started, as under nohup, stays ignored.

Nothing here imports jax.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CAUGHT: Final = (*STOPPING, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH)


class Signals:
    """Collects signals from its creation until the process ends."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _nothing)  # without a Python handler, nothing is written to the pipe
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, files: Iterable[int], seconds: float) -> list[int]:
        """Wait until a file can be read, a signal arrives, or the time has passed. Return the signals."""
        poll = select.poll()
        for file in (self._read, *files):
            poll.register(file, select.POLLIN)
        poll.poll(seconds * 1000)
        taken: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, 512):
                taken += data
        return [number for number in taken if number != signal.SIGCHLD]


def _nothing(*_: object) -> None:
    pass
