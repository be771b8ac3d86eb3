"""Let threads of all instances meet at named places, unless one of them reports a failure.

    instance 0   writes -> meet("written", 300) ....................... raises: on instance 1: No space left on device
    instance 1   writes -> OSError -> fail(error)

jax's own barrier cannot be left before its timeout, so one failure would cost all instances minutes. Here each instance
writes down where it is, or that it has failed, and reads what the others have written.
"""

import itertools
import json
import time
from typing import Any, Final

import jax
from jax._src import distributed  # the coordination service's client, which jax does not export

from ipu_jax.distributed._agreed_stop import AgreedStop
from ipu_jax.distributed._exchange import process
from ipu_jax.distributed._fingerprint import named
from ipu_jax.distributed.errors import InstancesMissingError

_ROOM: Final = "ipu_jax/meetings"
_FAILED: Final = "failed"
_LOOK_EVERY: Final = 0.01
_LONGEST: Final = 2000

_numbers = itertools.count()


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
        self._hall, self._round = f"{_ROOM}/{next(_numbers)}", 0
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
