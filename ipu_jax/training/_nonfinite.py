"""Judge inside the program whether an update is made: not if its loss or a gradient is not finite.

    on_nonfinite="stop"                 update 1  made | 2  NaN: not made | 3  not made | 4  not made | ...
    on_nonfinite="skip", max_skips=2    update 1  made | 2  NaN: not made | 3  made | 4  NaN | 5  NaN: stopped | ...

A state that is stopped stays as it is, also its `step`, whatever is called with it. So while calls are dispatched
ahead, the state in which a batch was not finite is not lost, and the host can find out why.

Every IPU of every replica must come to the same verdict. The loss is the same on all of them, so it needs no
communication; whether the gradients are finite is agreed on by `Iteration`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ipu_jax.options import DynamicScale, TrainOptions
from ipu_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on an update, the same on all IPUs of all replicas. All fields are scalars.

    Attributes:
        made: bool, whether the update is made.
        finite: bool, whether all gradients are finite.
        streak: int32, the new `TrainState.nonfinite`; None without `on_nonfinite`, as the others.
        counts: int32, 1 if `TrainState.step` counts the update, else 0: it stops the state, or comes after that.
        number: int32, `StepOutputs.nonfinite`.
    """

    made: Any
    finite: Any
    streak: Any = None
    counts: Any = None
    number: Any = None


def limit_of(options: TrainOptions) -> int:
    """Return the number of updates in a row, all of them not finite, of which the last one stops the state."""
    return options.max_skips if options.on_nonfinite == "skip" else 1


def judged(options: TrainOptions, state: TrainState, loss: Any, finite: Any) -> Verdict:
    """Return the verdict on an update under `on_nonfinite`. Communicates nothing.

    Args:
        options: those of the step.
        state: the one before the update.
        loss: over all micro-batches and replicas, unscaled.
        finite: whether all gradients of all IPUs are finite.
    """
    stopped = state.nonfinite >= limit_of(options)
    bad = ~jnp.isfinite(loss)
    if not isinstance(options.loss_scale, DynamicScale):
        bad |= ~finite
    made = finite & ~bad & ~stopped
    # an overflow that a DynamicScale skips is no part of a row, and does not end one
    streak = jnp.where(made, 0, state.nonfinite + (bad & ~stopped))
    counts = (streak < limit_of(options)).astype(jnp.int32)
    return Verdict(made, finite, streak.astype(jnp.int32), counts, jnp.where(bad | stopped, state.step + 1, 0))


def first_of(before: Any, number: Any) -> Any:
    """Return the `StepOutputs.nonfinite` of two updates together, of which these are the numbers; None if both are."""
    return None if number is None else jnp.where(before > 0, before, number)
