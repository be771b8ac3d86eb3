"""Judge what was seen of the instances: who is stuck, who failed first, who ended its program while others need it.

**Stuck.** What is an instance doing, and for how long may it?

    STARTING, COMPILING   the compile limit
    no beacon yet         the start limit, from when another one waits for it in popdist.init
    STEPPING              max(5 s, 5 x the median step), from the second step on
                          for ever, once all others have ended their programs after these steps: nobody waits for it
    BUSY                  the limit that it gave itself
    WAITING               the limit that it gave itself; it waits for the others
    ENDING                for ever: it waits for the others
    SILENT                for ever: its program may never report a step
    FAILED                5 s: its exception should have ended it
    stopped (state T)     5 s in any phase

Steps wait for each other. While one instance compiles, starts or is busy within its limit, the others are not stuck.
When one is stuck, soon all are. The *culprit* is the instance that the others wait for. It may wait itself, if its
program makes other calls (the counts are explained below):

    instance 0   step 21, its common thing 22       -> it owes nobody anything
    instance 1   waits in its 22nd, an all_reduce   -> it cannot come to step 21: it is the culprit

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

The rules are pure: time is an argument. Nothing here imports jax.
"""

import collections
import dataclasses
import math
import re
import signal
import statistics
from collections.abc import Iterable, Mapping
from typing import Final

from ipu_jax.distributed.launcher.hosts import Beat, ErrorRecord
from ipu_jax.distributed.processes.beacons import Phase, Reading

LEAST: Final = 5.0
"""Seconds without a finished step that are always allowed."""
TIMES: Final = 5
"""How many median step times may pass without a finished step."""
MOMENT: Final = 0.3
"""Seconds after the first failure in which others are considered."""
PORT_TAKEN: Final = "PortTakenError"
"""The exception of an instance 0 that finds its coordinator's port taken."""
PATIENCE: Final = 1.2
"""Seconds of a wait that is not counted, after which an ended instance is taken for the reason."""

_KEPT: Final = 1001
_NO_STEP: Final = "finished no step"
_SAME: Final = " (do all instances make the same number of updates, saves and exchanges?)"
_FOR_OTHERS: Final = (Phase.WAITING, Phase.ENDING)
_PREPARING: Final = (Phase.STARTING, Phase.COMPILING)
_SEEN_LATE: Final = 0.1
_LOST_PEER: Final = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe|gloo|socket closed|heartbeat|coordination"
    r"|unavailable|barrier|deadline.exceeded|peer.* (gone|lost|died|unhealthy)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Stuck:
    """An instance that is stuck.

    Attributes:
        instance: its number.
        doing: what it did, as in "finished no step".
        pid, letter, finished: its process, the state of the process, and the finished steps, if known.
        seconds: how long it did so.
        limit: how long it may do so.
        rule: where the limit comes from.
    """

    instance: int
    pid: int
    letter: str
    finished: int | None
    doing: str
    seconds: float
    limit: float
    rule: str


@dataclasses.dataclass(frozen=True)
class _Late:
    doing: str
    seconds: float
    limit: float
    rule: str
    waits: bool = True  # whether it may be waiting for another instance


