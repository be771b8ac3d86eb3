"""Show the progress of a training as lines that stay when the bar disappears.

Epoch 0.1, Mean loss: 2.103
Epoch 0.2, Mean loss: 1.544
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Say = Callable[[str], object]


class LossLines:
    """Prints the mean loss after each tenth of an epoch, or after every 100 updates of a stream.

    Args:
        updates_per_epoch: weight updates per epoch; None if unknown.
        say: prints a line.
    """

    def __init__(self, updates_per_epoch: int | None, say: Say):
        self._per_epoch, self._say = updates_per_epoch, say
        self._printed = 0
        self._losses: list[float] = []
        self._made = self._skipped = 0

    def add(self, losses: npt.NDArray[Any], made: int, skipped: int, updates: int) -> None:
        """Add the losses of a call, and print a line if it is time.

        Args:
            losses: (n,), of some or all of the call's updates.
            made: the number of the call's updates.
            skipped: how many of them were skipped.
            updates: the number of updates of the training after the call, or for lines with epochs, of the data.
        """
        self._losses += losses.tolist()
        self._made += made
        self._skipped += skipped
        marks = updates // 100 if self._per_epoch is None else 10 * updates // self._per_epoch
        if marks > self._printed:
            self._printed = marks
            self._print(f"Update {updates:,}" if self._per_epoch is None else f"Epoch {marks / 10:.1f}")

    def end(self, updates: int) -> None:
        """Print a line for the losses since the last line, if there are any; the training ends here."""
        if not self._losses:
            return
        if self._per_epoch is None:
            self._print(f"Update {updates:,}")
            return
        epoch = updates / self._per_epoch
        has_tenths = round(10 * epoch) != self._printed or not self._printed
        self._print(f"Epoch {epoch:.1f}" if has_tenths else f"Epoch {epoch:.2f}")

    def state(self) -> dict[str, Any]:
        """Return, as plain data, everything that the next line depends on."""
        # JSON has no NaN: None is read as NaN
        losses = [loss if np.isfinite(loss) else None for loss in self._losses]
        return {"printed": self._printed, "losses": losses, "made": self._made, "skipped": self._skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned: the next line is the same as without a restart."""
        self._printed, self._made, self._skipped = state["printed"], state["made"], state["skipped"]
        self._losses = [np.nan if loss is None else loss for loss in state["losses"]]

    def _print(self, where: str) -> None:
        losses = np.array(self._losses, np.float32)
        skipped = f", {self._skipped} of {self._made} updates skipped" if self._skipped else ""
        finite = losses[np.isfinite(losses)]
        mean = f"{finite.mean():.3f}" if len(finite) else "not finite"
        self._say(f"{where}, Mean loss: {mean}{skipped}")
        self._losses, self._made, self._skipped = [], 0, 0
