"""Hold the results of an undisturbed training, and find where a disturbed one differs: losses, weights, checkpoints.

undisturbed       step 1 ........ 12 S ........ 24 S ........ 36 S ........ 48 S  weights
disturbed         step 1 ........ 12 S .... X
resumed                              S 13 ........ 24 S ... 48 S  weights         the same bits; 4 steps were lost
"""

import dataclasses
import itertools
import json
import re
import statistics
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from faults_of.runs import Mark, Started

SEAL: Final = "ipu_jax.json"


@dataclasses.dataclass(frozen=True)
class Twin:
    """Hold the results of undisturbed runs.

    Attributes:
        losses: the loss of each step, as printed.
        weights: the digest of the last weights.
        every: steps between two checkpoints.
        start: seconds from the start of the instances until they have joined.
        compile: seconds from there to the first step's loss, without a cache.
        step: seconds between two losses.
        save: seconds from the beginning of a save until a loop sees that it is sealed.
        interval: seconds between the beginnings of two saves.
        end: seconds from the last loss to the end of poprun.
        first_step: seconds from poprun's start to the first loss, with a cache.
        first_step_cold: the same without one.
    """

    losses: dict[int, str]
    weights: str
    every: int
    start: float
    compile: float
    step: float
    save: float
    interval: float
    end: float
    first_step: float
    first_step_cold: float

    @property
    def updates(self) -> int:
        """Return the number of all steps."""
        return len(self.losses)


def twin_of(cold: Started, warm: Sequence[Started], every: int) -> Twin:
    """Return the results of undisturbed runs: one had to compile, and the others found its programs in the cache."""
    losses, weights = losses_of(cold.marks), weights_of(cold.marks)
    for run in warm:
        assert (losses_of(run.marks), weights_of(run.marks)) == (losses, weights), "undisturbed runs differ"
    gaps = [after - before for run in warm for before, after in _pairs(_times(run.marks, "step"))]
    saves = [
        sealed.time - saving.time
        for run in warm
        for saving in run.marks
        for sealed in run.marks
        if (saving.name, sealed.name, saving.value, saving.instance) == ("saving", "sealed", sealed.value, 0)
    ]
    apart = [after - before for run in warm for before, after in _pairs(_times(run.marks, "saving"))]
    return Twin(
        losses={step: next(iter(values)) for step, values in losses.items()},
        weights=next(iter(weights)),
        every=every,
        start=statistics.median(_times(run.marks, "joined")[0] - run.instances_started for run in warm),
        compile=_since_launch(cold, "step") - _since_launch(cold, "compiling"),
        step=statistics.median(gaps),
        save=statistics.median(saves),
        interval=statistics.median(apart),
        end=statistics.median(run.ended - _times(run.marks, "closing")[0] for run in warm),
        first_step=statistics.median(_since_launch(run, "step") for run in warm),
        first_step_cold=_since_launch(cold, "step"),
    )


def differences(twin: Twin, marks: Sequence[Mark]) -> list[str]:
    """Return where the results of disturbed runs that belong together differ from the undisturbed run's."""
    found, wrong = losses_of(marks), list[str]()
    for step, values in sorted(found.items()):
        if values != {twin.losses.get(step)}:
            wrong.append(f"the loss of step {step} is {' and '.join(sorted(values))}, not {twin.losses.get(step)}")
    if missing := sorted(twin.losses.keys() - found.keys()):
        wrong.append(f"steps {missing} were not made")
    if weights_of(marks) != {twin.weights}:
        wrong.append("the weights at the end differ" if weights_of(marks) else "it did not come to its end")
    return wrong


def lost_before(first: Mark, marks: Iterable[Mark], every: int) -> tuple[int, int]:
    """Return how many steps were made again and how many may be, given the first mark "resumed" after a fault.

    One interval may be made again. If the save at its end had begun but could not be sealed, so may the steps since
    then.
    """
    before = [mark for mark in marks if mark.time < first.time]
    made = max((mark.step for mark in before if mark.name == "step"), default=0)
    begun = max((mark.step for mark in before if mark.name == "saving"), default=0)
    resumed_at = int(first.value)
    return made - resumed_at, every + (made - begun if begun > resumed_at else 0)


def losses_of(marks: Iterable[Mark]) -> dict[int, set[str]]:
    """Return the printed losses by step: one for each step, unless instances or attempts differ."""
    found: dict[int, set[str]] = {}
    for mark in marks:
        if mark.name == "step":
            found.setdefault(mark.step, set()).add(mark.value.partition(":")[2])
    return found


def weights_of(marks: Iterable[Mark]) -> set[str]:
    """Return the digests of the weights at the end."""
    return {mark.value for mark in marks if mark.name == "weights"}


LEFT_OVER = " is left over"


def damaged_in(folder: Path) -> list[str]:
    """Return what does not fit its seal in a folder of checkpoints, read here without the library's own code."""
    wrong: list[str] = []
    for path in sorted(folder.glob("step-*")):
        wrong += _damages(path) if order_of(path) else [f"{path.name}{LEFT_OVER}"]
    return wrong


def order_of(checkpoint: Path) -> tuple[int, int] | None:
    """Return the step and the number of the save in a checkpoint's name; None for any other name."""
    found = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", checkpoint.name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def _damages(path: Path) -> list[str]:
    if not (path / SEAL).exists():
        return [f"{path.name} has no seal"]
    checksum, _, text = (path / SEAL).read_bytes().partition(b"\n")
    if int(checksum) != zlib.crc32(text):
        return [f"{path.name}/{SEAL} is damaged"]
    wrong: list[str] = []
    for name, expected in json.loads(text)["files"].items():
        file = path / name
        found = [file.stat().st_size, zlib.crc32(file.read_bytes())] if file.exists() else None
        if found != expected:
            wrong.append(f"{path.name}/{name} is not as it was sealed")
    return wrong


def _times(marks: Iterable[Mark], name: str) -> list[float]:
    return [mark.time for mark in marks if mark.name == name and mark.instance == 0]


def _since_launch(run: Started, name: str) -> float:
    return _times(run.marks, name)[0] - run.launched


def _pairs(times: Sequence[float]) -> Iterable[tuple[float, float]]:
    return itertools.pairwise(times)
