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
import itertools
import json
import threading
import time
from typing import Any, Final

import jax
from jax._src import distributed  # the coordination service's client, which jax does not export

from ipu_jax.distributed._exchange import collected, process
from ipu_jax.distributed.errors import InstancesMissingError, named
from ipu_jax.distributed.processes import beacons
from ipu_jax.distributed.processes.beacons import Phase

_MEETINGS: Final = "ipu_jax/meetings"
_STOP: Final = "ipu_jax/stop"
_FAILED: Final = "failed"
_POLL_SECONDS: Final = 0.2
_LOOK_EVERY: Final = 0.01
_LONGEST: Final = 2000

_numbers_of_meetings, _numbers_of_stops = itertools.count(), itertools.count()


class AgreedStop:
    """Finds the step after which all instances stop. Every instance creates one, in the same order.

    Args:
        seconds: how long to wait for another instance to report its step.
    """

    def __init__(self, seconds: float):
        self._own, self._count = process()
        self._client: Any = distributed.global_state.client if self._count > 1 else None
        self._room, self._seconds = f"{_STOP}/{next(_numbers_of_stops)}", seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._calls = 0
        self._is_asked = self._is_written = False
        self._last: int | None = None
        if self._client is not None:
            threading.Thread(target=self._listen, name="stop of instances", daemon=True).start()

    def ask(self) -> None:
        """Ask all instances to stop. Any thread can call this."""
        with self._lock:
            self._is_asked = True
        if self._client is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # instance 0 has gone: poprun ends the others
                self._client.key_value_set(f"{self._room}/asked/{self._own}", "")

    def due(self) -> bool:
        """Return whether to stop here. All instances call it in the same places, equally often.

        Raises:
            InstancesMissingError: another instance did not report its step in time.
        """
        with self._lock:
            self._calls += 1
            is_waiting = self._is_written and self._last is None
            if self._client is None:
                return self._is_asked
        if is_waiting:
            with beacons.during(Phase.WAITING, "for the step after which all instances stop", self._seconds + 10):
                self._last = 1 + max(self._written())
        return self._last is not None and self._calls >= self._last

    def close(self) -> None:
        """End the thread that listens for requests."""
        self._closed.set()

    def _listen(self) -> None:
        try:
            while not self._client.key_value_dir_get(f"{self._room}/asked/"):
                if self._closed.wait(_POLL_SECONDS):
                    return
            with self._lock:  # from here on, the next step waits until all have written
                self._client.key_value_set(f"{self._room}/at/{self._own}", str(self._calls))
                self._is_written = True
        except jax.errors.JaxRuntimeError:
            return  # instance 0, which keeps the values, has gone

    def _written(self) -> list[int]:
        key = lambda instance: f"{self._room}/at/{instance}"  # noqa: E731
        found, missing = collected(self._client, key, self._seconds)
        if missing:
            raise InstancesMissingError(
                f"SIGTERM: {named(missing)} of {self._count} did not say within {self._seconds:g} s after which step "
                "to stop: look at what it does"
            )
        return [int(steps) for steps in found]


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
        self._own, self._count = process()
        self._client: Any = distributed.global_state.client if self._count > 1 else None
        self._hall, self._round = f"{_MEETINGS}/{next(_numbers_of_meetings)}", 0
        self._seconds, self.is_waiting = seconds, False
        self._telling = AgreedStop(seconds)

    def begin(self) -> None:
        """Begin a round. All instances have ended the previous one, and call this equally often."""
        before, self._round = self._round, self._round + 1
        if self._client is not None and before and self._own == 0:
            self._client.key_value_delete(f"{self._hall}/{before}/")

    def meet(self, place: str, seconds: float) -> None:
        """Wait until all instances have arrived at a place of this round.

        Communicates a few bytes with the coordination service, about a hundred times per second while it waits.

        Raises:
            OtherFailedError: another instance has failed in this round.
            InstancesMissingError: some instances did not arrive in time.
        """
        if self._client is None:
            return
        deadline, wanted = time.monotonic() + seconds, set(range(self._count))
        self._client.key_value_set(f"{self._hall}/{self._round}/{place}/{self._own}", "")
        self.is_waiting = True
        try:
            while missing := wanted - self._entries(place).keys():
                self.check()
                if time.monotonic() > deadline:
                    raise InstancesMissingError(
                        f"{place}: {named(sorted(missing))} of {self._count} did not come within {seconds:g} s"
                    )
                time.sleep(_LOOK_EVERY)
        finally:
            self.is_waiting = False

    def check(self) -> None:
        """Raise `OtherFailedError` if another instance has failed in this round."""
        for instance, told in sorted(self._entries(_FAILED).items()):
            if instance != self._own:
                text, errno = json.loads(told)
                raise OtherFailedError(f"on instance {instance}: {text}", errno)

    def fail(self, error: BaseException, errno: int | None) -> None:
        """Report a failure of this instance in this round to the others, unless one of them caused it."""
        if self._client is not None and not isinstance(error, OtherFailedError):
            self._telling.ask()
            text = json.dumps([" ".join(str(error).split())[:_LONGEST], errno])
            try:
                self._client.key_value_set(f"{self._hall}/{self._round}/{_FAILED}/{self._own}", text)
            except jax.errors.JaxRuntimeError:
                return  # it has said so already, or instance 0 has gone

    def is_time_to_tell(self) -> bool:
        """Return whether an instance has failed, in the same call on all instances. They call this equally often."""
        return self._client is not None and self._telling.due()

    def forget(self) -> None:
        """Forget the failures so far. All instances have reported them, and call this in the same place."""
        self.close()
        self._telling = AgreedStop(self._seconds)

    def close(self) -> None:
        """End the thread that listens for failures."""
        self._telling.close()

    def _entries(self, place: str) -> dict[int, str]:
        """Return what instances have written at a place, by instance number."""
        if self._client is None:
            return {}
        found = self._client.key_value_dir_get(f"{self._hall}/{self._round}/{place}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}
