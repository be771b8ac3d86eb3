"""Train on drawings that are decoded one by one in Python: replicas on one host process, or on several by poprun.

    python -m examples.distributed --replicas 8
    poprun --num-replicas 8 --num-instances 2 python -m examples.distributed

docs/tutorials/distributed.md says what each of them is good for.
"""

import argparse
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, Stage, configure, make_mesh, make_train_step, popdist
from ipu_jax.steps import TrainStep

SIDE, POINTS = 28, 400  # pixels of a drawing's side, and points that the pen makes on each line of it
UPDATE = 512  # examples of a weight update, whatever the number of replicas
CORNERS = {"a": (8, 4), "b": (20, 4), "c": (8, 14), "d": (20, 14), "e": (8, 24), "f": (20, 24)}
DIGITS = ("abfea", "bf", "abdcef", "abdcdfe", "acdbf", "bacdfe", "baefdc", "abf", "cabdcefd", "dcabfe")


def draw(count: int, seed: int = 0) -> list[str]:
    """Return drawings as lines such as "1 19.2,3.8 20.9,24.4": the digit, and the corners of the pen's way."""
    rng, lines = np.random.default_rng(seed), []
    for digit in rng.integers(0, 10, count):
        way = np.array([CORNERS[corner] for corner in DIGITS[digit]]) + rng.normal(size=2)
        points = np.clip(way + rng.normal(scale=0.8, size=way.shape), 0, SIDE - 1)
        lines.append(" ".join([str(digit), *(f"{x:.1f},{y:.1f}" for x, y in points)]))
    return lines


def decode(line: str) -> dict[str, Any]:
    """Return the picture of a line, in plain Python, and its label."""
    digit, *corners = line.split()
    ways = [[float(number) for number in corner.split(",")] for corner in corners]
    picture = bytearray(SIDE * SIDE)
    for (x0, y0), (x1, y1) in itertools.pairwise(ways):
        for point in range(POINTS):
            part = point / POINTS
            picture[SIDE * round(y0 + part * (y1 - y0)) + round(x0 + part * (x1 - x0))] = 255
    return {"picture": np.frombuffer(picture, np.uint8), "label": np.int32(digit)}


class Drawings:
    """A data set that is read one example at a time; reading one may have to wait, as for a disk or a network."""

    def __init__(self, lines: list[str], wait: float = 0.0):
        self.lines, self.wait = lines, wait

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.wait:
            time.sleep(self.wait)
        return decode(self.lines[index])


def body(p, x, microbatch):
    pictures = microbatch["picture"].astype(jnp.float32) / 255
    return jax.nn.relu(pictures @ p["w"] + p["b"])


def head(p, x, microbatch):
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["w"] + p["b"], microbatch["label"]).mean()


def weights(key) -> dict[str, Any]:
    layer = lambda key, *shape: {"w": jax.random.normal(key, shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
    body, head = jax.random.split(key)
    return {"body": layer(body, SIDE * SIDE, 64), "head": layer(head, 64, 10)}


def make_step(replicas: int, ipus: int = 1) -> TrainStep:
    """Return a training step for so many replicas, of all instances."""
    stages = [Stage(body, params="body", ipu=0), Stage(head, params="head", ipu=ipus - 1)]
    return make_train_step(Pipeline(stages, mesh=make_mesh(replicas, ipus)), optax.adam(1e-2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains on drawings that are decoded one by one.")
    if not popdist.is_popdist_env_set():  # otherwise poprun says how many there are
        parser.add_argument("--replicas", type=int, default=1, help="copies of the model (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="threads that read ahead (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=4096, help="of an epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that reading an example waits (default: 0)")
    parser.add_argument("--only-read", action="store_true", help="read the batches, and do nothing with them")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    popdist.init()
    if popdist.is_popdist_env_set():
        replicas, ipus = popdist.get_num_total_replicas(), popdist.get_num_ipus_per_replica()
        configure(popdist.get_num_local_ipus())
    else:
        replicas, ipus = args.replicas, 1
        configure(replicas)
    step = make_step(replicas, ipus)
    state = step.init(weights, jax.random.key(0))  # each IPU makes its own
    source = Drawings(draw(args.examples), args.wait)
    options = {"workers": args.workers, "prefetch": max(2, args.workers)}
    with Feed(source, items="examples", mesh=step.model.mesh, micro_batch=UPDATE // replicas, **options) as feed:
        for epoch in range(1, args.epochs + 1):
            losses, examples, start = [], 0, time.perf_counter()
            for batch in feed.epoch():
                examples += batch.examples
                if not args.only_read:
                    state, outputs = step(state, batch)
                    losses.append(outputs.loss)  # the mean over all replicas, on each instance
            loss = float(np.mean([float(loss) for loss in losses])) if losses else float("nan")
            seconds = popdist.all_reduce(time.perf_counter() - start)  # the mean over the instances
            if popdist.get_instance_index() == 0:
                print(f"[Epoch {epoch:02d}] loss: {loss:.3f}, {examples / seconds:,.0f} examples/s", flush=True)


if __name__ == "__main__":
    main()
