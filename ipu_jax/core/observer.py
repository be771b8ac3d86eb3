"""Let one observer see every program that `Pipeline` and `TrainStep` dispatch. Without an observer, nothing happens.

Programs pass through `InFlight` (`devices.py`), which calls `admit` after each dispatch.
"""

from typing import Any, Final, Protocol

UPDATE: Final = "ipu_jax.update"
"""The name, in the compiled program, of a training step's operations on its gradients."""


class Observer(Protocol):
    """See programs on their way to the devices."""

    def admit(self, owner: Any, outputs: list[Any], updates: int) -> None:
        """See the output arrays of a program that was just dispatched, and its number of weight updates."""
        ...


_current: Observer | None = None


def current() -> Observer | None:
    """Return the observer, or None."""
    return _current


def observe_by(observer: Observer | None) -> None:
    """Set the observer, or remove it with None."""
    global _current
    _current = observer
