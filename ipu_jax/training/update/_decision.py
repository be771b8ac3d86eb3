"""Decide inside the program whether to make an update: not if its loss or a gradient is not finite.

    on_nonfinite="stop"                 update 1  made | 2  NaN: not made | 3  not made | 4  not made | ...
    on_nonfinite="skip", max_skips=2    update 1  made | 2  NaN: not made | 3  made | 4  NaN | 5  NaN: stopped | ...

A stopped state stays as it is, and so does its `step`, whatever it is called with. So calls that were dispatched ahead
do not lose the state in which a batch was not finite, and the host can find out why.

Every IPU of every replica must come to the same decision. The loss is the same on all of them, so it needs no
communication; whether the gradients are finite is agreed on by `Iteration`.
"""

import dataclasses

import jax.numpy as jnp

from ipu_jax.base.annotations import Value
from ipu_jax.core.options import DynamicScale, TrainOptions
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
