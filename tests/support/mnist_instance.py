"""Run a command of the MNIST example on few digits, as one instance of a run, and save what its training has learnt.

The network has few hidden units, since all instances share the cores of one machine.

usage: mnist_instance.py FOLDER IMAGES run_sharded_mnist|benchmark_dataset flags

FOLDER/MODE-INSTANCE.npz contains the whole weights and the loss of every update.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_jax import popdist
from ipu_jax._cli.process import run
from mnist_example import data, model, training
from mnist_example.data import synthetic_mnist


def main(folder: str, images: str, command: str, *flags: str) -> int:
    usual = training.Training.run

    def train(self: training.Training, cache: Any) -> Any:
        result = usual(self, cache)
        whole = jax.tree.leaves_with_path(self.step.whole(result.state)["params"])
        weights = {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in whole}
        file = Path(folder, f"{self.mode}-{popdist.get_instance_index()}.npz")
        np.savez(file, losses=result.losses, **weights)
        return result

    changed = {"HIDDEN": 64, "FEATURES": 32}
    for owner, name, value in (
        *((model, name, units) for name, units in changed.items()),
        (data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, int(images), 50)),
        (training.Training, "run", train),
    ):
        setattr(owner, name, value)
    return importlib.import_module(f"mnist_example.{command}").main(flags)


if __name__ == "__main__":
    run("mnist_instance", lambda: main(*sys.argv[1:]))
