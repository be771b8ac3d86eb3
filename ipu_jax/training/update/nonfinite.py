"""Name what was not finite in an update, and decide which of several non-finite values was the first.

    flags of an update, per replica, micro-batch and stage        NonFinite
    stage 0  weights ok  batch x: NaN  output: NaN         -->    replica 1, micro-batch 3, stage 0, batch['x']
    stage 1  weights ok  batch x: NaN  output: NaN
    loss NaN

Nothing here runs on an IPU: `_replay.py` collects the flags.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first value of an update that is not finite.

    Attributes:
        step: the number of the update, counted from 1.
        replica, microbatch: where the value is, counted from 0; None if only the sum over them is not finite.
        stage, name: the stage's number in the pipeline, from 0, and its name; None for a plain loss function.
        what: the value's role in the stage, such as "its output" or "its weight params['head']['w']".
        loss: the loss of the micro-batch, or of the update where there is no single micro-batch.
    """

    step: int
    replica: int | None
    microbatch: int | None
    stage: int | None
    name: str | None
    what: str
    loss: float

    def __str__(self) -> str:
        where = [f"update {self.step}"]
        where += [] if self.replica is None else [f"replica {self.replica}"]
        where += [] if self.microbatch is None else [f"micro-batch {self.microbatch}"]
        where += [] if self.stage is None else [f"stage {self.stage}, {self.name!r}"]
        of = "update" if self.microbatch is None else "micro-batch"
        if self.what in ("its loss", "the loss"):
            return f"{', '.join(where)}: {self.what} is {self.loss:g}"
        return f"{', '.join(where)}: {self.what} is not finite, and the loss of the {of} is {self.loss:g}"


class NonFiniteLossError(ArithmeticError):
    """Raised if the loss or the gradients of an update are not finite, under `TrainOptions(on_nonfinite=)`.

    Attributes:
        step: the number of the update, counted from 1.
        found: the first value that was not finite; None if a second run of the update did not show it.
    """

    def __init__(self, message: str, step: int, found: NonFinite | None):
        super().__init__(message)
        self.step, self.found = step, found


class NonFiniteLossWarning(UserWarning):
    """Warns of an update that was skipped because it was not finite, under `TrainOptions(on_nonfinite="skip")`."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageFlags:
    """Hold a flag per value of a stage, True where it is not finite: bool, (replicas, M), by the name of the value.

    Attributes:
        weights, batch, state: the values that the stage reads.
        outputs, new_state: the values that it returns.
        gradients: the gradients that training computes in its backward.
    """

    weights: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    batch: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    state: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    new_state: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, npt.NDArray[np.bool_]] = dataclasses.field(default_factory=dict)


def first_nonfinite(
    step: int,
    losses: npt.NDArray[np.floating],
    stages: Sequence[StageFlags],
    names: Sequence[str] | None,
    *,
    sums_are_finite: bool,
) -> NonFinite | None:
    """Return the first value of an update that is not finite; None if all are finite.

    If a loss is not finite, values are ordered by micro-batch and, within a micro-batch, by stage. In a stage, values
    that it reads come before values that it computes. A value that is also infinite in a micro-batch with a finite
    loss, such as a mask, does no harm and is ignored. If all losses are finite, the result is the first gradient in
    the order of the backward pass.

    Args:
        step: the number of the update, from 1.
        losses: the loss of each micro-batch, (replicas, M).
        stages: the flags of each stage; a plain loss function is one stage without a name.
        names: the names of the stages, or None.
        sums_are_finite: whether the gradients summed over micro-batches and replicas are finite.
    """

    def named(replica: int, microbatch: int, stage: int, what: str) -> NonFinite:
        loss = float(losses[replica, microbatch])
        if stage == len(stages) - 1 and what == "its output":
            what = "its loss"
        if names is None:
            return NonFinite(step, replica, microbatch, None, None, what.replace("its ", "the "), loss)
        return NonFinite(step, replica, microbatch, stage, names[stage], what, loss)

    is_bad = ~np.isfinite(losses)
    if is_bad.any():
        found = min(_forward(stages, is_bad), default=None)
        if found is None:
            replica, microbatch = (int(at) for at in np.argwhere(is_bad)[0])
            return named(replica, microbatch, len(stages) - 1, "its output")
        microbatch, stage, _, replica, what = found
        return named(replica, microbatch, stage, what)
    gradients = [
        (int(microbatch), -number, int(replica), f"the gradient of {name}")
        for number, stage in enumerate(stages)
        for name, flag in stage.gradients.items()
        for replica, microbatch in np.argwhere(flag)
    ]
    if gradients:
        microbatch, stage, replica, what = min(gradients)
        return named(replica, microbatch, -stage, what)
    with np.errstate(over="ignore"):
        loss = float(losses.sum() / losses.size)
    if np.isfinite(loss) and sums_are_finite:
        return None
    of_gradients = "the sum of the gradients over micro-batches and replicas"
    return NonFinite(step, None, None, None, None, of_gradients if np.isfinite(loss) else "the sum of the losses", loss)


def _forward(stages: Sequence[StageFlags], is_bad: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int, str]]:
    """Yield (micro-batch, stage, rank, replica, what) of values that can be the first; the smallest is the first."""
    # a replica goes wrong in its first bad micro-batch, or earlier if a stage's state goes wrong
    first_bad = np.where(is_bad.any(1), is_bad.argmax(1), -1)
    for number, stage in enumerate(stages):
        harmful = lambda flag: flag & ~(flag & ~is_bad).any()
        causes = [
            *((f"its weight {name}", harmful(flag)) for name, flag in stage.weights.items()),
            *((name, harmful(flag)) for name, flag in stage.batch.items()),
            *((f"its state {name}", harmful(flag)) for name, flag in stage.state.items()),
        ]
        # state that was infinite before the first micro-batch is intended, or its reader shows it
        changed = {name: flag & ~stage.state[name] for name, flag in stage.new_state.items()}
        changed = {name: flag & ~stage.state[name][:, :1] for name, flag in changed.items()}
        effects = [
            *(("its output", harmful(flag)) for flag in stage.outputs.values()),
            *((f"its new state {name}", flag) for name, flag in changed.items()),
        ]
        for effect, flag in effects:
            for replica, microbatch in np.argwhere(flag):
                if microbatch > first_bad[replica]:
                    continue
                read = [what for what, cause in causes if cause[replica, microbatch]]
                what = read[0] if read else effect
                yield int(microbatch), number, 0 if read else 1, int(replica), what
