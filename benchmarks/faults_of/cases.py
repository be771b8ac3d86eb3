"""Make the faults that end an instance or leave it stuck, and judge how poprun and the next attempt handle them."""

import dataclasses
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from faults_of.moments import PHASES, Moment, moment_of
from faults_of.runs import Mark, Started
from faults_of.trial import COMPILE_TIMEOUT, FOUND, GONE, LOOKS, PROGRAM, Result, Trial
from faults_of.twin import Twin, lost_before

_JOINING: Final = 10.0
"""Seconds that the training's `popdist.init` waits for the others."""
_DEVICES: Final = 110.0
"""Seconds that `configure` waits for the devices of the others."""


@dataclasses.dataclass(frozen=True)
class Blow:
    """A fault of one instance.

    Attributes:
        how: a signal, or "raise" or "lock" for a fault that the program makes itself.
        status: poprun's exit status without a restart; None if it cannot have one.
        says: a pattern for poprun's report about the instance.
        seen: a pattern for the line of `-v` when the fault is found.
        victims: the instances to choose from.
        is_stuck: whether the instance lives on, and is found because it makes no progress.
    """

    how: signal.Signals | str
    status: int
    says: str
    seen: str
    victims: tuple[int, ...] = (0, 1)
    is_stuck: bool = False


BLOWS: Final = {
    "kill -9 of an instance": Blow(signal.SIGKILL, 137, "was ended by SIGKILL", "was ended by SIGKILL", (1,)),
    "instance 0 lost": Blow(signal.SIGKILL, 137, "was ended by SIGKILL", "was ended by SIGKILL", (0,)),
    "SIGSEGV": Blow(signal.SIGSEGV, 139, "was ended by SIGSEGV", "was ended by SIGSEGV"),
    "SIGSTOP": Blow(signal.SIGSTOP, 124, r"is stuck: .*", "is stuck", is_stuck=True),
    "locked interpreter": Blow("lock", 124, r"is stuck: .*", "is stuck", is_stuck=True),
    # before `popdist.init` nothing records the exception: its traceback is on stderr, and poprun has the exit status
    "exception": Blow("raise", 1, "(failed with ArithmeticError|exited with status 1)", "exited with status 1"),
}


def struck(blow: Blow, trial: Trial, phase: str) -> Result | None:
    """Strike one instance at a random moment of a phase, and resume the training; None if the training had ended."""
    dice, twin = trial.dice, trial.twin
    victim = dice.choice(blow.victims)
    moment = moment_of(phase, twin, dice)
    restarts = dice.randrange(2)
    cold = phase == "compile"
    fault = None if isinstance(blow.how, signal.Signals) else _own_fault(blow.how, victim, moment, twin)
    run = trial.start(restarts=restarts, cold=cold, fault=fault)
    result = Result(f"{moment}, instance {victim}, {'a restart' if restarts else 'poprun again'}")
    at = _strike(run, blow, moment, victim)
    if at is None:
        run.end()
        return None
    result.bounds = bounds_of(blow, fault["mark"] if fault else phase, twin)
    gone_at = run.gone_at(0, result.bounds["gone"] + 60)
    status = run.end()
    at = at if isinstance(blow.how, signal.Signals) else _mark(run, "fault").time
    found_at = run.seen(f"instance {victim} {blow.seen}")
    meets = fault is not None and fault["mark"] == "meeting" and blow.how == "lock"
    if meets:  # the other instance waits for the victim, gives up, and names it
        found_at = run.seen(f"instance {1 - victim} exited with status 1")
    result.found = None if found_at is None else found_at - at
    result.gone = None if gone_at is None else gone_at - at
    if gone_at is None:
        result.problems.append("some processes were still there a minute after the bound")
    expected = 0 if restarts else 1 if meets else blow.status
    if status != expected:
        result.problems.append(f"poprun ended with {status}, not {expected}")
    who = rf"instance {1 - victim} .*InstancesMissingError: instance {victim} " if meets else None
    if not any(
        says(line, who or rf"instance {victim} \(host localhost, pid \d+, .*\) {blow.says}") for line in run.errors
    ):
        result.problems.append("poprun's report does not name the instance and the reason")
    if found_at is None:
        result.problems.append("poprun has not seen it")
    trial.after(run, result)
    if not restarts:
        trial.again(result, cold=cold)
    resumed(trial, result, at, gone_at, cold=cold)
    trial.at_the_end(result)
    return result


