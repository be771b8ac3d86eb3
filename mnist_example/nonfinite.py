"""Say which update of a device call was not finite, and where: the flag --on-nonfinite."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ipu_jax import NonFinite, TrainState, TrainStep


def told(
    step: TrainStep, state: TrainState, calls: Any, losses: npt.NDArray[Any], numbers: npt.NDArray[Any]
) -> Iterator[tuple[str, bool]]:
    """Yield for each update that was not made since it was not finite a text about it, and whether it stops training.

    Nothing follows the update that stops it. Across several instances all of them must come here alike.

    Args:
        step: the training step.
        state: what the last call returned, this one or a later one.
        calls: the batch of the call, leaves (updates, ...).
        losses, numbers: of its updates, the loss and the `StepOutputs.nonfinite`.
    """
    limit = step.options.max_skips if step.options.on_nonfinite == "skip" else 1
    for i in np.flatnonzero(numbers):
        number, has_stopped = int(numbers[i]), int(state.nonfinite) >= limit
        stops = has_stopped and number == int(state.step) + 1
        found = step.find_nonfinite(state, _update_of(calls, int(i)), step=number)
        text = _described(found, number, float(losses[i]), int(state.step))
        yield (f"{text}; it is the last of {limit} in a row" if stops and limit > 1 else text), stops
        if stops:
            return


def _described(found: NonFinite | None, number: int, loss: float, now: int) -> str:
    """Return a text about an update that is not finite; it is not found again if later updates change its outcome."""
    if found is not None:
        return str(found)
    return f"update {number}: its loss is {loss:g}, but a gradient or it was not finite, and after update {now} all is"


@jax.jit
def _update_of(calls: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], calls)
