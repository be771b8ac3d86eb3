"""Hold the needs and the result of one run of one case."""

import dataclasses
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from faults_of.runs import Mark, Started
from faults_of.twin import LEFT_OVER, SEAL, Twin, damaged_in, differences

PROGRAM: Final = Path(__file__).with_name("training.py")
EVERY, UPDATES = 12, 48
COMPILE_TIMEOUT: Final = 30.0
"""Seconds that poprun allows for starting and compiling; its default of 30 minutes is too long for a case."""

FOUND: Final = 1.0
"""Seconds within which an instance that is dead or has failed must be found."""
GONE: Final = 2.0
"""Seconds from there until all processes are gone: SIGTERM, 1.5 s, SIGKILL."""
TRIES: Final = 6
"""Moments drawn at most for a run, until one comes before the end of the training."""
LOOKS: Final = 1.0
"""Seconds within which poprun notices that a limit has passed."""


@dataclasses.dataclass
class Result:
    """Hold the result of one run. Times are seconds since the fault; None where there is nothing to measure.

    Attributes:
        moment: when the fault was made.
        found, gone, resumed: until poprun saw the fault, until no process was left, and until the first step after the
            fault, without the time in which nothing ran.
        lost: the number of steps that were made again.
        left_over: the leftovers of saves that the fault left, and that were named and removed later.
        bounds: the bounds of these four, by name.
        problems: what went wrong, in words.
    """

    moment: str
    found: float | None = None
    gone: float | None = None
    resumed: float | None = None
    lost: int | None = None
    left_over: int = 0
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def figures(self) -> str:
        """Return the figures in words."""
        values = {name: getattr(self, name) for name in ("found", "gone", "resumed", "lost")}
        return ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None)

    def judge(self) -> list[str]:
        """Return the problems, and the figures that are outside their bounds."""
        values = {name: getattr(self, name) for name in ("found", "gone", "resumed", "lost")}
        over = [
            f"{name} {value:.3g} > {self.bounds[name]:.3g}"
            for name, value in values.items()
            if value is not None and name in self.bounds and value > self.bounds[name]
        ]
        return [*self.problems, *over]


@dataclasses.dataclass
class Trial:
    """One run of one case.

    Attributes:
        folder: for all files of the run; kept if the run falls short.
        twin: the undisturbed run.
        cache: compiled programs of earlier runs.
        dice: the source of random numbers.
        checkpoints: where the training saves.
    """

    folder: Path
    twin: Twin
    cache: Path
    dice: random.Random
    started: list[Started] = dataclasses.field(default_factory=list)
    left_over: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.checkpoints = self.folder / "checkpoints"

    def start(
        self,
        *options: str,
        restarts: int = 0,
        cold: bool = False,
        fault: dict[str, Any] | None = None,
        program: Sequence[str] | None = None,
    ) -> Started:
        """Start poprun with the training; all starts share one folder of checkpoints."""
        name = f"run-{len(self.started)}"
        cache = self.folder / "cache" if cold else self.cache
        command = [
            *poprun_words(cache),
            *(["--max-restarts", str(restarts)] if restarts else []),
            *options,
            *(program or [sys.executable, str(PROGRAM)]),
            *flags(self.checkpoints),
        ]
        variables = {"FAULT": json.dumps(fault)} if fault else {}
        self.started.append(Started(command, self.folder, name, variables))
        return self.started[-1]

    def again(self, result: Result, *options: str, cold: bool = False, torn: Path | None = None) -> Started:
        """Start the same command again and return its run; it must end with status 0."""
        run = self.start(*options, cold=cold)
        if status := run.end():
            result.problems.append(f"the resumed run ended with {status}")
        self.after(run, result, torn)
        return run

    def after(self, run: Started, result: Result, torn: Path | None = None) -> None:
        """Check that an ended run has left no process, no run folder, and no corrupt file except one that we tore.

        Leftovers of a save are noted: who resumes must name and remove them.
        """
        if run.gone_at(None, 3) is None:
            result.problems.append(f"processes {sorted(run.processes())} are left")
            run.kill_all()
        if left := run.left_over():
            result.problems.append(f"run folders {left} are left")
        found = self._damages(torn)
        names = {wrong.removesuffix(LEFT_OVER) for wrong in found if wrong.endswith(LEFT_OVER)}
        self.left_over |= {
            name for name in names if not (self.checkpoints / name / SEAL).exists()
        }  # sealed: it is kept
        result.problems += [wrong for wrong in found if not wrong.endswith(LEFT_OVER)]

    def _damages(self, torn: Path | None) -> list[str]:
        of_torn = () if torn is None else (f"{torn.name} ", f"{torn.name}/")
        return [wrong for wrong in damaged_in(self.checkpoints) if not wrong.startswith(of_torn)]

    def at_the_end(self, result: Result, torn: Path | None = None) -> None:
        """Check the results of all runs together, and the folder of checkpoints.

        No checkpoint is damaged except one that we tore, nothing is left over, and each leftover of a save was named
        once.
        """
        result.problems += differences(self.twin, self.marks())
        result.problems += self._damages(torn)
        may_skip = "left over" if torn is None else f"{torn} "
        said = [line for run in self.started for line in run.errors]
        result.left_over = len(self.left_over)
        for name in sorted(self.left_over):
            lines = [line for line in said if f"{name} was left over" in line]
            if len(lines) != 1 and not name.endswith(".removed"):
                result.problems.append(f"{len(lines)} lines name {name}, which was left over")
        for line in said:
            if "is skipped" in line and not re.search(may_skip, line):
                result.problems.append(f"a checkpoint was skipped: {line}")
            if "Event loop is closed" in line:
                result.problems.append(f"a stray traceback: {line}")

    def marks(self) -> list[Mark]:
        """Return the marks of all runs."""
        return [mark for run in self.started for mark in run.marks]


def poprun_words(cache: Path) -> list[str]:
    """Return poprun's options for two instances with one replica each."""
    sizes = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "1"]
    limits = ["--compile-timeout", str(COMPILE_TIMEOUT)]
    return ["-v", *sizes, *limits, "--executable-cache-path", str(cache)]


def flags(checkpoints: Path) -> list[str]:
    """Return the flags of the training."""
    return ["--folder", str(checkpoints), "--every", str(EVERY), "--updates", str(UPDATES)]
