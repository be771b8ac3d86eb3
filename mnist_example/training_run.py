"""Train as the flags of `run-sharded-mnist` say, in one mode or both, and print what comes of it."""

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ipu_jax import CheckpointError, DynamicScale, Pipeline, TrainState, popdist
from ipu_jax.tools.process import CANNOT_WRITE
from mnist_example import comparison
from mnist_example.batches import Batches
from mnist_example.data import MNIST
from mnist_example.executable_cache import ExecutableCache
from mnist_example.flag_checks import feed_options, ipus_of, updates_of
from mnist_example.flags import PICTURE
from mnist_example.instances import end_together, is_first
from mnist_example.layouts import Mode
from mnist_example.network import network_of
from mnist_example.places import reason_of
from mnist_example.progress import LossLines, progress_bar, say, shows_progress, spinner
from mnist_example.recording import RunRecord
from mnist_example.saving import ResumeError, Saver
from mnist_example.schedule_pictures import SchedulePictures
from mnist_example.tracing import tracings_of
from mnist_example.train import Call, DivergedError, Trainer

_Losses = npt.NDArray[np.floating]


def make_trainers(args: argparse.Namespace, batches: Batches) -> dict[Mode, Trainer]:
    """Return a trainer for each mode. Nothing is compiled yet.

    Raises:
        ValueError: flags that do not go together.
    """
    tracings = tracings_of(args, batches, list(ipus_of(args)), say)
    return {
        mode: Trainer(
            _make_pipeline(args, mode, count),
            batches,
            learning_rate=args.learning_rate,
            optimizer=args.optimizer,
            shard_optimizer=args.shard_optimizer,
            precision=args.precision,
            half=args.half or "bfloat16",
            loss_scale=DynamicScale() if args.half == "float16" else 1.0,
            on_nonfinite=args.on_nonfinite,
            **feed_options(args, batches),
            tracing=tracings[mode],
        )
        for mode, count in ipus_of(args).items()
    }


def _make_pipeline(args: argparse.Namespace, mode: Mode, ipus: int) -> Pipeline:
    return network_of(args.model).make_pipeline(
        mode,
        ipus=ipus,
        replicas=args.replicas,
        gradient_accumulation=args.gradient_accumulation_count,
        schedule=args.pipeline_schedule,
        reduction=args.reduction,
    )


def train_and_compare(args: argparse.Namespace, trainers: dict[Mode, Trainer], data: MNIST, record: RunRecord) -> int:
    """Train in each mode, with --compare tell and draw how far the losses are apart, and return the exit status."""
    with record.kept():
        status = _train_and_compare(args, trainers, data, record)
    return status or record.status


def _train_and_compare(args: argparse.Namespace, trainers: dict[Mode, Trainer], data: MNIST, record: RunRecord) -> int:
    pictures = SchedulePictures(args)
    try:
        with ExecutableCache(args.executable_cache) if args.executable_cache else contextlib.nullcontext() as cache:
            runs = [Run(args, mode, trainer, data, cache, pictures, record) for mode, trainer in trainers.items()]
            losses = {run.mode: train(run) for run in runs}
    except (DivergedError, ResumeError, CheckpointError) as error:
        record.failed(error)
        if is_first():
            print(f"run-sharded-mnist: {error}", file=sys.stderr)
        end_together()
        return 1 if isinstance(error, DivergedError) else 2 if isinstance(error, ResumeError) else CANNOT_WRITE
    ended = pictures.status or (CANNOT_WRITE if any(each.tracing.has_failed for each in trainers.values()) else 0)
    if not args.compare or not is_first():
        return ended
    say(comparison.describe(losses["basic"], losses["concurrent"]))
    picture = args.plot or PICTURE
    try:
        with popdist.busy("drawing the losses"):
            comparison.draw(losses["basic"], losses["concurrent"], picture)
    except Exception as error:  # whatever is wrong with the picture, the training was not in vain
        print(
            f"run-sharded-mnist: --plot {picture} was not drawn ({reason_of(error)}): the figures are above",
            file=sys.stderr,
        )
        return CANNOT_WRITE
    say(f"Picture: {picture}")
    return ended


@dataclasses.dataclass(frozen=True)
class Run:
    """A training in one mode, and who is told of it."""

    args: argparse.Namespace
    mode: Mode
    trainer: Trainer
    data: MNIST
    cache: ExecutableCache | None
    pictures: SchedulePictures
    record: RunRecord


