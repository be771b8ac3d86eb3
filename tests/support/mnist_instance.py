"""Run a command of the MNIST example on few digits, as one instance of a run; and write files of digits.

The network has few hidden units, since all instances share the cores of one machine.

usage: mnist_instance.py FOLDER IMAGES run_sharded_mnist|benchmark_dataset flags

FOLDER/MODE-INSTANCE.npz contains the whole weights and the loss of every update.
"""

import gzip
import importlib
import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_jax import popdist
from ipu_jax.base.cli.process import run
from mnist_example import data, model, training
from mnist_example.data import synthetic_mnist


class Terminal(io.StringIO):
    """Takes the place of a stdout that is a terminal."""

    def isatty(self) -> bool:
        return True


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def arrays_of(digits: data.MNIST) -> dict[str, np.ndarray]:
    """Return the arrays of the four MNIST files."""
    arrays = (digits.train_images, digits.train_labels, digits.test_images, digits.test_labels)
    return dict(zip(NAMES, arrays, strict=True))


def idx(array: np.ndarray) -> bytes:
    """Return the content of an MNIST file."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_digits(folder: Path, digits: data.MNIST) -> Path:
    """Write the four MNIST files, zipped, to a new folder, and return it."""
    folder.mkdir()
    for name, array in arrays_of(digits).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return folder


def main(folder: str, images: str, command: str, *flags: str, patch: Callable[[Any, str, Any], None] = setattr) -> int:
    usual = training.TrainingRun.run

    def train(self: training.TrainingRun, cache: Any) -> Any:
        result = usual(self, cache)
        whole = jax.tree.leaves_with_path(self.step.whole(result.state)["params"])
        found: dict[str, Any] = {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in whole}
        found["losses"] = result.losses
        np.savez(Path(folder, f"{self.mode}-{popdist.get_instance_index()}.npz"), **found)
        return result

    changed = {"HIDDEN": 64, "FEATURES": 32}
    for owner, name, value in (
        *((model, name, units) for name, units in changed.items()),
        (data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, int(images), 50)),
        (training.TrainingRun, "run", train),
    ):
        patch(owner, name, value)
    return importlib.import_module(f"mnist_example.{command}").main(flags)


if __name__ == "__main__":
    run("mnist_instance", lambda: main(*sys.argv[1:]))
