"""Run a command of the MNIST example on few digits, as one instance of a run, and write the result of its training.

The network has few hidden units, since all instances share the cores of one machine.

usage: mnist_instance.py FOLDER IMAGES run_sharded_mnist|benchmark_dataset flags

FOLDER/MODE-INSTANCE.npz contains the whole weights, the loss of every update, and the number of each image that this
instance's IPUs got, by epoch and replica. The first two pixels of image k contain k.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_jax import TrainStep, popdist
from ipu_jax._cli.process import run
from mnist_example import data, model, training
from mnist_example.data import MNIST, synthetic_mnist


def numbered_digits(count: int, seed: int) -> MNIST:
    """Return digits; each image contains its own number."""
    digits = synthetic_mnist(seed, count, 50)
    images = digits.train_images.copy()
    images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(count), 256)
    labels = (np.arange(count) % 10).astype(np.uint8)
    return MNIST(images, labels, digits.test_images, digits.test_labels, digits.source)


def numbers_of(images: Any) -> np.ndarray:
    """Return the numbers in images, (..., 28, 28) bytes or floats from 0 to 1."""
    as_bytes = images if images.dtype == np.uint8 else np.rint(images * np.float32(255)).astype(np.uint8)
    return as_bytes[..., 0, 0].astype(int) * 256 + as_bytes[..., 0, 1]


def main(folder: str, images: str, command: str, *flags: str) -> int:
    setattr(data, "synthetic_mnist", lambda seed: numbered_digits(int(images), seed))  # noqa: B010 (its type is kept)
    for size, units in (("HIDDEN", 64), ("FEATURES", 32)):
        setattr(model, size, units)
    module = importlib.import_module(f"mnist_example.{command}")
    if command == "run_sharded_mnist":
        _save_what_is_trained(Path(folder))
    return module.main(flags)


def _save_what_is_trained(folder: Path) -> None:
    usual = training.Training.run

    def train(self: training.Training, cache: Any) -> Any:
        found: dict[str, Any] = {}
        call = TrainStep.__call__
        row_of = {device: row for row, devices in enumerate(self.step.mesh.devices) for device in devices}

        def recorded(step: Any, state: Any, batch: Any, *, updates: Any = None) -> Any:
            _note(found, row_of, batch, updates, several=step.options.device_iterations > 1)
            return call(step, state, batch, updates=updates)

        setattr(TrainStep, "__call__", recorded)  # noqa: B010 (its type is kept)
        try:
            result = usual(self, cache)
        finally:
            setattr(TrainStep, "__call__", call)  # noqa: B010
        found["losses"] = result.losses
        for path, leaf in jax.tree.leaves_with_path(self.step.whole(result.state)["params"]):
            found[f"weights{jax.tree_util.keystr(path)}"] = np.asarray(leaf, np.float32)
        np.savez(folder / f"{self.mode}-{popdist.get_instance_index()}.npz", **found)
        return result

    setattr(training.Training, "run", train)  # noqa: B010


def _note(found: dict[str, Any], row_of: dict[Any, int], batch: Any, updates: range, *, several: bool) -> None:
    """Keep the numbers of the images in a call's updates, by epoch and replica."""
    of_call: dict[int, np.ndarray] = {}
    for shard in batch.data["images"].addressable_shards:
        values = np.asarray(shard.data)
        values = values[updates.start : updates.stop] if several else values
        numbers, row = numbers_of(values).reshape(-1), row_of[shard.device]
        # all IPUs of a replica have the same images
        np.testing.assert_array_equal(of_call.setdefault(row, numbers), numbers)
    for row, numbers in of_call.items():
        name = f"images {batch.epoch} {row}"
        found[name] = np.concatenate([found.get(name, numbers[:0]), numbers])


if __name__ == "__main__":
    run("mnist_instance", lambda: main(*sys.argv[1:]))
