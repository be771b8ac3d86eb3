"""Read the batches of a training and nothing else, and print how many samples per second that gives."""

import argparse
import itertools
import time
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from ipu_jax import Feed, FeedBatch, make_mesh, popdist
from mnist_example.batches import Batches
from mnist_example.data import MNIST
from mnist_example.feeding import make_feed
from mnist_example.flag_checks import feed_options, updates_of
from mnist_example.instances import wait_for_all
from mnist_example.progress import progress_bar, say, shows_progress


def read(args: argparse.Namespace, batches: Batches, data: MNIST) -> None:
    """Read all epochs onto the IPUs; print what is read, and a line after each epoch."""
    mesh = make_mesh(args.replicas, args.ipus)
    replicas, of_each = (f"{args.replicas} replicas of ", " on each") if args.replicas > 1 else ("", "")
    say(
        f"{data.source}, to {replicas}{args.ipus} IPU{'s' * (args.ipus > 1)}: "
        f"{batches.updates_per_epoch} updates per epoch, each of "
        f"{args.gradient_accumulation_count} micro-batches of {args.batch_size}{of_each}"
    )
    with make_feed(batches, mesh, **feed_options(args, batches)) as feed:
        _read_epochs(args, batches, mesh, feed)


def _read_epochs(args: argparse.Namespace, batches: Batches, mesh: Mesh, feed: Feed) -> None:
    per_epoch, total = batches.updates_per_epoch, updates_of(args, batches)
    with progress_bar(shown=shows_progress(args.no_progress)) as progress:
        bar = progress.add_task("reading", total=total, images=batches.images_per_update)
        for epoch in range(-(-total // per_epoch)):
            updates = min(per_epoch, total - epoch * per_epoch)
            examples = megabytes = 0.0
            wait_for_all("the start of an epoch")
            start = time.perf_counter()
            for batch in _of_updates(args, batches, mesh, feed, updates):
                jax.block_until_ready(batch.data)
                examples += batch.examples
                megabytes += sum(leaf.nbytes for leaf in jax.tree.leaves(batch.data)) / 1e6  # of all instances
                progress.update(bar, advance=batch.updates)
                popdist.count_steps()
            wait_for_all("the end of an epoch")  # an epoch takes as long as the slowest instance
            seconds = time.perf_counter() - start
            say(
                f"Epoch {epoch + 1}: {examples:,.0f} samples in {seconds:.2f} s, {examples / seconds:,.0f} samples/s, "
                f"{megabytes / seconds:,.2f} MB/s"
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