@dataclasses.dataclass
class _Watched:
    started_at: float
    pid: int = 0
    letter: str = "?"
    stopped_since: float = math.inf
    progress: Reading | None = None


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

    >>> lost = ErrorRecord(at=10.19, type="XlaRuntimeError", message="Connection closed by peer")
    >>> mistake = ErrorRecord(at=10.0, type="ValueError", message="no")
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, 3, 10.20, mistake)]).instance
    1
    >>> first([failure_of(0, 1, 10.21, lost), failure_of(1, -9, 10.25, None)]).instance
    1
    """
    happened_at = lambda failure: failure.at - (_SEEN_LATE if failure.error is None else 0.0)
    return min(failures, key=lambda failure: (failure.looks_like_a_lost_peer, happened_at(failure)))


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


class Judge:
    """Knows what was seen of the instances of an attempt: who is stuck, who has ended, and how far each has come.

    Args:
        stall: seconds in which a step must finish; None for the rule above; infinite for no limit.
        compiling: seconds that starting and compiling may take.
        starting: seconds that others may wait in popdist.init for an instance without a beacon.

    Attributes:
        progress: the last reading of each instance that writes a beacon, or did so until it exited.
        statuses: the exit status of each instance that has exited; None if it is not known.
    """

    def __init__(self, stall: float | None, compiling: float, starting: float = math.inf):
        self._stall, self._compiling, self._starting = stall, compiling, starting
        self._watched: dict[int, _Watched] = {}
        self._ended_at: dict[int, float] = {}
        self.progress: dict[int, Reading] = {}
        self.statuses: dict[int, int | None] = {}
        self._durations: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._resumed_at = -math.inf
        self._since = -math.inf  # until then, steps had to wait for something else
        self._first_step = 0.0
        self._median: float | None = None  # of the durations; None if there are newer ones

    def started(self, instance: int, now: float) -> None:
        """Begin to watch an instance."""
        self._watched[instance] = _Watched(now)
        self.statuses.pop(instance, None)
        self.progress.pop(instance, None)

    def exited(self, instance: int, status: int | None, now: float) -> None:
        """Record that an instance has exited."""
        self.statuses[instance] = status
        if status == 0:
            self._ended_at.setdefault(instance, now)

    @property
    def _alive(self) -> dict[int, _Watched]:
        return {i: watched for i, watched in self._watched.items() if i not in self.statuses}

    def waited_for_us(self, now: float) -> None:
        """Restart the clocks of steps and phases, since an instance may have waited until we read its output."""
        self._resumed_at = self._since = now

    def resumed(self, now: float) -> None:
        """Restart all clocks, since nobody looked for a while, or the instances had to wait for us."""
        self.waited_for_us(now)
        for watched in self._watched.values():
            if watched.letter == "T":
                watched.stopped_since = now

    def beat(self, beat: Beat, now: float) -> None:
        """Record the state of an instance."""
        watched = self._watched.get(beat.instance)
        if watched is None:
            return
        watched.pid, watched.letter = beat.pid, beat.letter
        watched.stopped_since = min(watched.stopped_since, now) if beat.letter == "T" else math.inf
        if beat.progress is not None:
            self._measure(watched, watched.progress, beat.progress)
            watched.progress = self.progress[beat.instance] = beat.progress
            if beat.progress.phase is Phase.ENDING:
                self._ended_at.setdefault(beat.instance, now)
        if self._excused(watched, now):
            self._since = max(self._since, now)

    def median_step(self) -> float | None:
        """Return the median step time so far, in seconds."""
        if self._median is None and self._durations:
            self._median = statistics.median(self._durations)
        return self._median

    def stuck(self, now: float) -> Stuck | None:
        """Return the stuck instance, or None if all may go on."""
        missing = self._missing(now)
        if missing is not None:
            return missing
        for instance, watched in self._alive.items():
            late = self._late(watched, now)
            if late is not None:
                doing, seconds = late.doing, late.seconds
                if late.waits:
                    instance, doing = self._apart() or (self._culprit(of_steps=doing == _NO_STEP), doing)
                    seconds = self._silence(self._watched[instance], now)
                return self._named(Stuck(instance, 0, "", None, doing, seconds, late.limit, late.rule), instance)
        return None

    def _named(self, stuck: Stuck, instance: int) -> Stuck:
        watched = self._watched[instance]
        finished = watched.progress.finished if watched.progress else None
        return dataclasses.replace(stuck, instance=instance, pid=watched.pid, letter=watched.letter, finished=finished)

    def by_ticks(self, stuck: Stuck, ticks: Mapping[int, tuple[int, ...]]) -> Stuck:
        """Return who is stuck in a step that all have begun: the instance with a task in the lowest tick.

        Of several, it is the one of which no IPU has gone on: an IPU that does has heard from its neighbours.

        Args:
            stuck: who is stuck by the rules without the flight recorder.
            ticks: for each instance with a task, the lowest tick in which it has one, and the highest of its IPUs.
        """
        alive = [each.progress for each in self._alive.values() if each.progress is not None]
        finished = max((each.finished for each in alive), default=0)
        if not ticks or stuck.doing != _NO_STEP or stuck.letter == "T" or any(each.begun <= finished for each in alive):
            return stuck
        return self._named(stuck, min(ticks, key=lambda instance: (ticks[instance], instance != stuck.instance)))

    def _missing(self, now: float) -> Stuck | None:
        """Return an instance that has not arrived in time where the others first meet."""
        arrived = [
            each.progress.phase_at
            for each in self._alive.values()
            if each.progress is not None and each.progress.joint_begun and not each.progress.joint_made
        ]
        absent = {i: each for i, each in self._alive.items() if each.progress is None}
        if not arrived or not absent:
            return None
        waiting = now - max(min(arrived), self._resumed_at)
        if waiting <= self._starting:
            return None
        instance, watched = min(absent.items(), key=lambda item: (item[1].letter != "T", item[0]))
        doing = "has not reached popdist.init, where others have waited"
        return Stuck(instance, watched.pid, watched.letter, None, doing, waiting, self._starting, "--start-timeout")

    def _measure(self, watched: _Watched, before: Reading | None, after: Reading) -> None:
        steps = after.finished - (before.finished if before else 0)
        if steps <= 0:
            return
        if before is None or before.finished == 0:
            self._first_step = max(self._first_step, after.finished_at - watched.started_at)
            if steps > 1:  # several since the last look: all but the first, which may include compilation, are alike
                self._durations.append((after.finished_at - after.first_at) / (steps - 1))
                self._median = None
        # time spent mostly on something else, such as a save, does not measure steps; each may read a batch, though
        elif after.aside - before.aside <= (after.finished_at - before.finished_at) / 2:
            self._durations.append((after.finished_at - before.finished_at) / steps)
            self._median = None

    def _excused(self, watched: _Watched, now: float) -> bool:
        """Return whether others may have to wait for an instance that does something other than a step."""
        progress = watched.progress
        if progress is None or progress.phase not in (*_PREPARING, Phase.BUSY):
            return False
        limit = self._compiling if progress.phase in _PREPARING else progress.limit
        return now - max(progress.phase_at, self._resumed_at) <= limit

    def _is_any_silent(self) -> bool:
        """Return whether an instance has reported nothing so far, although it has a beacon."""
        return any(each.progress is not None and each.progress.phase is Phase.SILENT for each in self._alive.values())

    def _step_limit(self) -> tuple[float, str]:
        if self._stall is not None:
            return self._stall, "--stall-timeout"
        median = self.median_step()
        if median is None:
            return max(LEAST, TIMES * self._first_step), f"the larger of {LEAST:g} s and {TIMES} x the first step"
        return max(LEAST, TIMES * median), f"the larger of {LEAST:g} s and {TIMES} x the median step of {median:.3g} s"

    def _late(self, watched: _Watched, now: float) -> _Late | None:
        progress = watched.progress
        stopped = now - watched.stopped_since
        if stopped > LEAST and self._stall != math.inf:
            return _Late("was stopped", stopped, LEAST, "a process that is stopped does nothing", waits=False)
        if progress is None:
            return None
        in_phase = now - max(progress.phase_at, self._resumed_at)
        if progress.phase in _PREPARING and in_phase > self._compiling:
            doing = "has not started" if progress.phase is Phase.STARTING else "has not compiled"
            return _Late(doing, in_phase, self._compiling, "--compile-timeout")
        if progress.phase in (Phase.BUSY, Phase.WAITING) and in_phase > progress.limit:
            what = f" {progress.label}" if progress.label else ""
            if progress.phase is Phase.WAITING and not progress.begun and self._is_any_silent():
                doing = f"has not reached its first step; another one waited{what}"
                return _Late(doing, in_phase, progress.limit, "of who waits")
            doing = f"was busy{what and ' with'}{what}" if progress.phase is Phase.BUSY else f"waited{what}"
            return _Late(doing, in_phase, progress.limit, "its own limit", waits=False)
        if progress.phase is Phase.FAILED and in_phase > LEAST:
            return _Late("has not exited", in_phase, LEAST, "an exception ends a program", waits=False)
        if progress.phase is Phase.STEPPING and not self._is_last(watched):
            limit, rule = self._step_limit()
            silence = self._silence(watched, now)
            if silence > limit:
                return _Late(_NO_STEP, silence, limit, rule)
        return None

    def _is_last(self, watched: _Watched) -> bool:
        """Return whether all others have ended their programs, and finished all steps that this one has begun."""
        begun = watched.progress.begun if watched.progress is not None else 0
        others = [(i in self.statuses, each.progress) for i, each in self._watched.items() if each is not watched]
        return bool(others) and all(
            other is not None and other.finished >= begun and (has_exited or other.phase is Phase.ENDING)
            for has_exited, other in others
        )

    def _silence(self, watched: _Watched, now: float) -> float:
        progress = watched.progress
        if progress is None:
            return now - max(watched.started_at, self._since)
        return now - max(progress.finished_at, progress.phase_at, self._since)

    def _apart(self) -> tuple[int, str] | None:
        """Return the instance whose program makes another call than the others, and what it does; None if none does.

        Some instances wait for all. The others are in a step that these have not begun, and owe them nothing: they have
        made or begun whatever is common before that step. If fewer instances are in the step than wait, they are named.
        """
        alive = {i: each.progress for i, each in self._alive.items() if each.progress is not None}
        waiting = {i: each for i, each in alive.items() if each.phase is Phase.WAITING}
        others = {i: each for i, each in alive.items() if each.phase not in _FOR_OTHERS}
        if not waiting or not others or any(each.letter == "T" for each in self._alive.values()):
            return None
        step = 1 + max(each.begun for each in waiting.values())
        made = max(each.joint_made for each in waiting.values())
        if any(each.begun < step or each.joint_begun <= made for each in others.values()):
            return None
        wait = _doing(waiting[min(waiting)])
        if len(others) < len(waiting):
            return min(others), f"is in step {step}, which no other instance has begun, while another one {wait}{_SAME}"
        # whoever has made more exchanges has begun this one
        exchanges = [each.joint_begun - each.begun for each in (*waiting.values(), *others.values())]
        if len(waiting) == 1 and exchanges[0] > max(exchanges[1:]):
            wait += ", which no other instance has begun,"
        return min(waiting), f"{wait} while the others wait for it in step {step}{_SAME}"

    def _culprit(self, of_steps: bool) -> int:
        """Return the instance that the others wait for: stopped, else with fewest steps begun, else longest silent.

        Instances that wait for the others, also at the end of their programs, are excluded. The others may wait for an
        instance without a beacon while they prepare, but not in a step: steps have finished without it.
        """

        def rank(instance: int) -> tuple[bool, int, float]:
            watched = self._watched[instance]
            progress = watched.progress
            if progress is None:
                return (watched.letter != "T", 0, watched.started_at)
            return (watched.letter != "T", progress.begun, max(progress.finished_at, progress.phase_at))

        candidates = [
            i
            for i, watched in self._alive.items()
            if watched.letter == "T"
            or (not of_steps if watched.progress is None else watched.progress.phase not in _FOR_OTHERS)
        ]
        return min(candidates, key=rank)

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
