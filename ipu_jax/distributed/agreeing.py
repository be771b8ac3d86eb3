"""Let threads of all instances agree: on the step after which all stop, and on places where they meet.

**A stop.** The instances learn of the request at different times:

    instance 0   step 7 | step 8 | step 9 ...         SIGTERM in step 8: tells the others
    instance 1   step 7 | step 8 | step 9 ...         each writes down how many steps it has completed: 7, 8
                                                      all stop one step after the largest number: step 9

A thread of each instance writes this, so that nobody waits for an instance that is blocked in a step.

**A meeting** ends at once if an instance reports a failure:

    instance 0   writes -> meet("written", 300) ....................... raises: on instance 1: No space left on device
    instance 1   writes -> OSError -> fail(error)

jax's own barrier cannot be left before its timeout, so one failure would cost all instances minutes. Here each instance
writes down where it is, or that it has failed, and reads what the others have written.
"""

import contextlib
import json
import threading
from typing import Final

from ipu_jax.distributed.board import MARGIN, Board
from ipu_jax.distributed.processes import record
from ipu_jax.distributed.processes.beacons import Phase

_ASKED: Final = "asked"
_AT: Final = "at"
_FAILED: Final = "failed"
_LISTEN_SECONDS: Final = 0.2
_LONGEST: Final = 2000


class AgreedStop:
    """Finds the step after which all instances stop. Every instance creates one, in the same order.

    Args:
        seconds: how long to wait for another instance to report its step.
    """

    def __init__(self, seconds: float):
        self._board, self._seconds = Board("stop"), seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._calls = 0
        self._is_asked = self._must_wait = False
        self._last: int | None = None
        if self._board.count > 1:
            threading.Thread(target=self._listen, name="stop of instances", daemon=True).start()

    def ask(self) -> None:
        """Ask all instances to stop. Any thread can call this."""
        self._is_asked = True
        with contextlib.suppress(RuntimeError, TimeoutError):  # it has asked already, or instance 0 has gone
            self._board.post(_ASKED, seconds=self._seconds)

    def due(self) -> bool:
        """Return whether to stop here. All instances call it in the same places, equally often.

        Raises:
            InstancesMissingError: another instance did not report its step in time.
        """
        with self._lock:
            self._calls += 1
            is_waiting = self._must_wait and self._last is None
        if self._board.count == 1:
            return self._is_asked
        if is_waiting:
            with record.during(Phase.WAITING, "for the step after which all instances stop", self._seconds + MARGIN):
                when = f"did not say within {self._seconds:g} s after which step to stop: look at what it does"
                missing = lambda who: f"SIGTERM: {who} {when}"
                calls = self._board.look(_AT, seconds=self._seconds, missing=missing)
                self._last = 1 + max(map(int, calls))
        return self._last is not None and self._calls >= self._last

    def close(self) -> None:
        """End the thread that listens for requests."""
        self._closed.set()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):  # instance 0, which keeps the board, has gone
            while not self._board.seen(_ASKED, seconds=threading.TIMEOUT_MAX):
                if self._closed.wait(_LISTEN_SECONDS):
                    return
            with self._lock:
                self._must_wait = True  # from here on, the next step waits until all have written
                self._board.post(_AT, b"%d" % self._calls, seconds=self._seconds)


class OtherFailedError(RuntimeError):
    """Another instance has failed. The message names the instance and its error.

    Attributes:
        errno: the operating system's error number; None if there is none.
    """

    def __init__(self, message: str, errno: int | None):
        super().__init__(message)
        self.errno = errno


class Meetings:
    """The places where instances meet, in several rounds. Every instance creates this object, in the same order.

    Args:
        seconds: how long instances wait for each other to agree on when to report a failure.

    Attributes:
        is_waiting: whether a thread of this instance is waiting for the others.
    """

    def __init__(self, seconds: float) -> None:
        self._board, self._round = Board("meetings"), 0
        self._seconds, self.is_waiting = seconds, False
        self._telling = AgreedStop(seconds)

    def begin(self) -> None:
        """Begin a round. All instances have ended the previous one, and call this equally often."""
        if self._board.own == 0:
            self._board.clear(f"{self._round}", seconds=self._seconds)
        self._round += 1

    def meet(self, place: str, seconds: float) -> None:
        """Wait until all instances have arrived at a place of this round.

        Communicates a few bytes with instance 0, tens of times per second while it waits.

        Raises:
            OtherFailedError: another instance has failed in this round.
            InstancesMissingError: some instances did not arrive in time.
        """
        at, missing = f"{self._round}/{place}", lambda who: f"{place}: {who} did not join within {seconds:g} s"
        self.is_waiting = self._board.count > 1
        try:
            self._board.post(at, seconds=seconds, missing=missing)
            self._board.look(at, seconds=seconds, missing=missing, unless=self.check)
        finally:
            self.is_waiting = False

    def check(self) -> None:
        """Raise `OtherFailedError` if another instance has failed in this round."""
        for instance, told in sorted(self._board.seen(f"{self._round}/{_FAILED}", seconds=self._seconds).items()):
            if instance != self._board.own:
                text, errno = json.loads(told)
                raise OtherFailedError(f"on instance {instance}: {text}", errno)

    def fail(self, error: BaseException, errno: int | None) -> None:
        """Report a failure of this instance in this round to the others, unless one of them caused it."""
        if not isinstance(error, OtherFailedError):
            self._telling.ask()
            text = json.dumps([" ".join(str(error).split())[:_LONGEST], errno])
            with contextlib.suppress(RuntimeError, TimeoutError):  # it has said so already, or instance 0 has gone
                self._board.post(f"{self._round}/{_FAILED}", text.encode(), seconds=self._seconds)

    def is_time_to_tell(self) -> bool:
        """Return whether an instance has failed, in the same call on all instances. They call this equally often."""
        return self._board.count > 1 and self._telling.due()

    def forget(self) -> None:
        """Forget the failures so far. All instances have reported them, and call this in the same place."""
        self.close()
        self._telling = AgreedStop(self._seconds)

    def close(self) -> None:
        """End the thread that listens for failures."""
        self._telling.close()
