"""Judge what has ended an attempt, and say it: who failed first, or who ended its program while others need it.

**Failures.** When an instance dies, its peers lose their connections to it and fail as well, some before the launcher
has seen the first failure. So all failures within a moment are ordered by the time at which they happened:

    instance 1   ValueError at 10.00 s, exit seen at 10.20 s      <- first
    instance 0   connection lost at 10.19 s, exit seen at 10.21 s

An exception records its own time. Any other death counts from when it was seen, a little late. A failure that looks
like a lost connection is blamed only if there is no other.

**Early ends.** All instances make the same steps and meetings, in the same order. A beacon counts the steps and
meetings that need all instances: how many were begun, and for how many this instance has done its part.

    instance 0   made 5, has ended          -> nobody can make the sixth:
    instance 1   made 5, has begun 6        -> instance 0 has ended early

The counts prove it, so no time has to pass. An instance that prints more, or writes a last file, after the others have
ended has begun no more than they have. A wait that is not counted, such as for the devices of all instances or for the
others' parts of a save, must have lasted a moment since the other instance ended. So must the wait for an instance that
has exited without waiting for the others, as by `os._exit`: nobody can leave the barrier at the end without it.

The rules are pure: time is an argument. `stall.py` judges who is stuck. Nothing here imports jax.
"""

import dataclasses
import math
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Final

from ipu_jax.distributed.launcher.events import Beat, ErrorRecord
from ipu_jax.distributed.launcher.stall import Stuck
from ipu_jax.distributed.processes.beacons import Phase, Reading

MOMENT: Final = 0.3
"""Seconds after the first failure in which others are considered."""
PORT_TAKEN: Final = "PortTakenError"
"""The exception of an instance 0 that finds its coordinator's port taken."""
PATIENCE: Final = 1.2
"""Seconds of a wait that is not counted, after which an ended instance is taken for the reason."""

_SEEN_LATE: Final = 0.1
_MOST_FRAMES: Final = 40
_LOST_PEER: Final = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|gloo|socket closed|heartbeat|coordination"
    r"|unavailable|barrier|deadline.exceeded|peer.* (gone|lost|died|unhealthy)",
    re.IGNORECASE,
)
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a driver, and cannot be interrupted",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, but not collected by its parent",
    "X": "dead",
    "I": "idle",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describe the failure of an instance.

    Attributes:
        instance: its number.
        at: when it failed.
        status: its exit status, or the negative number of the signal that ended it; None if it is still alive.
        error: its exception, if it has recorded one.
    """

    instance: int
    at: float
    status: int | None
    error: ErrorRecord | None = None

    @property
    def looks_like_a_lost_peer(self) -> bool:
        """Return whether the failure of another instance may be the cause."""
        if self.error is not None:
            return _LOST_PEER.search(f"{self.error.type}: {self.error.message}") is not None
        return self.status == -signal.SIGABRT  # jax's coordination service ends instances this way if it loses one

    @property
    def exit_status(self) -> int:
        """Return the launcher's exit status: as in a shell, 128 + the number of a signal."""
        if self.status is None or self.status == 0:
            return 1
        return self.status if self.status > 0 else 128 - self.status


