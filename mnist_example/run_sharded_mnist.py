"""Train a network on handwritten digits as a pipeline over virtual IPUs: the `run-sharded-mnist` command.

    run-sharded-mnist --pipeline-mode basic
    run-sharded-mnist --pipeline-mode concurrent --ipus 4
    run-sharded-mnist --pipeline-mode basic --model resnet18 --epochs 1
    run-sharded-mnist --pipeline-mode concurrent --replicas 2 --optimizer adamw --shard-optimizer
    run-sharded-mnist --compare --plot losses.png

Exit status: 0 after training, 1 when it diverged, 2 for bad input (before anything is compiled), 130 after Ctrl-C.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ipu_jax import DynamicScale, Pipeline, configure, replicate
from mnist_example.batches import Batches
from mnist_example.comparison import compare
from mnist_example.data import MNIST, load_mnist, synthetic_mnist
from mnist_example.executable_cache import ExecutableCache
from mnist_example.flags import PICTURE, check_flags, feed_options, ipus_of, make_parser, parse, updates_of
from mnist_example.model import Mode
from mnist_example.network import network_of
from mnist_example.train import Call, DivergedError, Trainer

_Losses = npt.NDArray[np.floating]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: the process's own), and return its exit status; bad input exits."""
    parser = make_parser(
        "run-sharded-mnist", "Trains a network on handwritten digits, as a pipeline over virtual IPUs."
    )
    args = parse(parser, argv)
    try:
        with contextlib.ExitStack() as until_the_end:
            try:
                check_flags(args)
                data = load(args)
                trainers = _make_trainers(args, data)
                cache = None
                if args.executable_cache is not None:
                    cache = until_the_end.enter_context(ExecutableCache(args.executable_cache))
            except (ValueError, OSError) as error:
                parser.error(str(error))
            losses = {mode: _train(args, mode, trainer, data, cache) for mode, trainer in trainers.items()}
        if args.compare:
            picture = args.plot or PICTURE
            _say(compare(losses["basic"], losses["concurrent"], picture))
            _say(f"Picture: {picture}")
    except DivergedError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if argv is None:
            # An ordinary exit would wait for the running device call, which may take minutes.
            sys.stdout.flush()
            os._exit(130)
        return 130
    return 0


def load(args: argparse.Namespace) -> MNIST:
    """Return the digits that the flags ask for."""
    return synthetic_mnist(args.seed) if args.synthetic_data else load_mnist(args.data_dir)


def make_batches(args: argparse.Namespace, data: MNIST) -> Batches:
    """Return the training batches that the flags ask for."""
    return Batches(
        data.train_images,
        data.train_labels,
        batch_size=args.batch_size,
        gradient_accumulation=args.gradient_accumulation_count,
        shuffle=args.shuffle,
        seed=args.seed,
        replicas=args.replicas,
    )


def _make_trainers(args: argparse.Namespace, data: MNIST) -> dict[Mode, Trainer]:
    """Return a trainer for each mode. Nothing is compiled yet, but anything wrong with flags or data raises here."""
    ipus = ipus_of(args)
    batches = make_batches(args, data)
    configure(args.replicas * max(ipus.values()))
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
        )
        for mode, count in ipus.items()
    }


def _make_pipeline(args: argparse.Namespace, mode: Mode, ipus: int) -> Pipeline:
    pipeline = network_of(args.model).make_pipeline(
        mode,
        ipus=ipus,
        gradient_accumulation=args.gradient_accumulation_count,
        schedule=args.pipeline_schedule,
        reduction=args.reduction,
    )
    return pipeline if args.replicas == 1 else replicate(pipeline, replication_factor=args.replicas)


def _train(
    args: argparse.Namespace, mode: Mode, trainer: Trainer, data: MNIST, cache: ExecutableCache | None
) -> _Losses:
    """Train in one mode and print the lines of that run; return the loss of every update."""
    pipeline, batches, network = trainer.pipeline, trainer.batches, network_of(args.model)
    per_epoch = batches.updates_per_epoch
    total = updates_of(args, batches)
    replicas, of_each = (f", {pipeline.replicas} replicas", " on each") if pipeline.replicas > 1 else ("", "")
    _say(
        f"{mode} {network.title} on {pipeline.ipus} IPUs{replicas}, {args.pipeline_schedule}; {data.source}: "
        f"{per_epoch} updates an epoch, each of {args.gradient_accumulation_count} micro-batches of "
        f"{args.batch_size}{of_each}"
    )
    shows_progress = sys.stdout.isatty() and not args.no_progress
    with Console().status("Compiling") if shows_progress else contextlib.nullcontext():
        state = trainer.init(network.init_params(args.seed), network.init_state())
        seconds = trainer.compile(state)
    found = f"; schedule auto chose {_found_name(pipeline)}" if args.pipeline_schedule == "auto" else ""
    _say(f"Compiled in {seconds:.1f} s{found}" + (f"; {cache}" if cache else ""))

    losses: list[_Losses] = []
    skipped: list[int] = []
    seconds = 0.0
    accuracy = 0.0
    with trainer.feed, progress_bar(shown=shows_progress) as progress:
        bar = progress.add_task(mode, total=total)

        def on_call(call: Call) -> None:
            losses.append(call.losses)
            skipped.append(call.skipped)
            _say(
                f"Epoch {call.epoch:.1f}, Mean loss: {call.losses.mean():.3f}"
                + (f", {call.skipped} of {len(call.losses)} updates skipped" if call.skipped else "")
            )
            progress.update(bar, completed=call.updates)

        for epoch in range(-(-total // per_epoch)):
            updates = min(per_epoch, total - epoch * per_epoch)
            start = time.perf_counter()
            state = trainer.run_epoch(state, epoch, updates=updates, on_call=on_call)
            seconds += time.perf_counter() - start
            accuracy = trainer.accuracy(state, data.test_images, data.test_labels)
            _say(f"Epoch {epoch + updates / per_epoch:.1f}, Test accuracy: {accuracy:.2%}")
    images = total * batches.images_per_update
    _say(f"Test accuracy: {accuracy:.2%} after {images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    if sum(skipped):
        _say(f"{sum(skipped)} of {total} updates were skipped: their gradients overflowed {args.half}")
    if cache:
        _say(f"With evaluation, {cache}")
    return np.concatenate(losses)


def _found_name(pipeline: Pipeline) -> str:
    """Return the name of the schedule that was found."""
    name = pipeline.schedule.name
    return "a table of its own" if name == "auto" else name


def _say(line: str) -> None:
    print(line, flush=True)


def progress_bar(*, shown: bool) -> Progress:
    """Return a progress bar that counts updates and stays below the printed lines. Without `shown` it is not drawn."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(), disable=not shown, transient=True)


if __name__ == "__main__":
    sys.exit(main())
