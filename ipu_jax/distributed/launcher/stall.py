"""Decide from beacons which instance is stuck, if any. The rules are pure: time is an argument.

What is an instance doing, and for how long may it?

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
When one is stuck, soon all are. The *culprit* is the instance that the others wait for.

Nothing here imports jax.
"""

import collections
import dataclasses
import math
import statistics
from typing import Final

from ipu_jax.distributed.launcher.events import Beat
from ipu_jax.distributed.processes.beacons import Phase, Reading

LEAST: Final = 5.0
"""Seconds without a finished step that are always allowed."""
TIMES: Final = 5
"""How many median step times may pass without a finished step."""
_KEPT: Final = 1001
_FOR_OTHERS: Final = (Phase.WAITING, Phase.ENDING)
_PREPARING: Final = (Phase.STARTING, Phase.COMPILING)


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
    of_steps: bool = False


@dataclasses.dataclass
class _Watched:
    started_at: float
    pid: int = 0
    letter: str = "?"
    stopped_since: float = math.inf
    progress: Reading | None = None


class Judge:
    """Tracks the state of the instances of an attempt.

    Args:
        stall: seconds in which a step must finish; None for the rule above; infinite for no limit.
        compiling: seconds that starting and compiling may take.
        starting: seconds that others may wait in popdist.init for an instance without a beacon.
    """

    def __init__(self, stall: float | None, compiling: float, starting: float = math.inf):
        self._stall, self._compiling, self._starting = stall, compiling, starting
        self._watched: dict[int, _Watched] = {}
        self._gone: list[Reading | None] = []
        self._durations: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._resumed_at = -math.inf
        self._since = -math.inf  # until then, steps had to wait for something else
        self._first_step = 0.0
        self._median: float | None = None  # of the durations; None if there are newer ones

    def started(self, instance: int, now: float) -> None:
        """Begin to watch an instance."""
        self._watched[instance] = _Watched(now)

    def exited(self, instance: int) -> None:
        """Stop watching an instance."""
        watched = self._watched.pop(instance, None)
        if watched is not None:
            self._gone.append(watched.progress)

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
            watched.progress = beat.progress
        if self._excused(watched, now):
            self._since = max(self._since, now)

    def median_step(self) -> float | None:
        """Return the median step time so far, in seconds."""
        if self._median is None and self._durations:
            self._median = statistics.median(self._durations)
        return self._median

    def verdict(self, now: float) -> Stuck | None:
        """Return the stuck instance, or None if all may go on."""
        missing = self._missing(now)
        if missing is not None:
            return missing
        for instance, watched in self._watched.items():
            late = self._late(watched, now)
            if late is not None:
                if late.waits:
                    instance = self._culprit(of_steps=late.of_steps)
                    watched = self._watched[instance]
                    late = dataclasses.replace(late, seconds=self._silence(watched, now))
                finished = watched.progress.finished if watched.progress else None
                return Stuck(
                    instance, watched.pid, watched.letter, finished, late.doing, late.seconds, late.limit, late.rule
                )
        return None

    def _missing(self, now: float) -> Stuck | None:
        """Return an instance that has not arrived in time where the others first meet."""
        arrived = [
            each.progress.phase_at
            for each in self._watched.values()
            if each.progress is not None and each.progress.joint_begun and not each.progress.joint_made
        ]
        absent = {i: each for i, each in self._watched.items() if each.progress is None}
        if not arrived or not absent:
            return None
        waiting = now - max(min(arrived), self._resumed_at)
        if waiting <= self._starting:
            return None
        instance, watched = min(absent.items(), key=lambda item: (item[1].letter != "T", item[0]))
        doing = "has not come to popdist.init, where others have waited"
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
        if progress is None or progress.phase in (
            Phase.STEPPING,
            Phase.WAITING,
            Phase.ENDING,
            Phase.SILENT,
            Phase.FAILED,
        ):
            return False
        limit = self._compiling if progress.phase in _PREPARING else progress.limit
        return now - max(progress.phase_at, self._resumed_at) <= limit

    def _is_any_silent(self) -> bool:
        """Return whether an instance has reported nothing so far, although it has a beacon."""
        return any(each.progress is not None and each.progress.phase is Phase.SILENT for each in self._watched.values())

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
                doing = f"has not come to its first step; another one waited{what}"
                return _Late(doing, in_phase, progress.limit, "of who waits")
            doing = f"was busy{what and ' with'}{what}" if progress.phase is Phase.BUSY else f"waited{what}"
            return _Late(doing, in_phase, progress.limit, "its own limit", waits=False)
        if progress.phase is Phase.FAILED and in_phase > LEAST:
            return _Late("has not exited", in_phase, LEAST, "an exception ends a program", waits=False)
        if progress.phase is Phase.STEPPING and not self._is_last(watched):
            limit, rule = self._step_limit()
            silence = self._silence(watched, now)
            if silence > limit:
                return _Late("finished no step", silence, limit, rule, of_steps=True)
        return None

    def _is_last(self, watched: _Watched) -> bool:
        """Return whether all others have ended their programs, and finished all steps that this one has begun."""
        begun = watched.progress.begun if watched.progress is not None else 0
        alive = [each.progress for each in self._watched.values() if each is not watched]
        if any(other is None or other.phase is not Phase.ENDING for other in alive):
            return False
        others = [*self._gone, *alive]
        return bool(others) and all(other is not None and other.finished >= begun for other in others)

    def _silence(self, watched: _Watched, now: float) -> float:
        progress = watched.progress
        if progress is None:
            return now - max(watched.started_at, self._since)
        return now - max(progress.finished_at, progress.phase_at, self._since)

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
            for i, watched in self._watched.items()
            if watched.letter == "T"
            or (not of_steps if watched.progress is None else watched.progress.phase not in _FOR_OTHERS)
        ]
        return min(candidates, key=rank)
