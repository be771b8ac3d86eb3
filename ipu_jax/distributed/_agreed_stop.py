"""Let all instances stop after the same step, although they learn of the request at different times.

    instance 0   step 7 | step 8 | step 9 ...         SIGTERM in step 8: tells the others
    instance 1   step 7 | step 8 | step 9 ...         each writes down how many steps it has completed: 7, 8
                                                      all stop one step after the largest number: step 9

A thread of each instance writes this, so that nobody waits for an instance that is blocked in a step.
"""

import contextlib
import itertools
import threading
import time
from typing import Any, Final

import jax
from jax._src import distributed  # the coordination service's client, which jax does not export

from ipu_jax.distributed._exchange import process
from ipu_jax.distributed._fingerprint import named
from ipu_jax.distributed.errors import InstancesMissingError
from ipu_jax.distributed.processes import beacons
from ipu_jax.distributed.processes.beacons import Phase

_ROOM: Final = "ipu_jax/stop"
_POLL_SECONDS: Final = 0.2

_numbers = itertools.count()


class AgreedStop:
    """Finds the step after which all instances stop. Every instance creates one, in the same order.

    Args:
        seconds: how long to wait for another instance to report its step.
    """

    def __init__(self, seconds: float):
        self._own, self._count = process()
        self._client: Any = distributed.global_state.client if self._count > 1 else None
        self._room, self._seconds = f"{_ROOM}/{next(_numbers)}", seconds
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
        deadline = time.monotonic() + self._seconds
        found, missing = [], []
        for instance in range(self._count):
            left = max(1, int(1000 * (deadline - time.monotonic())))
            try:
                found.append(int(self._client.blocking_key_value_get(f"{self._room}/at/{instance}", left)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                missing.append(instance)
        if missing:
            raise InstancesMissingError(
                f"SIGTERM: {named(missing)} of {self._count} did not say within {self._seconds:g} s after which step "
                "to stop: look at what it does"
            )
        return found