def failure_of(instance: int, status: int | None, seen_at: float, error: ErrorRecord | None) -> Failure:
    """Return the failure of an instance after its exit, or its exception, was seen.

    The exception is ignored if a signal ended the instance: then the signal is the failure.
    """
    if error is not None and (status is None or status > 0):
        return Failure(instance, min(error.at, seen_at), status, error)
    return Failure(instance, seen_at, status)


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    >>> lost = ErrorRecord(at=10.19, type="XlaRuntimeError", message="Connection closed by peer", finished=7)
    >>> mistake = ErrorRecord(at=10.0, type="ValueError", message="no", finished=7)
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, 3, 10.20, mistake)]).instance
    1
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, -9, 10.25, None)]).instance
    1
    """

    def rank(failure: Failure) -> tuple[bool, float]:
        late = _SEEN_LATE if failure.error is None else 0.0
        return (failure.looks_like_a_lost_peer, failure.at - late)

    return min(failures, key=rank)


@dataclasses.dataclass(frozen=True)
class EarlyEnd:
    """An instance that has ended its program, and another instance that needs it.

    Attributes:
        instance, other: their numbers.
        status: the exit status of `instance`; None if it still waits for the others.
        finished: the steps that `instance` had finished; None if it has reported none.
        doing: what `other` is doing.
    """

    instance: int
    other: int
    status: int | None
    finished: int | None
    doing: str


class Ends:
    """Knows which instances of an attempt have ended their programs, and how far each has come.

    Attributes:
        progress: the last reading of each instance that writes a beacon.
        statuses: the exit status of each instance that has exited.
    """

    def __init__(self) -> None:
        self.progress: dict[int, Reading] = {}
        self._ended_at: dict[int, float] = {}
        self.statuses: dict[int, int] = {}

    def beat(self, beat: Beat, now: float) -> None:
        """Record the state of an instance."""
        if beat.progress is not None:
            self.progress[beat.instance] = beat.progress
            if beat.progress.phase is Phase.ENDING:
                self._ended_at.setdefault(beat.instance, now)

    def exited(self, instance: int, status: int, now: float) -> None:
        """Record that an instance has exited."""
        self.statuses[instance] = status
        if status == 0:
            self._ended_at.setdefault(instance, now)

    def early(self, now: float) -> EarlyEnd | None:
        """Return the ended instance that a running one needs in vain; None if there is none."""
        running = sorted(self.progress.keys() - self.statuses.keys())
        return next(filter(None, (self.needed_by(other, now) for other in running)), None)

    def needed_by(self, other: int, now: float) -> EarlyEnd | None:
        """Return the ended instance that `other` waits for, or waited for when it failed; None if there is none."""
        progress = self.progress.get(other)
        if progress is None:
            return None
        for instance in sorted(self._ended_at, key=lambda i: (self._made(i), self._ended_at[i])):
            if instance != other and self._is_needed(instance, progress, now):
                before = self.progress.get(instance)
                finished = None if before is None else before.finished
                return EarlyEnd(instance, other, self.statuses.get(instance), finished, _doing(progress))
        return None

    def left(self, other: int) -> EarlyEnd | None:
        """Return an instance that exited with 0, without waiting, before `other` lost a connection."""
        for instance, status in sorted(self.statuses.items(), key=lambda item: self._ended_at.get(item[0], math.inf)):
            progress = self.progress.get(instance)
            if status == 0 and instance != other and progress is not None and progress.phase is not Phase.ENDING:
                return EarlyEnd(instance, other, 0, progress.finished, "needs it")
        return None

    def _made(self, instance: int) -> int:
        progress = self.progress.get(instance)
        return 0 if progress is None else progress.joint_made

    def _is_needed(self, instance: int, other: Reading, now: float) -> bool:
        made, waited = self._made(instance), now - max(other.phase_at, self._ended_at[instance])
        if other.phase is Phase.ENDING:
            has_left = made > 0 and instance in self.statuses and self.progress[instance].phase is not Phase.ENDING
            return has_left and waited > PATIENCE
        if other.joint_made and not made:
            return False  # it has met the others in a process that has no beacon
        if other.joint_begun > made:
            return True
        return other.phase is Phase.WAITING and other.joint_begun == other.joint_made and waited > PATIENCE


def _doing(progress: Reading) -> str:
    if progress.phase is Phase.WAITING:
        return f"waits {progress.label}"
    if progress.phase is Phase.BUSY:
        return f"is busy with {progress.label}"
    if progress.phase is Phase.COMPILING:
        return f"compiles step {progress.begun}"
    if progress.phase is Phase.ENDING:
        return "waits for it at the end of the program"
    return f"trains, in step {progress.begun}"


def about_early_end(early: EarlyEnd, host: str, pid: int) -> list[str]:
    """Return the lines that describe an early end.

    >>> end = EarlyEnd(0, 1, None, 5, "trains, in step 6")
    >>> print(*about_early_end(end, "here", 77), sep="\\n")  # doctest: +ELLIPSIS
    instance 0 (host here, pid 77) ended its program after step 5, while instance 1 still trains, in step 6
      all instances must make the same steps and calls: look for what ends one of them early, such as ...
    """
    how = f"after step {early.finished}" if early.finished else "before its first step had finished"
    if early.status is not None:
        how = f"with status {early.status} {how}"
    return [
        f"instance {early.instance} (host {host}, pid {pid}) ended its program {how}, "
        f"while instance {early.other} still {early.doing}",
        "  all instances must make the same steps and calls: look for what ends one of them early, such as fewer "
        "examples on its host, or os._exit",
    ]


def state_of(letter: str) -> str:
    """Return a process's state letter and its meaning.

    >>> state_of("T"), state_of("?")
    ('T (stopped)', 'unknown')
    """
    return f"{letter} ({_STATES[letter]})" if letter in _STATES else "unknown"


def signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> signal_name(9), signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def step_of(finished: int | None) -> str:
    """Return the progress of an instance in words.

    >>> step_of(None), step_of(0), step_of(12)
    ('no step is known', 'no step finished', 'last finished step 12')
    """
    if finished is None:
        return "no step is known"
    return f"last finished step {finished}" if finished else "no step finished"


def about_failure(failed: Failure, host: str, pid: int, finished: int | None, lines: Sequence[str]) -> list[str]:
    """Return the lines that describe a failure.

    Args:
        failed: the failure.
        host, pid: the host and the process of the instance.
        finished: the steps that the instance had finished, if known.
        lines: the last lines of its output that the user may not have seen.
    """
    where = f"instance {failed.instance} (host {host}, pid {pid}, {step_of(finished)})"
    status = failed.status
    if failed.error is not None:
        message = failed.error.message.strip().split("\n")[0]
        what = f"failed with {failed.error.type}{': ' if message else ''}{message}"
        if status:
            what += f" (exit status {status})"
    elif status is not None and status < 0:
        what = f"was ended by {signal_name(-status)}"
    elif status is not None and status > 128 and signal_name(status - 128).startswith("SIG"):
        what = f"exited with status {status}, as a shell does whose command {signal_name(status - 128)} has ended"
    else:
        what = f"exited with status {status}"
    return [f"{where} {what}", *quoted("its last lines", lines)]


def about_stall(stuck: Stuck, host: str, stacks: str, lines: Sequence[str]) -> list[str]:
    """Return the lines that describe a stuck instance.

    Args:
        stuck: the stuck instance, and the rule that it broke.
        host: its host.
        stacks: its Python stacks; empty if they are unknown.
        lines: the last lines of its output.
    """
    letter = stuck.letter
    where = f"instance {stuck.instance} (host {host}, pid {stuck.pid}, {step_of(stuck.finished)})"
    how_long = f"for {stuck.seconds:.1f} s; the limit is {stuck.limit:.3g} s ({stuck.rule})"
    said = [f"{where} is stuck: it {stuck.doing} {how_long}", f"  the process is in state {state_of(letter)}"]
    if letter == "T":
        said[-1] += ": something has sent it SIGSTOP or SIGTSTP; SIGCONT would continue it"
    frames = stacks.strip().splitlines()
    if frames:
        said += quoted("its Python stacks", frames[:_MOST_FRAMES])
    else:
        why = "a stopped process cannot write them" if letter == "T" else "its program does not write them"
        said.append(f"  its Python stacks are not known: {why}")
    return [*said, *quoted("its last lines", lines)]


def quoted(title: str, lines: Sequence[str]) -> list[str]:
    """Return quoted lines under a title; nothing if there are none."""
    return [f"  {title}:", *(f"    {line}" for line in lines)] if lines else []
