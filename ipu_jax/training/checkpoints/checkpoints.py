"""Save a training run while it runs, and resume it: `Checkpoints`.

state = step.init(params)
with Checkpoints("runs/mnist", step, keep=3, every=100, minutes=10) as checkpoints:
    found = checkpoints.restore(state)                        # None: nothing there yet
    if found:
        state = found.state
    with Feed(data, ..., state=found and found.feed) as feed:
        for batch in feed:
            state, outputs = step(state, batch)
            checkpoints.save(state, feed)                     # does nothing unless a save is due

save     [main thread: a copy on the host] -> [background: arrays, checksums, the seal] -> a checkpoint
restore  the last whole checkpoint; a damaged one is named and skipped. Nothing is written or locked
lock     only one run saves to a folder; any number can read it
"""

import contextlib
import dataclasses
import errno
import math
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax

from ipu_jax.base import facts
from ipu_jax.base.annotations import Json, Value
from ipu_jax.base.checks import check_choice, check_count, in_line
from ipu_jax.base.decorators import public
from ipu_jax.distributed import popdist
from ipu_jax.distributed.agreeing import Meetings
from ipu_jax.training.checkpoints import _all_instances, _description, _folder, _seal
from ipu_jax.training.checkpoints._all_instances import Due
from ipu_jax.training.checkpoints._description import named, size_of
from ipu_jax.training.checkpoints._lock import Lock
from ipu_jax.training.checkpoints._restoring import Restored, Search, candidates_in, read, warn
from ipu_jax.training.checkpoints._store import Store
from ipu_jax.training.checkpoints._writer import PATIENCE, Job, Writer
from ipu_jax.training.checkpoints.errors import CheckpointError, CheckpointWarning, SaveError, errno_of
from ipu_jax.training.data.feed import Feed
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

__all__ = ["CheckpointError", "CheckpointWarning", "Checkpoints", "Restored", "SaveError"]

_LOOK_EVERY: Final = 0.02


