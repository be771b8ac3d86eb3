"""Decide in the program whether to make an update, not if its loss or a gradient is not finite, and report it later.

    on_nonfinite="stop"                 update 1  made | 2  NaN: not made | 3  not made | 4  not made | ...
    on_nonfinite="skip", max_skips=2    update 1  made | 2  NaN: not made | 3  made | 4  NaN | 5  NaN: stopped | ...

A stopped state stays as it is, and so does its `step`, whatever it is called with. So calls that were dispatched ahead
do not lose the state in which a batch was not finite, and the host can find out why.

Every IPU of every replica must come to the same decision. The loss is the same on all of them, so it needs no
communication; whether the gradients are finite is agreed on by `Iteration`.

The host keeps the batches of calls in flight, and reports such updates without waiting for the last calls:

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
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Batch, Value
from ipu_jax.core.options import DynamicScale, TrainOptions
from ipu_jax.core.step_args import given_dims
from ipu_jax.training.update.nonfinite import NonFinite, NonFiniteLossError, NonFiniteLossWarning
from ipu_jax.training.update.state import TrainState


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on an update, the same on all IPUs of all replicas. All fields are scalars.

    Attributes:
        made: bool, whether the update is made.
        finite: bool, whether all gradients are finite.
        streak: int32, the new `TrainState.nonfinite`. This and the following fields are None without `on_nonfinite`.
        counts: int32, 1 if `TrainState.step` counts the update; 0 if it stops the state or the state was stopped.
        number: int32, `StepOutputs.nonfinite`.
    """

    made: Value
    finite: Value
    streak: Value = None
    counts: Value = None
    number: Value = None


def limit_of(options: TrainOptions) -> int:
    """Return the number of consecutive non-finite updates after which the state stops."""
    return options.max_skips if options.on_nonfinite == "skip" else 1


def decided(options: TrainOptions, state: TrainState, loss: Value, finite: Value) -> Decision:
    """Return the decision on an update under `on_nonfinite`. Communicates nothing.

    Args:
        options: the step's options.
        state: the state before the update.
        loss: over all micro-batches and replicas, unscaled.
        finite: whether all gradients of all IPUs are finite.
    """
    stopped = state.nonfinite >= limit_of(options)
    bad = ~jnp.isfinite(loss)
    if not isinstance(options.loss_scale, DynamicScale):
        bad |= ~finite
    made = finite & ~bad & ~stopped
    # an overflow that a DynamicScale skips neither adds to a streak nor ends it
    streak = jnp.where(made, 0, state.nonfinite + (bad & ~stopped))
    counts = (streak < limit_of(options)).astype(jnp.int32)
    return Decision(made, finite, streak.astype(jnp.int32), counts, jnp.where(bad | stopped, state.step + 1, 0))


def first_of(before: Value, number: Value) -> Value:
    """Combine the `StepOutputs.nonfinite` of two successive updates into one; None if both are None."""
    return None if number is None else jnp.where(before > 0, before, number)


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
