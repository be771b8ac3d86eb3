"""Write one checkpoint after the other in the background: arrays, checksums and seal. Then remove old checkpoints.

main thread      begin: copies arrays to the host        the next steps                wait: raises what went wrong
background              arrays -> checksums -> seal -> rename -> old checkpoints removed

No sealed checkpoint is touched before its successor is sealed.
"""

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Final

import jax

from ipu_jax.base.annotations import Json, Value
from ipu_jax.distributed.agreeing import Meetings
from ipu_jax.distributed.board import on_a_daemon
from ipu_jax.training.checkpoints import _folder, _seal
from ipu_jax.training.checkpoints._store import Store
from ipu_jax.training.checkpoints.errors import errno_of

PATIENCE: Final = 1.0
"""Seconds that threads of orbax may still write after another thread has failed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A checkpoint to write.

    Attributes:
        path: its path.
        step: its number of updates.
        size: its bytes.
        content: the content of its seal.
    """

    path: Path
    step: int
    size: int
    content: dict[str, Json]


class Writer:
    """Writes checkpoints, one at a time.

    Args:
        store: writes the arrays.
        meetings: where the instances meet, and report failures.
        keep: how many checkpoints to keep.
        seconds: how long to wait for the checksums of other instances.

    Attributes:
        job: the checkpoint that is being written, or was written last.
        last: the checkpoint that was sealed last.
        not_removed: old checkpoints that were not removed, with the reasons. Set on instance 0 only.
    """

    def __init__(self, store: Store, meetings: Meetings, *, keep: int, seconds: float):
        self._store, self._meetings, self._keep, self._seconds = store, meetings, keep, seconds
        self._written: concurrent.futures.Future[None] | None = None
        self.job: Job | None = None
        self.last: Job | None = None
        self.not_removed: list[tuple[Path, Exception]] = []
        self._is_whole: dict[Path, bool] = {}
        self._number = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._written is not None and not self._written.done()

    @property
    def waits_for_others(self) -> bool:
        """Return whether this instance has written its part, and another instance has not."""
        return self.is_busy and self._meetings.is_waiting

    def wait(self, seconds: float) -> None:
        """Wait until nothing is being written, for at most `seconds`."""
        if self._written is not None:
            concurrent.futures.wait([self._written], seconds)

    def begin(self, job: Job, arrays: dict[str, Value]) -> None:
        """Begin to write. Since the previous checkpoint, `take_error` must have returned None."""
        assert not self.is_busy, "one checkpoint at a time: orbax's own thread is waited for by ours"
        self.job = job
        self._meetings.begin()
        try:
            self._store.begin(_folder.unsealed(job.path), arrays)
        except BaseException as error:
            self._meetings.fail(error, errno_of(error))
            raise
        self._written = on_a_daemon(lambda: self._finish(job), "checkpoint")

    def take_error(self) -> BaseException | None:
        """Wait until nothing is being written; return the error since the last call, or None."""
        written, self._written = self._written, None
        return None if written is None else written.exception()

    def _finish(self, job: Job) -> None:
        try:
            self._store.wait(self._meetings.check)
            own, count, folder = jax.process_index(), jax.process_count(), _folder.unsealed(job.path)
            _seal.write_checksums(folder, own, count)
            self._meetings.meet("checksums", self._seconds)
            if own == 0:
                # a checkpoint that is temporarily unreadable also has a number
                self._number = max(self._number + 1, _folder.next_number(job.path.parent))
                content = {**job.content, "number": self._number}
                _seal.write_seal(folder, content, count, seconds=self._seconds)
                _folder.publish(job.path)
            self._meetings.meet("sealed", self._seconds)
            self.last = job
            if own == 0:
                self._is_whole[job.path] = True
                self.not_removed = _folder.remove_all_but(job.path, self._keep, self._is_whole)
        except BaseException as error:
            self._meetings.fail(error, errno_of(error))
            if jax.process_count() == 1:  # otherwise others may still be writing there
                _folder.settle(job.path.parent, PATIENCE)
            raise