@public
class Checkpoints:
    """Saves the states of a training step in a folder, and restores them.

    A checkpoint contains everything needed to resume: weights, optimizer, stages' state, loss scale, random key,
    average and number of updates, the data position, and the user's own data. It is written in the background, and
    is valid once its seal with the checksums of all files is there.

    Across several instances, all of them must make the same calls, and see the same folder.

    The first `due` or `save` takes the folder's lock. `close` and the end of the process free it. A second training in
    the same folder is refused. `restore` needs no lock.

    Args:
        folder: the folder of all checkpoints of one run. It is created if it is missing.
        step: the training step, from `make_train_step`.
        keep: how many checkpoints to keep. An older one is removed when a newer one is sealed, unless it is damaged.
        every: save every this many updates.
        minutes: save every this many minutes, by the clock of instance 0.
        describes: facts about model, optimizer and data that the state does not show, as plain data by names, such as
            `{"data": "mnist", "optimizer": "adamw(1e-3)"}`. A checkpoint with another description is refused.
        on_save_error: if a save fails, "stop" raises an error in the next call that saves or closes, and "continue"
            gives a `CheckpointWarning`. In both cases the last good checkpoint stays.
        timeout: the time limit for a save, and for waiting for other instances, in seconds.

    Attributes:
        folder: as an absolute path.

    Raises:
        ValueError: an argument is invalid.
        ImportError: orbax is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: TrainStep,
        *,
        keep: int = 3,
        every: int | None = None,
        minutes: float | None = None,
        describes: Mapping[str, Json] | None = None,
        on_save_error: str = "stop",
        timeout: float = 300.0,
    ):
        if not isinstance(step, TrainStep):
            raise ValueError(f"step={in_line(step)} is not a training step: make it with make_train_step(...)")
        check_count("keep", keep)
        if not isinstance(describes, Mapping | None):
            raise ValueError(f"describes={describes!r} is not a dict: give plain data by name, as in {{'width': 128}}")
        if every is not None:
            check_count("every", every)
        for name, value, such_as in (("minutes", minutes, 10), ("timeout", timeout, 300)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} is not a positive number: give one such as {such_as}")
        self.folder = _folder.checked_folder(folder)
        self._step, self._timeout, self._long = step, timeout, max(facts.LONG, timeout)
        self._stops = check_choice("on_save_error", on_save_error, ("stop", "continue")) == "stop"
        self._words = _seal.as_plain("describes", dict(describes or {}))
        self._lock = Lock(self.folder)
        self._due = Due(every, minutes)
        self._meetings = meetings = Meetings(timeout)
        self._store = Store(timeout, meetings)
        self._writer = Writer(self._store, meetings, keep=keep, seconds=timeout)
        self._versions = _description.versions()
        self._saved: weakref.ref[TrainState] | None = None
        self._news, self._told = list[str](), set[str]()
        self._has_failed = self._is_locked = self._has_tried_to_lock = False
        self._is_open = True

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, last={self.last})"

    @property
    def last(self) -> int | None:
        """Return the number of updates of the last checkpoint that was sealed in this run, or None."""
        return None if self._writer.last is None else self._writer.last.step

    # restore

    def restore(self, like: TrainState, *, resume: str | os.PathLike[str] = "auto") -> Restored | None:
        """Restore the last whole checkpoint, or return None for a fresh start. Call it before the first save.

        The IPUs, replicas, schedule and places of stages can differ from those that saved. Each instance reads the
        shards of its own devices, or then the rows of leaves that its devices need. Nothing is compiled before the
        checkpoint is known to fit.

        Across several instances it communicates what is wrong with each instance's share of the files.

        Args:
            like: a state of this step, such as the state that `step.init` returned. Its values don't matter.
            resume: "auto" for the last whole checkpoint, or None in a folder without checkpoints; "must" for the last
                whole checkpoint; "never" for None, in a folder without checkpoints; or the path of one checkpoint.

        Raises:
            ValueError: the checkpoint is of another model, optimizer or description; `resume="never"` in a folder
                with checkpoints; or `like` is not a state.
            CheckpointError: all checkpoints are damaged, or one is required and there is none; or this user or this
                version cannot read the folder, or what may be the last checkpoint. Nothing is removed.
        """
        _check_state(like)
        if resume not in ("auto", "must", "never"):
            resume = _folder.checkpoint_at(resume)
        self._due.restart(int(like.step))
        if resume == "never":
            if found := candidates_in(self.folder, self._timeout):
                raise ValueError(
                    f"resume='never', but {self.folder} holds {found[0].path.name}: give another folder, or "
                    "resume='auto'"
                )
            return None
        with facts.during("restoring a checkpoint", self._long):
            here = _description.description_of(self._step, like)
            search = Search(self.folder, here, self._words, self._timeout)
            is_named = resume not in ("auto", "must")
            found = search.at(Path(resume)) if is_named else search.last_whole(must=resume == "must")
            if found is None:
                return None
            restored = read(self._store, found, self._step, like, here)
            self._due.restart(restored.step)
            return restored

    # save

    def lock(self) -> None:
        """Lock the folder for this run before it compiles anything. Otherwise the first `due` or `save` locks it.

        `close` frees the lock, and so does the end of the process. Instance 0 takes it for all.

        It also cleans up after a killed save: a `CheckpointWarning` names what is removed.

        Communicates a number per instance.

        Raises:
            CheckpointError: another run saves to the folder, and the message names it; or the folder cannot be
                created or written to.
            ValueError: the checkpoints are closed.
        """
        self._check_open()
        if self._is_locked:
            return
        # no instance still reads a checkpoint that gets its name now: orbax lets none go on before all have read
        error = _error_on_first("locking the folder of checkpoints", self._take_lock)
        self._has_tried_to_lock = True
        if found := _all_instances.first_error(error, self._timeout):
            if isinstance(found, CheckpointError):
                raise found
            raise CheckpointError(f"{self.folder} cannot be locked: {found}", errno_of(found)) from found
        self._is_locked = True
        self._tell()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the checkpoints are closed: save inside their `with` block")

    def _take_lock(self) -> None:
        if self._writer.last is None and not self._has_failed:
            self.folder.mkdir(parents=True, exist_ok=True)  # later, a missing folder is an error
        self._lock.take()
        removed, stays = _folder.settle(self.folder)
        self._news += [f"{path} was left over from a save that did not end: it is removed" for path in removed]
        self._note_what_stays(stays)

    def due(self, state: TrainState, updates: int | None = None) -> bool:
        """Count updates, and return whether a save is due, for a loop that has something to do before it saves.

        `save` calls it, except with `now=True`. All instances must make the same calls.

        Across several instances, the first call communicates a number per instance, for the lock. Later calls
        communicate nothing while saves succeed, except with `minutes` a number from instance 0 in some calls.

        Args:
            state: the state that the step returned. Only the first call waits for it, unless `restore` was called.
            updates: the updates since the previous call; by default the step's `device_iterations`.

        Raises:
            CheckpointError: the last save failed, under `on_save_error="stop"`; or another run has the lock.
            ValueError: the checkpoints are closed.
        """
        _check_state(state)
        self._check_open()
        if not self._has_tried_to_lock:
            self._lock_or_leave_it_to_the_save()
        if self._due.step is None:
            self._due.restart(int(state.step))
            is_due = False
        else:
            is_due = self._due.after(self._step.options.device_iterations if updates is None else updates)
        if self._meetings.is_time_to_tell():
            self.wait()
        elif jax.process_count() == 1 and not self._writer.is_busy:
            self._report(self._writer.take_error())
            self._note_what_stays(self._writer.not_removed)
            self._tell()
        return is_due

    def _lock_or_leave_it_to_the_save(self) -> None:
        """Refuse a second run; a folder that cannot be written to is reported by the first save."""
        try:
            self.lock()
        except CheckpointError as error:
            if error.errno == errno.EBUSY:
                raise

    def save(
        self, state: TrainState, feed: Feed | Mapping[str, Json] | None = None, *, extra: Json = None, now: bool = False
    ) -> bool:
        """Save the state if a save is due, and return whether it was saved. Call it after each step.

        If no save is due, it counts the step and returns. A save waits for the steps so far, copies the state to the
        host, and returns. Then the next step can reuse the state's buffers. The rest happens in the background.

        If there is a checkpoint of this step, the new one is called `step-50.7`, by the number of the save, and the
        old one is removed when the new one is sealed. If the last checkpoint was made of this
        very state, with the same feed position and extra, it stays, and nothing is written.

        A step counts as `device_iterations` updates; each save reads the real number.

        Communicates nothing; across several instances, a few numbers per save.

        Args:
            state: the state that the step returned.
            feed: the feed, or the result of its `state()`. A resumed feed continues after the last batch it returned.
            extra: plain data of the user, such as flags.
            now: save now, even if no save is due.

        Raises:
            CheckpointError: the previous save failed, or this one does, under `on_save_error="stop"`. The message
                contains the path, the operating system's error and the bytes. Or another run saves to the
                folder.
            ValueError: `extra` or the feed's state is not plain data, or the checkpoints are closed.
            InstancesMissingError: an instance did not join in time.
            NonFiniteLossError: the state is stopped, under `TrainOptions(on_nonfinite=)`.
        """
        _check_state(state)
        if not (now or self.due(state)):
            return False
        self._check_open()
        if not self._is_locked:
            self._lock_or_leave_it_to_the_save()
        self.wait()
        self._step.check(state)  # a stopped state has not learned from all batches before the feed's position
        if not isinstance(feed, Feed | Mapping | None):
            raise ValueError(f"feed is a {type(feed).__name__}: give the Feed, or the result of its state()")
        position = feed.state() if isinstance(feed, Feed) else feed
        # finding shapes traces, too; without this beacon it would say COMPILING until the next step
        with facts.during("waiting for the steps before a save", self._long):
            number = int(state.step)
            arrays = named(state)
            content = {
                "step": number,
                "versions": self._versions,
                "describes": self._words,
                "model": _description.description_of(self._step, state),
                "feed": None if position is None else _seal.as_plain("the feed's state", dict(position)),
                "extra": _seal.as_plain("extra", extra),
            }
            job = Job(_folder.path_for(self.folder, number), number, size_of(arrays), content)
        self._due.restart(number)
        if self._is_saved(state, job):
            return True
        job, error = self._begin(job, arrays)
        self._saved = None if error else weakref.ref(state)
        self._report(error, job)
        return error is None

    def _is_saved(self, state: TrainState, job: Job) -> bool:
        """Return whether the last checkpoint was made of this very state, and still exists. Arrays never change.

        Communicates a number per instance if the last checkpoint has the same step.
        """
        last = self._writer.last
        if last is None or last.step != job.step:
            return False
        is_same = self._saved is not None and self._saved() is state and _seal.is_same(last.content, job.content)
        is_there = jax.process_index() != 0 or _folder.found_at(last.path).seal is not None
        return not _all_instances.anywhere(not (is_same and is_there), self._timeout)

    def _begin(self, job: Job, arrays: dict[str, Value]) -> tuple[Job, BaseException | None]:
        """Begin to write; return the job with its path, and the error of this instance or of another one, or None."""
        name = job.path.name

        def make_room() -> None:
            nonlocal name
            self._take_lock()
            name = _folder.make_room(self.folder, job.step, job.size).name

        if error := self._first_of_all(_error_on_first("making room for a save", make_room)):
            return job, error
        job = dataclasses.replace(job, path=self.folder / _all_instances.of_first(name, self._timeout))
        with facts.during("beginning a save", self._long):
            try:
                self._writer.begin(job, arrays)
            except (OSError, ValueError, RuntimeError) as failed:
                return job, failed
        return job, None

    def wait(self) -> None:
        """Wait until the current save is sealed.

        Raises:
            CheckpointError: the save failed, under `on_save_error="stop"`.
            InstancesMissingError: an instance did not join in time.
        """
        while self._writer.is_busy:
            waits = self._writer.waits_for_others
            # waiting for another instance must not hide that the other one is stuck: poprun has to find it
            doing = "for the others' parts of a save" if waits else "waiting for a save"
            with facts.during(doing, 2 * self._timeout + 60, waiting=waits):
                while self._writer.is_busy and self._writer.waits_for_others == waits:
                    self._writer.wait(_LOOK_EVERY)
        self._report(self._first_of_all(self._writer.take_error()))
        self._note_what_stays(self._writer.not_removed)
        self._tell()

    def _note_what_stays(self, stays: _folder.Failures) -> None:
        self._news += [
            f"{path} is no longer kept, but cannot be removed ({error}): remove it yourself" for path, error in stays
        ]

    def _tell(self) -> None:
        """Warn of each leftover, and of each checkpoint that was not removed, once."""
        news, self._news = dict.fromkeys(self._news), []
        for text in [text for text in news if text not in self._told]:
            self._told.add(text)
            warn(text)

    def close(self) -> None:
        """Wait for the last save, and read it back to verify it. A second call does nothing.

        Raises:
            CheckpointError: the last save failed, or the checkpoint reads back differently.
        """
        if not self._is_open:
            return
        self._is_open = False
        last = None
        try:
            self.wait()
            last = self._writer.last
            if last is not None:
                with facts.during("verifying a checkpoint", self._long):
                    self._verify(last)
        finally:
            self._meetings.close()
            with contextlib.suppress(Exception):  # its writes have ended, and its errors are known
                self._store.close()
            self._lock.release()

    def _verify(self, last: Job) -> None:
        # instance 0 seals it before it comes here
        popdist.barrier("the last checkpoint is sealed", timeout=self._timeout)
        search = Search(self.folder, last.content["model"], self._words, self._timeout)
        if wrong := search.wrong_with(_folder.found_at(last.path)):
            self._report(CheckpointError(f"it was written, but {wrong}"), last)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        if jax.process_count() > 1:  # the other instances won't come
            self._is_open = False
            self._meetings.close()
            self._lock.release()
            failed = self._writer.take_error()
            if failed is not None:
                error.add_note(f"and a save failed: {failed}")
            return
        try:
            self.close()
        except CheckpointError as failed:
            error.add_note(f"and {failed}")

    # what goes wrong

    def _report(self, error: BaseException | None, job: Job | None = None) -> None:
        """Raise or warn about a save that failed."""
        job = job or self._writer.job
        if error is None or job is None:
            return
        if not isinstance(error, Exception):
            raise error
        self._has_failed, number = True, errno_of(error)
        reason = f"[Errno {number}] {os.strerror(number)}" if number is not None else type(error).__name__
        first = " ".join(str(error).split())
        before = self._before(job)
        text = f"saving {job.path} failed, {reason}, of {job.size:,} bytes: {first[:400]}{before and '; '}{before}"
        if self._stops:
            raise SaveError(text, number) from error
        warn(text)

    def _before(self, job: Job) -> str:
        """Return which checkpoint there is before one that failed, in words; "" if that is not known."""
        if self._writer.last is job:  # sealed, and damaged since
            return "restore() finds the one before it"
        if self.last is not None:
            return f"the last good one is of step {self.last}"
        with contextlib.suppress(OSError):
            found = [each for each in _folder.checkpoints_in(self.folder) if each.path != job.path]
            return f"the last one there is {found[0].path.name}" if found else "there is none before it"
        return ""

    def _first_of_all(self, error: BaseException | None) -> BaseException | None:
        """Return this instance's error, or else the error of the first failed instance, and forget all failures.

        All instances have ended or abandoned their writes by now. Leftovers of a failed save are removed, since a full
        disk needs the room.
        """
        found = _all_instances.first_error(error, self._timeout)
        if found is not None:
            self._meetings.forget()
            if jax.process_index() == 0:
                _folder.settle(self.folder, PATIENCE)
        return found


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise ValueError(f"state is a {type(state).__name__}: give the step's state, from step.init(params) or a step")


def _error_on_first(doing: str, work: Callable[[], None]) -> BaseException | None:
    """Call a function on instance 0 only, and return the error of the system or of the folder, or None."""
    if jax.process_index() == 0:
        with facts.during(doing):
            try:
                work()
            except (OSError, CheckpointError) as error:
                return error
    return None
