"""Measure whether a step waits for the feed's data, and how many bytes are sent to the IPUs.

The step computes loss and gradients of the MNIST example. The feed makes and sends its batches while steps run. This is
compared with the same step on batches that are already on the IPUs, in turn in one run, in both modes. The feed without
prefetch and the feed alone are measured too. The data come from $MNIST_DIR or an earlier download, otherwise they are
scikit-learn's digits.

    python benchmarks/feed.py [--check]
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from figures import Figures, side_by_side
from ipu_jax import Feed, Pipeline, configure, make_mesh
from mnist_example import training
from mnist_example.data import MNIST, load_mnist
from mnist_example.flags import MODES, DataFlags, parsed
from mnist_example.model import init_params, make_pipeline

SIZES = ((64, 16), (8, 84))  # (images of a micro-batch, M), as in mnist.py
STEPS = 2  # per round, dispatched as in a training loop
PREFETCH = 2
MOST = 1.05


def feed_of(data: MNIST, pipeline: Pipeline, rows: int, prefetch: int) -> Feed:
    """Return an endless feed whose batches are one update each."""
    return Feed(
        {"images": data.train_images, "labels": data.train_labels},
        mesh=pipeline.mesh,
        micro_batch=rows,
        gradient_accumulation=pipeline.options.gradient_accumulation,
        prefetch=prefetch,
    )


def steps(pipeline: Pipeline, params: Any, next_batch: Callable[[], Any]) -> Any:
    """Dispatch the steps of a round, and return the result of the last step; the caller waits for it."""
    result = None
    for _ in range(STEPS):
        result = pipeline.value_and_grad(params, next_batch())
    return result


def crossing(flags: str) -> int:
    """Return the bytes of a call's images on both IPUs of a replica, under these flags of the example."""
    _, found = parsed(
        "benchmarks/feed.py",
        "",
        ["--batch-size", "64", "--gradient-accumulation-count", "16", *flags.split()],
        DataFlags,
    )
    feed = training.feed_of(found, load_mnist(mirrors=()), mesh=make_mesh(1, 2), gradient_accumulation=16)
    return sum(shard.data.nbytes for shard in next(feed).data["images"].addressable_shards)


def main() -> int:
    figures = Figures("the feed: step time with real data over the step's with data on the IPUs, and bytes that cross")
    figures.shrink(__name__, SIZES=((2, 3),))
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    configure(2)
    data = load_mnist(mirrors=())
    params = init_params(0)
    print(data.source, flush=True)
    for rows, count in SIZES:
        one = {"images": data.train_images[:rows], "labels": data.train_labels[:rows]}
        for mode in MODES:
            pipeline = make_pipeline(mode, one, gradient_accumulation=count)
            step = partial(steps, pipeline, pipeline.shard(params))
            with feed_of(data, pipeline, rows, PREFETCH) as ahead, feed_of(data, pipeline, rows, 0) as by_caller:
                # several batches, since a single one would stay in the CPU's caches
                resident = itertools.cycle([next(by_caller).data for _ in range(8)])
                on_ipus, fed, waited, alone = side_by_side(
                    partial(step, lambda batches=resident: next(batches)),
                    partial(step, lambda feed=ahead: next(feed).data),
                    partial(step, lambda feed=by_caller: next(feed).data),
                    lambda feed=by_caller: [next(feed).data for _ in range(STEPS)],
                    rounds=10,
                )
            where = f"{mode}, micro-batch {rows}, M={count}"
            figures.add(f"step time / data on the IPUs, prefetch, {where}", (fed / on_ipus).wall, MOST)
            figures.add(f"step time / data on the IPUs, no prefetch, {where}", (waited / on_ipus).wall)
            figures.add(f"CPU work / data on the IPUs, prefetch, {where}", (fed / on_ipus).cpu)
            figures.add(f"feed alone / step time, {where}", (alone / on_ipus).wall)
            for name, costs in (("data on the IPUs", on_ipus), ("prefetch", fed), ("no prefetch", waited)):
                figures.add_spread(f"{name}, {where}", costs)
    figures.add(
        "bytes of images that cross / as floats, --eight-bit-io",
        crossing("--eight-bit-io") / crossing("--no-eight-bit-io"),
        0.25,
    )
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
