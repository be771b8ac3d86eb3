"""Run a command of the MNIST example on few digits, as one instance of a run, and write what it trained.

The network has few hidden units, since all instances share the cores of one machine.

usage: mnist_instance.py FOLDER IMAGES run_sharded_mnist|benchmark_dataset flags

FOLDER/MODE-INSTANCE.npz contains the whole weights, the loss of every update and the number of each image that this
instance's IPUs got, by epoch and replica. Image k says its number in its first two pixels.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_jax import popdist
from ipu_jax.tools.process import run
from mnist_example import inputs, model, training_run
from mnist_example.data import MNIST, synthetic_mnist


def numbered_digits(count: int, seed: int) -> MNIST:
    """Return digits of which each names its own number."""
    digits = synthetic_mnist(seed, count, 50)
    images = digits.train_images.copy()
    images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(count), 256)
    labels = (np.arange(count) % 10).astype(np.uint8)
    return MNIST(images, labels, digits.test_images, digits.test_labels, digits.source)


def numbers_of(images: Any) -> np.ndarray:
    """Return the numbers that images, (..., 28, 28) bytes or floats from 0 to 1, name."""
    as_bytes = images if images.dtype == np.uint8 else np.rint(images * np.float32(255)).astype(np.uint8)
    return as_bytes[..., 0, 0].astype(int) * 256 + as_bytes[..., 0, 1]


def main(folder: str, images: str, command: str, *flags: str) -> int:
    setattr(inputs, "synthetic_mnist", lambda seed: numbered_digits(int(images), seed))  # noqa: B010 (its type is kept)
    for size, units in (("HIDDEN", 64), ("FEATURES", 32)):
        setattr(model, size, units)
    module = importlib.import_module(f"mnist_example.{command}")
    if command == "run_sharded_mnist":
        _save_what_is_trained(Path(folder))
    return module.main(flags)


def _save_what_is_trained(folder: Path) -> None:
    usual_train = training_run.train

    def train(run: training_run.Run) -> Any:
        found: dict[str, Any] = {}
        states = _record(run.trainer, found)
        found["losses"] = usual_train(run)
        for path, leaf in jax.tree.leaves_with_path(run.trainer.step.whole(states[-1])["params"]):
            found[f"weights{jax.tree_util.keystr(path)}"] = np.asarray(leaf, np.float32)
        np.savez(folder / f"{run.mode}-{popdist.get_instance_index()}.npz", **found)
        return found["losses"]

    setattr(training_run, "train", train)  # noqa: B010


def _record(trainer: Any, found: dict[str, Any]) -> list[Any]:
    """Keep a trainer's states after each epoch, and the numbers of the images that it got by epoch and replica."""
    mesh, feed, states = trainer.pipeline.mesh, trainer.feed, []
    row_of = {device: row for row, devices in enumerate(mesh.devices) for device in devices}
    usual_run, usual_epoch = trainer.run_epoch, feed.epoch

    def epoch() -> Any:
        for batch in usual_epoch():
            of_call: dict[int, np.ndarray] = {}
            for shard in batch.data["images"].addressable_shards:
                values = np.asarray(shard.data)
                values = values[: batch.updates] if trainer.updates_per_call > 1 else values
                numbers, row = numbers_of(values).reshape(-1), row_of[shard.device]
                # all IPUs of a replica have the same images
                np.testing.assert_array_equal(of_call.setdefault(row, numbers), numbers)
            for row, numbers in of_call.items():
                name = f"images {len(states)} {row}"
                found[name] = np.concatenate([found.get(name, numbers[:0]), numbers])
            yield batch

    def run_epoch(*arguments: Any, **options: Any) -> Any:
        states.append(usual_run(*arguments, **options))
        return states[-1]

    feed.epoch, trainer.run_epoch = epoch, run_epoch
    return states


if __name__ == "__main__":
    run("mnist_instance", lambda: main(*sys.argv[1:]))
