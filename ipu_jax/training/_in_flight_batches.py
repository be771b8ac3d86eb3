"""Keep the batches of calls in flight, and tell of updates that were not finite, without waiting for the last calls.

    call 0   1   2   3   4   5              the step's window waits, in call 4, for call 0
             NaN         ^   ^ call 5 reads what call 0 was, call 6 what call 1 was, and raises or warns

Which call reads what depends on the number of the call alone, not on how fast an instance is: all instances raise in
the same call.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ipu_jax.options import TrainOptions
from ipu_jax.training._nonfinite import limit_of
from ipu_jax.training.nonfinite import NonFinite, NonFiniteLossError, NonFiniteLossWarning
from ipu_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that was dispatched.

    Attributes:
        first: the number of updates before it, int32.
        batch: its batch.
        numbers: `StepOutputs.nonfinite` of it.
    """

    first: Any
    batch: Any
    numbers: Any


class BatchesInFlight:
    """Keeps the batches of the last calls of a step.

    Args:
        options: those of the step, with `on_nonfinite`.
        find: `find(state, batch of one update, number)`, which names what is not finite.
    """

    def __init__(self, options: TrainOptions, find: Callable[[TrainState, Any, int], NonFinite | None]):
        self._options, self._find = options, find
        self._calls: collections.deque[_Call] = collections.deque()

    def add(self, first: Any, batch: Any, numbers: Any) -> None:
        """Remember a call that was just dispatched."""
        self._calls.append(_Call(first, batch, numbers))

    def settle(self, state: TrainState, keep: int) -> None:
        """Read the outcome of all calls but the last `keep`, and forget their batches.

        Args:
            state: what the last call returned; it is read only if an update was not finite.
            keep: how many of the last calls may still be running.

        Raises:
            NonFiniteLossError: an update stopped the state.
        """
        while len(self._calls) > keep:
            call = self._calls.popleft()
            numbers = np.atleast_1d(np.asarray(call.numbers))
            for number in dict.fromkeys(numbers[numbers > 0].tolist()):
                self._tell(state, call, number)

    def _tell(self, state: TrainState, call: _Call, number: int) -> None:
        limit, before = limit_of(self._options), int(state.step)
        in_a_row = int(state.nonfinite)
        stopped = in_a_row >= limit
        # every update from `number` on was not made, so the state is the one before it
        is_same = number > before + stopped - in_a_row
        at = number - 1 - int(call.first)
        batch = call.batch
        if self._options.device_iterations > 1:
            batch = _update_of(batch, at)
        found = self._find(state, batch, number)
        text = str(found) if found else f"update {number}: its loss or a gradient is not finite"
        if not found:
            text += f", but with the state after update {before} both are" if not is_same else ", for no cause found"
        elif not is_same:
            text += f" (with the state after update {before})"
        if not stopped or number != before + 1:
            warnings.warn(f"{text}; the update was skipped", NonFiniteLossWarning, stacklevel=4)
            return
        self._calls.clear()
        skipped = f", the last of {limit} in a row" if limit > 1 else ""
        raise NonFiniteLossError(
            f"{text}{skipped}. No update was made since, and the state is the one before it: mend the data, lower the "
            "learning rate, or go on without this batch from step.restore(step.whole(state))",
            number,
            found,
        )


@jax.jit  # an array of several instances can be indexed in a program only
def _update_of(batch: Any, at: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], batch)
