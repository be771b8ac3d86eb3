"""Measure the cost of pipelining unlike stages: MNIST's MLP and classifier over 2 virtual IPUs.

Loss and gradients of one weight update are compared with the unsharded model's (a jitted scan over micro-batches, plain
jnp and optax), in both modes of the MNIST example, with micro-batches of 64 and of 8 images. Then the costs are
compared. The MLP is 400 times as large as the classifier, so two IPUs cannot be faster than one IPU that has both
cores. The figures show how much time is lost, and the CPU work shows how much extra work is done.

    python benchmarks/mnist.py [--check]
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from figures import Figures, largest_relative_difference, scanned, side_by_side
from ipu_jax import configure
from mnist_example.flags import MODES
from mnist_example.model import init_params, make_pipeline
from replicas import loss_fn

# images of a micro-batch, micro-batches per update, bound for the CPU work / the unsharded program's
SIZES = ((64, 16, 1.10), (8, 84, 1.15))


unsharded = jax.jit(scanned(loss_fn))
LEAST_IMAGES = {"basic": 0.95, "concurrent": 0.93}  # per second, relative to the unsharded program


def main() -> int:
    figures = Figures("unlike stages: images per second and CPU work of both MNIST modes over the unsharded program's")
    figures.shrink(__name__, SIZES=((2, 3, None),))
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    configure(2)
    params = init_params(0)
    for rows, count, most_cpu in SIZES:
        keys = jax.random.split(jax.random.key(1))
        batch = {
            "images": jax.random.randint(keys[0], (count, rows, 28, 28), 0, 256).astype(jnp.uint8),
            "labels": jax.random.randint(keys[1], (count, rows), 0, 10),
        }
        calls = [partial(unsharded, params, batch)]
        expected = calls[0]()
        for mode in MODES:
            one = jax.tree.map(lambda leaf: leaf[0], batch)
            pipeline = make_pipeline(mode, one, gradient_accumulation=count)
            spread = jax.device_put(batch, NamedSharding(pipeline.mesh, PartitionSpec()))
            calls.append(partial(pipeline.value_and_grad, pipeline.shard(params), spread))
            (loss, _), gradients = calls[-1]()
            difference = largest_relative_difference((loss, pipeline.unshard(gradients)), expected)
            name = f"loss and gradients / unsharded, {mode}, micro-batch {rows}, M={count}, relative difference"
            figures.add(name, difference, 1e-4)
        dense, *pipelined = side_by_side(*calls)
        for mode, cost in zip(MODES, pipelined, strict=True):
            where = f"{mode}, micro-batch {rows}, M={count}"
            figures.add(
                f"images/s / unsharded on both cores, {where}", (dense / cost).wall, at_least=LEAST_IMAGES[mode]
            )
            figures.add(f"CPU work / unsharded, {where}", (cost / dense).cpu, most_cpu)
            figures.add_spread(where, cost)
        figures.add_spread(f"unsharded, micro-batch {rows}, M={count}", dense)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
