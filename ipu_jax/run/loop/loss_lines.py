"""Show the progress of a training run as lines that stay when the bar disappears.

Epoch 0.1, Mean loss: 2.103
Epoch 0.2, Mean loss: 1.544
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ipu_jax.base.annotations import Json
from ipu_jax.run.observe.runs.digest import figure_in_words

_MOST: Final = 20
_SECONDS: Final = 180.0
"""20 lines in an hour."""


class LossLines:
    """Prints mean losses, by default about 20 times in a training run, or in each hour of a longer one.

    A line follows every tenth of an epoch, or of a shorter run; but every twentieth of the run if this is
    more. So lines depend on updates alone, and a resumed run prints the same lines. Only if the last line is three
    minutes old, there is a line in between. A stream that does not say how long it is has a line for every 100 updates,
    from 1,000 on for every 1,000, and so on.

    Args:
        updates_per_epoch: weight updates per epoch; None if unknown.
        say: prints a line.
        call: the most updates of a call.
        every: print after this many updates instead; 0 to print no losses.
        clock: returns seconds.

    >>> lines = LossLines(40, print)
    >>> lines.begin(0, length=40)
    >>> lines.add([2.5, 1.5, 1.25, 0.75], 4)
    Epoch 0.1, Mean loss: 1.500
    """

    def __init__(
        self,
        updates_per_epoch: int | None,
        say: Callable[[str], object],
        *,
        call: int = 1,
        every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._per_epoch, self._say, self._call, self._every, self._clock = updates_per_epoch, say, call, every, clock
        self._losses: list[float] = []
        self._made = self._skipped = 0
        self._figures = -1, 0.0  # mark and time of the last figures
        self.begin(0, None)

    def begin(self, updates: int, length: int | None) -> None:
        """Begin, or go on, after this many updates of the data; the training has `length` updates, if known."""
        self._interval = None if length is None else max(min(self._per_epoch or length, length) / 10, length / _MOST)
        self._decimals = 1 if self._per_epoch is None else self._decimals_of(self._per_epoch, length)
        self._updates = updates
        self._printed, self._time = self._mark(), self._clock()

    def add(self, losses: npt.ArrayLike, updates: int, skipped: int = 0) -> None:
        """Add the losses of a call, and print a line if it is time.

        Args:
            losses: (n,), of some or all of the call's updates.
            updates: the number of the call's updates.
            skipped: how many of them were skipped.
        """
        self._losses += np.asarray(losses).tolist()
        self._updates += updates
        self._made += updates
        self._skipped += skipped
        mark = self._mark()
        is_due = self._every is None and self._clock() - self._time >= _SECONDS
        if mark > self._printed or is_due:
            if mark == self._printed and self._per_epoch is not None:
                self._decimals = max(self._decimals, self._needed(self._updates, self._per_epoch))
            self._printed = mark
            self._print()

    def end(self) -> None:
        """Print a line for the losses since the last line, if there are any; the training ends here."""
        if self._losses and self._every != 0:
            self._print()

    def evaluated(self, figures: Mapping[str, float], *, is_last: bool) -> None:
        """Print the figures of the first evaluation, the last, and about as many between as losses have lines."""
        (mark, seconds), now = self._figures, (self._mark(), self._clock())
        if figures and (is_last or self._every is not None or now[0] > mark or now[1] - seconds >= _SECONDS):
            self._figures = now
            found = [f"Test {name}: {figure_in_words(name, value)}" for name, value in figures.items()]
            self._say(", ".join([self.where(), *found]))

    @property
    def epoch(self) -> float | None:
        """Return how many epochs have been read; None if it is unknown how long one is."""
        return None if self._per_epoch is None else self._updates / self._per_epoch

    def where(self) -> str:
        """Return how far the data have been read, with as many decimals as the lines of the training need.

        >>> lines = LossLines(200, print)
        >>> lines.begin(30, 150)
        >>> lines.where()
        'Epoch 0.150'
        """
        if self.epoch is None:
            return f"Update {self._updates:,}"
        return f"Epoch {self.epoch:.{self._decimals}f}"

    def _decimals_of(self, per_epoch: int, length: int | None) -> int:
        """Return how many decimals the first lines of a run need, and its end."""
        size = self._every or self._interval or 1
        marks = [mark for k in range(1, _MOST + 1) if (mark := k * size) <= (length or mark)]
        # a line follows the call that reaches its mark, and a call ends with its epoch
        before = [divmod(max(1, math.ceil(mark - 0.5)) - 1, per_epoch) for mark in marks]
        ends = [epoch * per_epoch + min((part // self._call + 1) * self._call, per_epoch) for epoch, part in before]
        return max(self._needed(end, per_epoch) for end in [*ends, length or per_epoch])

    def _needed(self, updates: int, per_epoch: int) -> int:
        """Return how many decimals the number of epochs needs after this many updates."""
        # two updates have different texts; the end of a long call is near its mark
        epoch, near = updates / per_epoch, min(self._call, (self._interval or 0) / 10)
        error = max(0.49, near if self._call > 1 else 0) / per_epoch
        fits = lambda digits: abs(round(epoch, digits) - epoch) <= error and round(epoch, digits) > 0
        return next(filter(fits, itertools.count(1)))

    def state(self) -> dict[str, Json]:
        """Return, as plain data, everything that the next line depends on, apart from the number of updates."""
        # JSON has no NaN: None is read as NaN
        losses = [loss if np.isfinite(loss) else None for loss in self._losses]
        return {"losses": losses, "made": self._made, "skipped": self._skipped}

    def restore(self, state: dict[str, Json]) -> None:
        """Continue from what `state` returned: the next line is the same as without a restart."""
        self._made, self._skipped = state["made"], state["skipped"]
        self._losses = [np.nan if loss is None else loss for loss in state["losses"]]

    def _mark(self) -> int:
        """Return a number that grows with each line."""
        if self._every is not None:
            return self._updates // self._every if self._every else 0
        if self._interval is None:
            size = 10 ** max(2, len(str(self._updates)) - 1)
            return self._updates // size * size
        return int((self._updates + 0.5) / self._interval)  # a mark between two updates is at the nearer one

    def _print(self) -> None:
        losses = np.array(self._losses, np.float32)
        skipped = f", {self._skipped} of {self._made} updates skipped" if self._skipped else ""
        finite = losses[np.isfinite(losses)]
        mean = loss_in_words(float(finite.mean())) if len(finite) else "not finite"
        self._say(f"{self.where()}, Mean loss: {mean}{skipped}")
        self._losses, self._made, self._skipped, self._time = [], 0, 0, self._clock()


def loss_in_words(loss: float) -> str:
    """Return a loss with three decimals, or with three significant digits if these would show too few or too many.

    >>> loss_in_words(2.3456), loss_in_words(0.0123), loss_in_words(1.234e-5), loss_in_words(3e8)
    ('2.346', '0.0123', '1.23e-05', '3.00e+08')
    """
    return f"{loss:.3f}" if 0.1 <= abs(loss) < 1e6 else f"{loss:#.3g}"
