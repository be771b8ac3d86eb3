"""Keep the batches of calls in flight, and report updates that were not finite without waiting for the last calls.

    call 0   1   2   3   4   5              the step's window waits, in call 4, for call 0
             NaN         ^   ^ call 5 reads what call 0 was, call 6 what call 1 was, and raises or warns

Which outcome a call reads depends only on the call's number, not on how fast an instance is. So all instances raise in
the same call.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable

import jax
import numpy as np

from ipu_jax.base.annotations import Batch, Value
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.step_args import given_dims
from ipu_jax.training.update._decision import limit_of
from ipu_jax.training.update.nonfinite import NonFinite, NonFiniteLossError, NonFiniteLossWarning
from ipu_jax.training.update.state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class _CallInFlight:
    """A call that was dispatched.

    Attributes:
        first: the number of updates before it, int32.
        batch: its batch.
        made: which of its updates were made.
        numbers: its `StepOutputs.nonfinite`.
    """

    first: Value
    batch: Batch
    made: range
    numbers: Value


class BatchesInFlight:
    """Keeps the batches of the last calls of a step.

    Args:
        options: the step's options, with `on_nonfinite`.
        find: `find(state, batch of one update, number)`, which names what is not finite.
    """

    def __init__(self, options: TrainOptions, find: Callable[[TrainState, Batch, int], NonFinite | None]):
        self._options, self._find = options, find
        self._calls: collections.deque[_CallInFlight] = collections.deque()

    def add(self, first: Value, batch: Batch, made: range, numbers: Value) -> None:
        """Remember a call that was just dispatched."""
        self._calls.append(_CallInFlight(first, batch, made, numbers))

    def settle(self, state: TrainState, keep: int) -> None:
        """Read the outcome of all calls but the last `keep`, and forget their batches.

        Args:
            state: the state that the last call returned; it is read only if an update was not finite.
            keep: how many of the last calls may still be running.

        Raises:
            NonFiniteLossError: an update stopped the state.
        """
        while len(self._calls) > keep:
            call = self._calls.popleft()
            numbers = np.atleast_1d(np.asarray(call.numbers))
            if numbers.any():
                self._tell(state, call, set(numbers[numbers > 0].tolist()))

    def _tell(self, state: TrainState, call: _CallInFlight, numbers: set[int]) -> None:
        """Warn of a call's updates with these numbers, and raise if one of the call's updates stopped the state."""
        limit, before, first = limit_of(self._options), int(state.step), int(call.first)
        dims = given_dims(self._options.device_iterations)
        last = first + len(call.made)
        stopped = int(state.nonfinite) >= limit
        # the outputs may name an earlier update instead
        stops = before + 1 if stopped and first <= before < last else None
        for number in sorted(numbers if stops is None else {number for number in numbers if number < stops} | {stops}):
            batch = _update_of(call.batch, call.made.start + number - 1 - first) if dims else call.batch
            found = self._find(state, batch, number)
            # if no later update was made, the state is still the state before the update
            is_same = number > before + stopped - int(state.nonfinite)
            text = _described(found, number, None if is_same else before)
            if number != stops:
                warnings.warn(f"{text}; the update was skipped", NonFiniteLossWarning, stacklevel=5)
                continue
            self._calls.clear()
            skipped = f", the last of {limit} in a row" if limit > 1 else ""
            raise NonFiniteLossError(
                f"{text}{skipped}. No update was made since, and the state is the one before it: mend the data, lower "
                "the learning rate, or go on without this batch from step.restore(step.whole(state))",
                number,
                found,
            )


def _described(found: NonFinite | None, number: int, now: int | None) -> str:
    """Return a text about an update; `now` is the state's number of updates if later updates changed the state."""
    text = f"update {number}: its loss or a gradient is not finite" if found is None else str(found)
    if now is not None:
        return f"{text} ({'but not ' if found is None else ''}with the state after update {now})"
    return text if found else f"{text}, but everything is finite when it is computed again"


@jax.jit  # an array across several instances can be indexed only in a program
def _update_of(batch: Batch, at: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf[at], batch)
