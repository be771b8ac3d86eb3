"""Decide when to save: after a number of updates or of minutes, the same on all instances."""

import time
from collections.abc import Callable

from ipu_jax.distributed import popdist


class Due:
    """Counts updates without waiting for them, and returns whether a save is due.

    Instances have different clocks, so the clock of instance 0 decides. Instance 0 chooses after how many calls to ask
    it again, and all instances ask in the same call. They ask a few times between two saves, not in every step.

    Args:
        every: save after this many updates; None for never.
        minutes: save after this many minutes; None for never.
        clock: returns seconds.

    >>> due = Due(100, None)
    >>> due.restart(0)
    >>> [due.after(40) for _ in range(3)], due.step
    ([False, False, True], 120)
    """

    def __init__(self, every: int | None, minutes: float | None, clock: Callable[[], float] = time.monotonic):
        self._every, self._seconds, self._clock = every, None if minutes is None else 60 * minutes, clock
        self.step: int | None = None
        self._last = self._calls = 0
        self._since, self._asked_at = clock(), 1

    def restart(self, step: int) -> None:
        """Start counting from this step: after a save, or at the first step."""
        self.step, self._last, self._since = step, step, self._clock()
        self._calls, self._asked_at = 0, 1

    def after(self, updates: int) -> bool:
        """Count updates, and return whether a save is due. All instances must make the same calls.

        In some calls it communicates a number from instance 0 to all.
        """
        assert self.step is not None, "nobody knows the step yet: restart() says it"
        self.step += updates
        self._calls += 1
        if self._every is not None and self.step // self._every > self._last // self._every:
            return True
        return self._seconds is not None and self._is_time(self._seconds)

    def _is_time(self, seconds: float) -> bool:
        if self._calls < self._asked_at:
            return False
        passed = self._clock() - self._since
        if popdist.get_num_instances() == 1:
            return passed >= seconds
        wait = 0 if passed >= seconds else max(1, int((seconds - passed) * self._calls / max(passed, 1e-3)))
        wait = popdist.broadcast(min(wait, 10 * self._calls))  # steps after the compilation are faster than the first
        self._asked_at = self._calls + wait
        return wait == 0
