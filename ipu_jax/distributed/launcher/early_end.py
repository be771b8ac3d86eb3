"""Find an instance that ended its program with status 0 while another one still needs it. The rules are pure.

All instances make the same steps and meetings, in the same order. A beacon counts the steps and meetings that need all
instances: how many were begun, and for how many this instance has done its part.

    instance 0   made 5, has ended          -> nobody can make the sixth:
    instance 1   made 5, has begun 6        -> instance 0 has ended early

The counts prove it, so no time has to pass. An instance that prints more, or writes a last file, after the others have
ended has begun no more than they have. A wait that is not counted, such as for the devices of all instances or for the
others' parts of a save, must have lasted a moment since the other instance ended. So must the wait for an instance that
has exited without waiting for the others, as by `os._exit`: nobody can leave the barrier at the end without it.

Nothing here imports jax.
"""

import dataclasses
import math
from typing import Final

from ipu_jax.distributed.launcher.events import Beat
from ipu_jax.distributed.processes.beacons import Phase, Reading

PATIENCE: Final = 1.2
"""Seconds of a wait that is not counted, after which an ended instance is taken for the reason."""


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
    """Knows which instances of an attempt have ended their programs, and how far each has come."""

    def __init__(self) -> None:
        self._progress: dict[int, Reading] = {}
        self._ended_at: dict[int, float] = {}
        self._statuses: dict[int, int] = {}

    def beat(self, beat: Beat, now: float) -> None:
        """Record the state of an instance."""
        if beat.progress is not None:
            self._progress[beat.instance] = beat.progress
            if beat.progress.phase is Phase.ENDING:
                self._ended_at.setdefault(beat.instance, now)

    def exited(self, instance: int, status: int, now: float) -> None:
        """Record that an instance has exited."""
        self._statuses[instance] = status
        if status == 0:
            self._ended_at.setdefault(instance, now)

    def early(self, now: float) -> EarlyEnd | None:
        """Return the ended instance that a running one needs in vain; None if there is none."""
        for other in sorted(self._progress.keys() - self._statuses.keys()):
            found = self.needed_by(other, now)
            if found is not None:
                return found
        return None

    def needed_by(self, other: int, now: float) -> EarlyEnd | None:
        """Return the ended instance that `other` waits for, or waited for when it failed; None if there is none."""
        progress = self._progress.get(other)
        if progress is None:
            return None
        for instance in sorted(self._ended_at, key=lambda i: (self._made(i), self._ended_at[i])):
            if instance != other and self._is_needed(instance, progress, now):
                before = self._progress.get(instance)
                finished = None if before is None else before.finished
                return EarlyEnd(instance, other, self._statuses.get(instance), finished, _doing(progress))
        return None

    def left(self, other: int) -> EarlyEnd | None:
        """Return an instance that exited with 0, without waiting, before `other` lost a connection."""
        for instance, status in sorted(self._statuses.items(), key=lambda item: self._ended_at.get(item[0], math.inf)):
            progress = self._progress.get(instance)
            if status == 0 and instance != other and progress is not None and progress.phase is not Phase.ENDING:
                return EarlyEnd(instance, other, 0, progress.finished, "needs it")
        return None

    def _made(self, instance: int) -> int:
        progress = self._progress.get(instance)
        return 0 if progress is None else progress.joint_made

    def _is_needed(self, instance: int, other: Reading, now: float) -> bool:
        made, waited = self._made(instance), now - max(other.phase_at, self._ended_at[instance])
        if other.phase is Phase.ENDING:
            has_left = made > 0 and instance in self._statuses and self._progress[instance].phase is not Phase.ENDING
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


def lines_about(early: EarlyEnd, host: str, pid: int) -> list[str]:
    """Return the lines that describe an early end.

    >>> end = EarlyEnd(0, 1, None, 5, "trains, in step 6")
    >>> print(*lines_about(end, "here", 77), sep="\\n")  # doctest: +ELLIPSIS
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
