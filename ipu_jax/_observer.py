"""Let one observer see every program that `Pipeline` and `TrainStep` give to the devices. Without one nothing is done.

Programs pass through `InFlight` (`devices.py`), which calls `admit` after each dispatch.
"""

from typing import Any, Final, Protocol

UPDATE: Final = "ipu_jax.update"
"""The name, in the compiled program, of all that a training step does with its gradients."""


class Observer(Protocol):
    """See programs on their way to the devices."""

    def admit(self, owner: Any, outputs: list[Any], updates: int) -> None:
        """See the arrays that a program of so many weight updates returns, which was just dispatched."""
        ...


_current: Observer | None = None


def current() -> Observer | None:
    """Return the observer, or None."""
    return _current


def observe_by(observer: Observer | None) -> None:
    """Make this the observer; None for no one."""
    global _current
    _current = observer