def poprun_killed(trial: Trial, phase: str, *program_flags: str) -> Result | None:
    """Kill poprun itself at a random moment: its watcher ends the instances; the same command resumes."""
    moment = moment_of(phase, trial.twin, trial.dice)
    cold = phase == "compile"
    run = trial.start(cold=cold, program=[sys.executable, str(PROGRAM), *program_flags])
    result = Result(str(moment), bounds={"gone": FOUND + GONE})
    if not moment.wait_in(run, trial.dice.randrange(2)):
        run.end()
        return None
    at = time.monotonic()
    run.process.kill()
    gone_at = run.gone_at(None, 20)
    if run.end() == 0:
        return None
    result.gone = None if gone_at is None else gone_at - at
    if gone_at is None:
        result.problems.append("some processes were still there after 20 s")
    trial.after(run, result)
    trial.again(result, cold=cold)
    resumed(trial, result, at, gone_at, cold=cold)
    trial.at_the_end(result)
    return result


def bounds_of(blow: Blow, where: str, twin: Twin) -> dict[str, float]:
    """Return within how many seconds a fault must be found, and all processes be gone."""
    found = FOUND
    if blow.is_stuck:
        found = max(5.0, 5 * twin.step) + LOOKS
        if blow.how == "lock":
            limits = {"meeting": _JOINING, "joined": _DEVICES, "tracing": COMPILE_TIMEOUT}
            found = limits.get(where, found - LOOKS) + LOOKS
    return {"found": found, "gone": found + GONE}


def killed_in_a_second_save(trial: Trial, phase: str) -> Result | None:
    """Kill all while a sealed step is saved again, as at the end of a training run whose last save was just due."""
    return poprun_killed(trial, phase, "--twice")


def resumed(
    trial: Trial, result: Result, at: float, gone_at: float | None, *, cold: bool = False, torn: bool = False
) -> None:
    """Measure when the training went on, and how many steps it made again. Time in which nothing ran is left out.

    A sealed step must not be lost, unless it is `torn`.
    """
    went_on = [mark for mark in trial.marks() if mark.name == "resumed" and mark.time > (gone_at or at)]
    if not went_on:
        result.problems.append("it was not resumed")
        return
    first = min(went_on, key=lambda mark: mark.time)
    result.lost, allowed = lost_before(first, trial.marks(), trial.twin.every)
    sealed = max((mark.step for mark in trial.marks() if mark.name == "sealed" and mark.time < first.time), default=0)
    if int(first.value) < sealed and not torn:
        result.problems.append(f"it was resumed at step {first.value}, though step {sealed} was sealed")
    step = min(
        (mark for mark in trial.marks() if mark.time > first.time and mark.name in ("step", "weights")),
        key=lambda mark: mark.time,
        default=None,
    )
    again = next((run for run in trial.started[1:] if run.launched < first.time and first in run.marks), None)
    idle = 0.0 if again is None or gone_at is None else again.launched - gone_at
    result.resumed = None if step is None else step.time - at - idle
    start = trial.twin.first_step_cold if cold else trial.twin.first_step
    result.bounds |= {"lost": allowed, "resumed": result.bounds.get("gone", 0.0) + 2 * start}


def _strike(run: Started, blow: Blow, moment: Moment, victim: int) -> float | None:
    """Make the fault, and return when; None if there is nothing left to strike."""
    if not isinstance(blow.how, signal.Signals):
        mark = run.wait_for(lambda mark: mark.name == "fault")
        return None if mark is None else mark.time
    pid = run.wait_for_pid(victim)
    if pid is None or not moment.wait_in(run, victim):
        return None
    at = time.monotonic()
    try:
        os.kill(pid, blow.how)
    except ProcessLookupError:
        return None
    return at if pid_was_hit(run, victim) else None


def pid_was_hit(run: Started, victim: int) -> bool:
    """Return whether a process that was sent a signal had not already exited with status 0."""
    time.sleep(0.3)
    return not any(says(line, rf"instance {victim} exited with status 0,") for line in run.errors)


def _own_fault(how: str, victim: int, moment: Moment, twin: Twin) -> dict[str, Any]:
    """Return the fault that the program makes itself, at the program's mark that is nearest to a moment."""
    start = "meeting" if moment.delay < twin.start / 2 else "joined"
    mark = {"start": start, "compile": "tracing", "step": "running", "save": "saved", "end": "closing"}
    delay = moment.delay if moment.phase in ("step", "save") else min(moment.delay, 0.2)
    return {"how": how, "instance": victim, "mark": mark[moment.phase], "value": moment.step, "delay": delay}


def _mark(run: Started, name: str) -> Mark:
    return next(mark for mark in run.marks if mark.name == name)


def says(line: str, pattern: str) -> bool:
    """Return whether a line is poprun's own and begins with a pattern."""
    return re.search(rf"^poprun: {pattern}", line) is not None


CASES: Final[dict[str, tuple[Callable[[Trial, str], Result | None], tuple[str, ...]]]] = {
    **{name: (functools.partial(struck, blow), PHASES) for name, blow in BLOWS.items()},
    "poprun killed": (poprun_killed, PHASES),
    "killed while a step is saved again": (killed_in_a_second_save, ("save",)),
}