def train(run: Run) -> _Losses:
    """Train in one mode and print the lines of that run; return the loss of every update."""
    args, trainer, cache, record = run.args, run.trainer, run.cache, run.record
    pipeline, batches, network = trainer.pipeline, trainer.batches, network_of(args.model)
    per_epoch = batches.updates_per_epoch
    total = updates_of(args, batches)
    replicas, of_each = (f", {pipeline.replicas} replicas", " on each") if pipeline.replicas > 1 else ("", "")
    ipus = f"{pipeline.ipus} IPU{'s' * (pipeline.ipus > 1)}"
    say(
        f"{run.mode} {network.title} on {ipus}{replicas}, {args.pipeline_schedule}; {run.data.source}: "
        f"{per_epoch} updates per epoch, each of {args.gradient_accumulation_count} micro-batches of "
        f"{args.batch_size}{of_each}"
    )
    shown = shows_progress(args.no_progress)
    lines = LossLines(per_epoch)
    saver = Saver(args, trainer, lines, record) if args.checkpoint_dir else None
    with saver.running() if saver else contextlib.nullcontext():
        state = trainer.init(network.init_params(args.seed), network.init_state())
        record.start(run.mode, trainer, state, total)
        if saver:
            state = saver.restore(state)
        if args.explain:
            say(trainer.explain(state))
        done = saver.done if saver else 0
        if done < total:
            with spinner("Compiling") if shown else contextlib.nullcontext():
                seconds = trainer.compile(state)
            record.compiled(seconds)
            found = f"; schedule auto chose {_found_name(pipeline)}" if args.pipeline_schedule == "auto" else ""
            say(f"Compiled in {seconds:.1f} s{found}" + (f"; {cache}" if cache else ""))
        if done < total or args.pipeline_schedule != "auto":
            run.pictures.draw(run.mode, pipeline.schedule)  # under "auto" it is known only now
        with trainer.feed, trainer.tracing, progress_bar(shown=shown) as progress:
            bar = progress.add_task(run.mode, total=total, completed=done, images=batches.images_per_update)
            move_bar = functools.partial(progress.update, bar)
            result = _train_on(run, state, range(done, total), lines, saver, move_bar)
    if saver and saver.is_stopped:
        say(saver.describe_stop())
        record.stopped(saver.describe_stop())
        return result.losses
    _say_result(run, result, done, total)
    return result.losses


@dataclasses.dataclass
class _Result:
    """The loss of every update that was tried, float32 (updates,); how many were skipped and why, and the rest."""

    losses: _Losses
    skipped: int
    nonfinite: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0


def _train_on(
    run: Run,
    state: TrainState,
    updates: range,
    lines: LossLines,
    saver: Saver | None,
    move_bar: Callable[..., None],
) -> _Result:
    """Make these updates, with the accuracy after each epoch."""
    trainer, data, record = run.trainer, run.data, run.record
    per_epoch = trainer.batches.updates_per_epoch
    losses: list[_Losses] = [np.zeros(0, np.float32)]
    result = _Result(losses[0], saver.skipped if saver else 0)

    def on_call(call: Call) -> None:
        losses.append(call.losses)
        result.skipped += call.skipped
        if saver:
            saver.skipped = result.skipped
        result.nonfinite += len(call.nonfinite)
        for text in call.nonfinite:
            say(f"Skipped {text}")
        lines.add(call)
        record.call(call)
        move_bar(completed=call.updates)

    after_call = saver.after_call if saver else None
    for epoch in range(updates.start // per_epoch, -(-updates.stop // per_epoch) if updates else 0):
        first, last = max(0, updates.start - epoch * per_epoch), min(per_epoch, updates.stop - epoch * per_epoch)
        begun = time.perf_counter()
        state = trainer.run_epoch(state, epoch, updates=last, start=first, on_call=on_call, after_call=after_call)
        result.seconds += time.perf_counter() - begun
        if saver and saver.is_stopped:
            break
        if saver and epoch * per_epoch + last == updates.stop:
            saver.save(state)  # before the last line is printed: a longer training would not print it
        lines.end(epoch + last / per_epoch)
        result.accuracy = trainer.accuracy(state, data.test_images, data.test_labels)
        say(f"Epoch {epoch + last / per_epoch:.1f}, Test accuracy: {result.accuracy:.2%}")
        record.accuracy(epoch * per_epoch + last, epoch + last / per_epoch, result.accuracy)
    if not updates:
        result.accuracy = trainer.accuracy(state, data.test_images, data.test_labels)
    result.losses = np.concatenate(losses)
    return result


def _say_result(run: Run, result: _Result, done: int, total: int) -> None:
    """Print what came of a training of `total` updates, of which `done` were made before it was resumed."""
    images, new = (each * run.trainer.batches.images_per_update for each in (max(done, total), len(result.losses)))
    if new:
        of_which = f", {new:,} of them" if done else ""
        speed = f"{of_which} in {result.seconds:.1f} s, {new / result.seconds:,.0f} images/s"
    else:
        speed = f", as {done:,} updates were made before"
    say(f"Test accuracy: {result.accuracy:.2%} after {images:,} images{speed}")
    if result.skipped:
        say(f"{result.skipped} of {total} updates were skipped: their gradients overflowed {run.args.half}")
    if result.nonfinite:
        say(f"{result.nonfinite} of {len(result.losses)} updates were skipped: they were not finite")
    if run.cache:
        say(f"With evaluation, {run.cache}")


def _found_name(pipeline: Pipeline) -> str:
    """Return the name of the schedule that was found."""
    name = pipeline.schedule.name
    return "a table of its own" if name == "auto" else name
