"""Save a training while it goes on, resume it, and stop it at SIGTERM: the flags --checkpoint-dir and --resume.

A checkpoint is saved between two device calls. With it go the losses that no printed line has included yet, so that a
training that was stopped and resumed prints the same lines as one that was not.
"""

import argparse
import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from ipu_jax import CheckpointError, Checkpoints, CheckpointWarning, StopRequest, TrainState
from mnist_example.feeding import position_after
from mnist_example.progress import LossLines, say
from mnist_example.recording import RunRecord
from mnist_example.train import Trainer
from mnist_example.warning_lines import warnings_as_lines

_MINUTES: Final = 10.0


class ResumeError(ValueError):
    """Raised if a training cannot be resumed as the flags say."""


class Saver:
    """Keeps the checkpoints of one training.

    Args:
        args: the flags.
        trainer: the training.
        lines: its printed lines, which are saved and restored with it.
        record: of what happens.

    Attributes:
        done: updates that were made so far.
        skipped: how many of them were not made because their gradients overflowed.
        is_stopped: whether SIGTERM has ended the training.

    """

    def __init__(self, args: argparse.Namespace, trainer: Trainer, lines: LossLines, record: RunRecord):
        self.done, self.skipped, self.is_stopped = 0, 0, False
        self._saved = -1
        self._trainer, self._lines, self._record, self._resume = trainer, lines, record, args.resume or "auto"
        given = {name.replace("_", "-"): value for name, value in vars(args).items() if value is not None}
        flags = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in given.items()}
        self._extra = {"learning rate": args.learning_rate, "flags": flags}
        every, minutes = args.checkpoint_every, args.checkpoint_minutes
        if every is None and minutes is None:
            every, minutes = trainer.batches.updates_per_epoch, _MINUTES
        self._checkpoints = Checkpoints(
            args.checkpoint_dir,
            trainer.step,
            keep=args.keep or 3,
            every=every,
            minutes=minutes,
            describes=_description(args, trainer),
            on_save_error=args.on_save_error or "stop",
        )
        self._stop = StopRequest()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Turn SIGTERM into a save, for the time of a `with` block; wait for the last save at its end."""
        with warnings_as_lines(CheckpointWarning), self._stop, self._checkpoints:
            yield

    def restore(self, state: TrainState) -> TrainState:
        """Return the state to go on with, and set the data and the printed lines to go on with it.

        Raises:
            ResumeError: another training saves to the folder; or the checkpoint is of another training, or one that the
                flags ask for cannot be restored.
        """
        try:
            self._checkpoints.lock()
            found = self._checkpoints.restore(state, resume=self._resume)
        except (ValueError, CheckpointError) as error:
            raise ResumeError(f"--checkpoint-dir: {error}") from error
        if found is None:
            return state
        self.done, self.skipped = found.step, found.extra["skipped"]
        self._lines.restore(found.extra["lines"])
        self._trainer.go_to(position_after(self._trainer.batches, self.done))
        onto = "" if found.topology == "same" else ", onto other IPUs or other places of the stages"
        self._record.resumed(found.step, found.path)
        say(f"Resumed from {found.path}, after {self.done:,} updates{onto}")
        before, now = found.extra["learning rate"], self._extra["learning rate"]
        if before != now:
            say(f"The learning rate was {before:g} when it was saved, and is {now:g} now")
        return found.state

    def after_call(self, state: TrainState, updates: int, report: Callable[[], None]) -> bool:
        """Save if it is due, and return whether the training is to stop here.

        Args:
            state: after the last call that was dispatched.
            updates: of that call.
            report: waits for all calls so far, and prints their losses.
        """
        self.done += updates
        is_due, self.is_stopped = self._checkpoints.due(state, updates), self._stop.due()
        if is_due or self.is_stopped:
            report()
            self.save(state)
        return self.is_stopped

    def save(self, state: TrainState) -> None:
        """Save now, unless a save of this state has begun already. All calls have been reported."""
        if self._saved == self.done:
            return
        position = position_after(self._trainer.batches, self.done)
        extra = {**self._extra, "lines": self._lines.state(), "skipped": self.skipped}
        if self._checkpoints.save(state, position, extra=extra, now=True):
            self._saved = self.done
            self._record.saved(self.done, self._checkpoints.folder)

    def describe_stop(self) -> str:
        """Return a line for a training that SIGTERM has stopped, once its last save is sealed."""
        return (
            f"SIGTERM: stopped after {self.done:,} updates, which are saved in {self._checkpoints.folder}; "
            "the same command goes on from there"
        )


def _description(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    """Return what must be the same of two trainings, and what their state does not show."""
    batches = trainer.batches
    crc = zlib.crc32(batches.labels.tobytes(), zlib.crc32(batches.images.tobytes()))
    described = {
        "model": args.model,
        "data": f"{len(batches.images):,} images, CRC-32 {crc:08x}",
        "images per update": batches.images_per_update,
        "seed": args.seed,
        "shuffle": args.shuffle,
        "optimizer": args.optimizer,
        "precision": args.precision + (f" {args.half}" if args.half else ""),
        "reduction": args.reduction,
    }
    if args.reduction == "sum":  # an update grows with their number
        described["micro-batches per update"] = batches.gradient_accumulation * batches.replicas
    return described
