"""Read the training batches without training on them: how many a second is the host good for?

    benchmark-dataset
    benchmark-dataset --synthetic-data --async-dataloader --num-workers 2
    benchmark-dataset --replicas 8 --batch-size 16 --epochs 0.5

The command takes those flags of run-sharded-mnist that say which batches are read, and refuses the others. It moves the
same batches to the same number of IPUs. For part of an epoch, it moves only the images of the requested updates. If an
epoch takes as long here as in training, the host is the bottleneck. MB/s count the bytes that are sent to the IPUs of
all replicas, once each.

Exit status: 0, 2 for bad input, 74 when the output could not be written, 130 after Ctrl-C.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not __package__:  # run as a script: use the packages of this checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_jax import cli
from mnist_example.flags import PACKAGES, DataFlags, check_data_flags, parsed

PROG = "benchmark-dataset"


def command() -> NoReturn:
    """Run the command, and end the process with its exit status."""
    cli.run(PROG, main, extra="mnist", packages=PACKAGES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: the process's arguments), and return its exit status; bad input exits."""
    parser, flags = parsed(PROG, __doc__ or "", argv, DataFlags)
    try:
        check_data_flags(flags)
        from mnist_example.data import prepared

        data = prepared(flags, flags.ipus)
    except (ValueError, OSError) as error:
        parser.refuse(error)
    from mnist_example import training  # imports jax

    training.read(flags, data)
    return 0


if __name__ == "__main__":
    command()
