"""Read the training batches without training on them: the `benchmark-dataset` command.

    benchmark-dataset --batch-size 64 --gradient-accumulation-count 8 --repeat-count 4 --async-dataloader

It takes the flags of `run-sharded-mnist`, so the command line of a training can be used unchanged. It moves the same
batches to the same number of IPUs, and for a part of an epoch it moves only the images of its updates. If an epoch
takes as long here as in training, the host is the bottleneck. Flags of the model, of its updates and of pictures change
nothing here. MB/s count the bytes that are sent to each IPU.

Exit status: 0, 2 for bad input, 130 after Ctrl-C.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from ipu_jax import Feed, FeedBatch, configure, make_mesh
from mnist_example.batches import Batches, make_feed
from mnist_example.flags import check_data_flags, feed_options, make_parser, parse, updates_of
from mnist_example.run_sharded_mnist import load, make_batches, progress_bar


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: the process's own), and return its exit status; bad input exits."""
    parser = make_parser(
        "benchmark-dataset",
        "Reads the batches of a training and does nothing else: how many a second is the host good for? Takes the "
        "flags of run-sharded-mnist; those of the model and its updates change nothing.",
    )
    args = parse(parser, argv)
    try:
        try:
            check_data_flags(args)
            data = load(args)
            batches = make_batches(args, data)
            configure(args.replicas * args.ipus)
            mesh = make_mesh(args.replicas, args.ipus)
            feed = make_feed(batches, mesh, **feed_options(args, batches))
        except (ValueError, OSError) as error:
            parser.error(str(error))
        replicas, of_each = (f"{args.replicas} replicas of ", " on each") if args.replicas > 1 else ("", "")
        print(
            f"{data.source}, to {replicas}{args.ipus} IPUs: {batches.updates_per_epoch} updates an epoch, each of "
            f"{args.gradient_accumulation_count} micro-batches of {args.batch_size}{of_each}",
            flush=True,
        )
        with feed:
            _read(args, batches, mesh, feed)
    except KeyboardInterrupt:
        return 130
    return 0


def _read(args: argparse.Namespace, batches: Batches, mesh: Mesh, feed: Feed) -> None:
    """Read all epochs, and print a line after each."""
    per_epoch, total = batches.updates_per_epoch, updates_of(args, batches)
    with progress_bar(shown=sys.stdout.isatty() and not args.no_progress) as progress:
        bar = progress.add_task("reading", total=total)
        for epoch in range(-(-total // per_epoch)):
            updates = min(per_epoch, total - epoch * per_epoch)
            examples = megabytes = 0.0
            start = time.perf_counter()
            for batch in _of_updates(args, batches, mesh, feed, updates):
                jax.block_until_ready(batch.data)
                examples += batch.examples
                megabytes += batch.nbytes / 1e6
                progress.update(bar, advance=batch.updates)
            seconds = time.perf_counter() - start
            print(
                f"Epoch {epoch + 1}: {examples:,.0f} samples in {seconds:.2f} s, {examples / seconds:,.0f} samples/s, "
                f"{megabytes / seconds:,.1f} MB/s",
                flush=True,
            )


def _of_updates(
    args: argparse.Namespace, batches: Batches, mesh: Mesh, feed: Feed, updates: int
) -> Iterator[FeedBatch]:
    """Yield the batches of the first `updates` updates of an epoch."""
    if updates == batches.updates_per_epoch:
        yield from feed.epoch()
        return
    options = feed_options(args, batches)
    calls, rest = divmod(updates, options["repeat_count"])
    yield from itertools.islice(feed.epoch(), calls)
    if rest:  # all batches of a feed have the same size, so the smaller last one needs a feed of its own
        options["repeat_count"] = rest
        with make_feed(batches, mesh, **options, state=feed.state()) as shorter:
            yield next(shorter)


if __name__ == "__main__":
    sys.exit(main())
