"""Draw random moments of a training run, and wait for them in a run that is under way.

start      compile        step ... step     save          end
|----------|--------------|--------|--------|-------------|
launched   compiling      a mark, then a random part of what this phase takes undisturbed
"""

import dataclasses
import random
import time
from typing import Final

from faults_of.runs import Mark, Started
from faults_of.twin import Twin

PHASES: Final = ("start", "compile", "step", "save", "end")


@dataclasses.dataclass(frozen=True)
class Moment:
    """A moment of a training run.

    Attributes:
        phase: one of `PHASES`.
        step: the step after which the moment is; None for phases that occur only once.
        delay: seconds since the phase began.
    """

    phase: str
    step: int | None
    delay: float

    def __str__(self) -> str:
        after = "" if self.step is None else f" {self.step}"
        return f"{self.phase}{after} + {self.delay:.3f} s"

    def wait_in(self, run: Started, instance: int) -> bool:
        """Wait for this moment of an instance's training; return whether it came before the end."""
        if self.phase == "start":
            began = run.wait_for_pid(instance) is not None
        else:
            began = run.wait_for(lambda mark: mark.instance == instance and self._begins(mark)) is not None
        time.sleep(self.delay)
        return began and run.process.poll() is None

    def _begins(self, mark: Mark) -> bool:
        name = {"compile": "compiling", "step": "step", "save": "saving", "end": "closing"}[self.phase]
        return mark.name == name and (self.step is None or mark.step == self.step)


def moment_of(phase: str, twin: Twin, dice: random.Random) -> Moment:
    """Return a random moment of a phase."""
    if phase == "start":
        return Moment(phase, None, dice.uniform(0, twin.start))
    if phase == "compile":
        return Moment(phase, None, dice.uniform(0, twin.compile))
    if phase == "step":
        return Moment(phase, dice.randrange(2, twin.updates - 1), dice.uniform(0, twin.step))
    if phase == "save":
        last = twin.updates // twin.every
        return Moment(phase, twin.every * dice.randrange(1, last + 1), dice.uniform(0, twin.save))
    return Moment(phase, None, dice.uniform(0, twin.end))
