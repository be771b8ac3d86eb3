"""Train as the flags of `run-sharded-mnist` say, in one mode or both, and print what comes of it."""

import argparse
import contextlib
import sys
import time

import numpy as np
import numpy.typing as npt

from ipu_jax import DynamicScale, Pipeline, popdist
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
from mnist_example.progress import LossLines, progress_bar, say, shows_progress, spinner
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


def train_and_compare(args: argparse.Namespace, trainers: dict[Mode, Trainer], data: MNIST) -> int:
    """Train in each mode, with --compare tell and draw how far the losses are apart, and return the exit status."""
    try:
        with ExecutableCache(args.executable_cache) if args.executable_cache else contextlib.nullcontext() as cache:
            losses = {mode: train(args, mode, trainer, data, cache) for mode, trainer in trainers.items()}
    except DivergedError as error:
        if is_first():
            print(f"run-sharded-mnist: {error}", file=sys.stderr)
        end_together()
        return 1
    traced = CANNOT_WRITE if any(trainer.tracing.has_failed for trainer in trainers.values()) else 0
    if not args.compare or not is_first():
        return traced
    say(comparison.describe(losses["basic"], losses["concurrent"]))
    picture = args.plot or PICTURE
    try:
        with popdist.busy("drawing the losses"):
            comparison.draw(losses["basic"], losses["concurrent"], picture)
    except Exception as error:  # whatever is wrong with the picture, the training was not in vain
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        print(f"run-sharded-mnist: --plot {picture} was not drawn ({reason}): the figures are above", file=sys.stderr)
        return CANNOT_WRITE
    say(f"Picture: {picture}")
    return traced


def train(
    args: argparse.Namespace, mode: Mode, trainer: Trainer, data: MNIST, cache: ExecutableCache | None
) -> _Losses:
    """Train in one mode and print the lines of that run; return the loss of every update."""
    pipeline, batches, network = trainer.pipeline, trainer.batches, network_of(args.model)
    per_epoch = batches.updates_per_epoch
    total = updates_of(args, batches)
    replicas, of_each = (f", {pipeline.replicas} replicas", " on each") if pipeline.replicas > 1 else ("", "")
    say(
        f"{mode} {network.title} on {pipeline.ipus} IPUs{replicas}, {args.pipeline_schedule}; {data.source}: "
        f"{per_epoch} updates an epoch, each of {args.gradient_accumulation_count} micro-batches of "
        f"{args.batch_size}{of_each}"
    )
    shown = shows_progress(args.no_progress)
    state = trainer.init(network.init_params(args.seed), network.init_state())
    if args.explain:
        say(trainer.explain(state))
    with spinner("Compiling") if shown else contextlib.nullcontext():
        seconds = trainer.compile(state)
    found = f"; schedule auto chose {_found_name(pipeline)}" if args.pipeline_schedule == "auto" else ""
    say(f"Compiled in {seconds:.1f} s{found}" + (f"; {cache}" if cache else ""))

    losses: list[_Losses] = []
    lines = LossLines(per_epoch)
    skipped, seconds, accuracy = 0, 0.0, 0.0
    with trainer.feed, trainer.tracing, progress_bar(shown=shown) as progress:
        bar = progress.add_task(mode, total=total, images=batches.images_per_update)

        def on_call(call: Call) -> None:
            nonlocal skipped
            losses.append(call.losses)
            skipped += call.skipped
            lines.add(call)
            progress.update(bar, completed=call.updates)

        for epoch in range(-(-total // per_epoch)):
            updates = min(per_epoch, total - epoch * per_epoch)
            start = time.perf_counter()
            state = trainer.run_epoch(state, epoch, updates=updates, on_call=on_call)
            seconds += time.perf_counter() - start
            lines.end(epoch + updates / per_epoch)
            accuracy = trainer.accuracy(state, data.test_images, data.test_labels)
            say(f"Epoch {epoch + updates / per_epoch:.1f}, Test accuracy: {accuracy:.2%}")
    images = total * batches.images_per_update
    say(f"Test accuracy: {accuracy:.2%} after {images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    if skipped:
        say(f"{skipped} of {total} updates were skipped: their gradients overflowed {args.half}")
    if cache:
        say(f"With evaluation, {cache}")
    return np.concatenate(losses)


def _found_name(pipeline: Pipeline) -> str:
    """Return the name of the schedule that was found."""
    name = pipeline.schedule.name
    return "a table of its own" if name == "auto" else name
