"""Let all instances agree on when to save, on what failed on any of them, and on which files are damaged."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed import popdist
from ipu_jax.distributed.board import agree, process
from ipu_jax.training.checkpoints import _seal
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError, errno_of

_LONGEST: Final = 500  # characters of an error that are sent to other instances


def anywhere(here: bool, seconds: float) -> bool:
    """Return whether `here` is true on any instance. Communicates a word per instance."""
    return any(agree("a check of checkpoints", bool(here), seconds=seconds))


def first_error(error: BaseException | None, seconds: float) -> BaseException | None:
    """Return this instance's error, or else the error of the first instance that has one, with its number and errno.

    Communicates the text of its error, if there is one, from each instance to all others.
    """
    if process()[1] == 1:
        return error
    own = error and [" ".join(str(error).split())[:_LONGEST], errno_of(error)]
    for instance, told in enumerate(agree("errors of checkpoints", own, seconds=seconds)):
        if told is not None:
            return error or CheckpointError(f"on instance {instance}: {told[0]}", told[1])
    return None


def of_first(value: Json, seconds: float) -> Json:
    """Return the value that instance 0 gives. Communicates it from there to all others."""
    return agree("a choice of instance 0", value if process()[0] == 0 else None, seconds=seconds)[0]


def damage_of(path: Path, files: dict[str, Sequence[int]], seconds: float) -> str:
    """Return what is wrong with the files of a checkpoint, or ""; each instance reads its share of the files.

    Communicates the first damaged file and their number, or an error, from each instance to all others.

    Raises:
        UnreadableError: the operating system cannot read a file, on any instance.
    """
    own, count = process()
    wrong, error = list[str](), None
    try:
        wrong = _seal.check_files(path, files, sorted(files)[own::count])
    except OSError as failed:
        error = failed
    if unreadable := first_error(error, seconds):
        raise UnreadableError(
            f"a file cannot be read ({unreadable}): see that this user can read it", errno_of(unreadable)
        )
    found = agree("damage of checkpoints", [wrong[:1], len(wrong)], seconds=seconds)
    number, first = sum(number for _, number in found), sorted(name for names, _ in found for name in names)
    return first[0] + (f", and so on for {number} files" if number > 1 else "") if first else ""


class Due:
    """Counts updates without waiting for them, and returns whether a save is due.

    Instances have different clocks, so the clock of instance 0 decides. Instance 0 chooses after how many calls to ask
    it again, and all instances ask in the same call. They ask a few times between two saves, not in every step.

    Args:
        every: save after this many updates; None for never.
        minutes: save after this many minutes; None for never.
        clock: returns seconds.

    >>> due = Due(100, None)
    >>> due.restart(0)
    >>> [due.after(40) for _ in range(3)], due.step
    ([False, False, True], 120)
    """

    def __init__(self, every: int | None, minutes: float | None, clock: Callable[[], float] = time.monotonic):
        self._every, self._seconds, self._clock = every, None if minutes is None else 60 * minutes, clock
        self.step: int | None = None
        self._last = self._calls = 0
        self._since, self._asked_at = clock(), 1

    def restart(self, step: int) -> None:
        """Start counting from this step: after a save, or at the first step."""
        self.step, self._last, self._since = step, step, self._clock()
        self._calls, self._asked_at = 0, 1

    def after(self, updates: int) -> bool:
        """Count updates, and return whether a save is due. All instances must make the same calls.

        In some calls it communicates a number from instance 0 to all.
        """
        assert self.step is not None, "nobody knows the step yet: restart() says it"
        self.step += updates
        self._calls += 1
        if self._every is not None and self.step // self._every > self._last // self._every:
            return True
        return self._seconds is not None and self._is_time(self._seconds)

    def _is_time(self, seconds: float) -> bool:
        if self._calls < self._asked_at:
            return False
        passed = self._clock() - self._since
        if popdist.get_num_instances() == 1:
            return passed >= seconds
        wait = 0 if passed >= seconds else max(1, int((seconds - passed) * self._calls / max(passed, 1e-3)))
        wait = popdist.broadcast(min(wait, 10 * self._calls))  # steps after the compilation are faster than the first
        self._asked_at = self._calls + wait
        return wait == 0
