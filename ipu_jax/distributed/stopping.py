"""Let SIGTERM, or Ctrl-C, end a training run after its current step, so that it can be saved: `StopRequest`.

with StopRequest() as stop, Checkpoints(folder, step) as checkpoints:
    for batch in feed:
        state, outputs = step(state, batch)
        if stop.due():                                  # the same on all instances
            checkpoints.save(state, feed, now=True)
            break
        checkpoints.save(state, feed)

SIGTERM   the next due() is True          within `grace` seconds the block is left, or the process ends with 143
again     the process ends at once, with 143
"""

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from ipu_jax.distributed.agreeing import AgreedStop

__all__ = ["StopRequest"]

_STATUS: Final = 128 + signal.SIGTERM
_CLOSE: Final = 0  # no signal has this number


class StopRequest:
    """Turns SIGTERM into a request to stop, within a `with` block.

    A scheduler or poprun sends SIGTERM before it kills. The signal is noticed at once, even while XLA runs or compiles.
    With several processes, jax installs a handler that only remembers the signal. `StopRequest` replaces it. After the
    block, SIGTERM ends the process as usual.

    With several instances, all of them enter the block and call `due` equally often. It is enough that one of them
    receives the signal.

    Args:
        grace: seconds from SIGTERM until the process ends with status 143, if it is still inside the block.
        interrupts: whether the first Ctrl-C also asks to stop, without a time limit. A second Ctrl-C raises
            KeyboardInterrupt, as outside the block.

    Attributes:
        asked: whether this instance or, as far as it knows, another one has received a signal.
        by: "Ctrl-C" if this was the first signal of this instance, else "SIGTERM".

    Raises:
        ValueError: `grace` is not a positive number, or this is not the main thread.

    >>> with StopRequest() as stop:
    ...     before = stop.due()
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     while not stop.due():
    ...         pass
    ...     before, stop.asked
    (False, True)
    """

    def __init__(self, grace: float = 30.0, *, interrupts: bool = False):
        if not (grace > 0 and math.isfinite(grace)):
            raise ValueError(f"grace={grace!r} is not a number of seconds: give one such as 30")
        self._grace, self._interrupts = grace, interrupts
        self._agreed: AgreedStop | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._usual_fd = -1
        self._has_come = self._was_interrupted = self._holds = self._is_held = False
        self._interruptions = 0
        self.asked, self.by = False, "SIGTERM"

    def due(self) -> bool:
        """Return whether to stop here: this instance or, in time for this call, another one has received SIGTERM.

        Communicates nothing before SIGTERM; after it, one number from each instance to all others.

        Raises:
            InstancesMissingError: another instance did not report its step in time.
            ValueError: it is called outside the `with` block.
        """
        if self._agreed is None:
            raise ValueError("due() is asked outside the block: call it inside of `with StopRequest() as stop:`")
        due = self._agreed.due()
        self.asked = self.asked or due
        return due

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let a second Ctrl-C wait for the end of a block, which keeps its result. A third one does not wait."""
        self._holds, self._is_held = True, False
        try:
            yield
        finally:
            self._holds = False
        if self._is_held:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("StopRequest belongs to the main thread, which alone can take signals: enter it there")
        self._agreed = AgreedStop(self._grace)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Python runs handlers only between two instructions, which may be minutes apart; the pipe is read at once
        self._usual_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="SIGTERM", daemon=True).start()
        self._take_over(signal.SIGTERM, lambda *_: None)
        if self._interrupts and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._take_over(signal.SIGINT, self._raise_at_the_second)
        return self

    def _take_over(self, number: int, handler: Any) -> None:
        before = signal.signal(number, handler)
        signal.siginterrupt(number, False)
        self._before[number] = signal.SIG_DFL if before is None else before  # None: not from Python, and cannot be set

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._usual_fd, warn_on_full_buffer=False)
        os.write(self._pipe[1], bytes([_CLOSE]))
        if self._timer is not None:
            self._timer.cancel()
        if self._agreed is not None:
            self._agreed.close()
            self._agreed = None

    def _watch(self) -> None:
        read, write = self._pipe
        while (number := os.read(read, 1)[0]) != _CLOSE:
            if number == signal.SIGTERM:
                self._take()
            elif number == signal.SIGINT and self._interrupts and not self._was_interrupted:
                self._was_interrupted = True
                print("Ctrl-C: stopping after this step; once more ends at once", file=sys.stderr, flush=True)
                self._ask("Ctrl-C")
            elif self._usual_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._usual_fd, bytes([number]))
        os.close(read)
        os.close(write)

    def _take(self) -> None:
        if self._has_come:
            os._exit(_STATUS)
        self._has_come = True
        self._timer = threading.Timer(self._grace, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        self._ask("SIGTERM")

    def _ask(self, by: str) -> None:
        self.by = self.by if self.asked else by
        if self._agreed is not None:
            self._agreed.ask()
        self.asked = True

    def _raise_at_the_second(self, *_: object) -> None:
        self._interruptions += 1
        if self._interruptions == 2 and self._holds:
            self._is_held = True
        elif self._interruptions > 1:
            raise KeyboardInterrupt

    def _give_up(self) -> None:
        print(f"SIGTERM: not ended within {self._grace:g} s, so the process is stopped", file=sys.stderr, flush=True)
        os._exit(_STATUS)
