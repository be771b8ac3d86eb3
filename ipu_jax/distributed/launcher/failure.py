"""Find the first of several failures: the others are its consequences.

When an instance dies, its peers lose their connections to it and fail as well, some before the launcher has seen the
first failure. So all failures within a moment are ordered by the time at which they happened:

    instance 1   ValueError at 10.00 s, exit seen at 10.20 s      <- first
    instance 0   connection lost at 10.19 s, exit seen at 10.21 s

An exception records its own time. Any other death counts from when it was seen, a little late. A failure that looks
like a lost connection is blamed only if there is no other.

Nothing here imports jax.
"""

import dataclasses
import re
import signal
from collections.abc import Iterable
from typing import Final

from ipu_jax.distributed.launcher.events import ErrorRecord

MOMENT: Final = 0.3
"""Seconds after the first failure in which others are considered."""
PORT_TAKEN: Final = "PortTakenError"
"""The exception of an instance 0 that finds its coordinator's port taken."""

_LOST_PEER: Final = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|gloo|socket closed|heartbeat|coordination"
    r"|unavailable|barrier|deadline.exceeded|peer.* (gone|lost|died|unhealthy)",
    re.IGNORECASE,
)
_SEEN_LATE: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describe the failure of an instance.

    Attributes:
        instance: its number.
        at: when it failed.
        status: its exit status, or the negative number of the signal that ended it; None if it is still alive.
        error: its exception, if it has recorded one.
    """

    instance: int
    at: float
    status: int | None
    error: ErrorRecord | None = None

    @property
    def looks_like_a_lost_peer(self) -> bool:
        """Return whether the failure of another instance may be the cause."""
        if self.error is not None:
            return _LOST_PEER.search(f"{self.error.type}: {self.error.message}") is not None
        return self.status == -signal.SIGABRT  # jax's coordination service ends instances this way if it loses one

    @property
    def exit_status(self) -> int:
        """Return the launcher's exit status: as in a shell, 128 + the number of a signal."""
        if self.status is None or self.status == 0:
            return 1
        return self.status if self.status > 0 else 128 - self.status


def failure_of(instance: int, status: int | None, seen_at: float, error: ErrorRecord | None) -> Failure:
    """Return the failure of an instance after its exit, or its exception, was seen.

    The exception is ignored if a signal ended the instance: then the signal is the failure.
    """
    if error is not None and (status is None or status > 0):
        return Failure(instance, min(error.at, seen_at), status, error)
    return Failure(instance, seen_at, status)


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    >>> lost = ErrorRecord(at=10.19, type="XlaRuntimeError", message="Connection closed by peer", finished=7)
    >>> mistake = ErrorRecord(at=10.0, type="ValueError", message="no", finished=7)
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, 3, 10.20, mistake)]).instance
    1
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, -9, 10.25, None)]).instance
    1
    """

    def rank(failure: Failure) -> tuple[bool, float]:
        late = _SEEN_LATE if failure.error is None else 0.0
        return (failure.looks_like_a_lost_peer, failure.at - late)

    return min(failures, key=rank)
