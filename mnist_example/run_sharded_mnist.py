"""Train a network on handwritten digits as a pipeline over virtual IPUs.

    run-sharded-mnist
    run-sharded-mnist --ipus 4 --checkpoint-dir runs/mnist --report run.html
    run-sharded-mnist --pipeline-mode basic --model resnet18 --epochs 1
    run-sharded-mnist --replicas 2 --optimizer adamw --shard-optimizer
    run-sharded-mnist --compare --plot losses.png
    run-sharded-mnist --compile-for v5e:2x2
    poprun --num-replicas 4 --num-instances 2 --ipus-per-replica 2 \\
        run-sharded-mnist --epochs 1

Exit status: 0 after training, or when SIGTERM has ended and saved it; 1 when it diverged, or does not fit a chip; 2 for
bad input (before anything is compiled); 74 when a picture, a checkpoint or the output could not be written; 130 after
Ctrl-C; 143 after a second SIGTERM.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not __package__:  # run as a script: use the packages of this checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_jax import cli
from mnist_example.flags import PACKAGES, Flags, check_flags, parsed

PROG = "run-sharded-mnist"


def command() -> NoReturn:
    """Run the command, and end the process with its exit status."""
    cli.run(PROG, main, extra="mnist", packages=PACKAGES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: the process's arguments), and return its exit status; bad input exits."""
    parser, flags = parsed(PROG, __doc__ or "", argv, Flags)
    try:
        check_flags(flags)
        if flags.compile_for is not None:
            from mnist_example import training

            return training.compile_all(flags)
        from mnist_example.data import prepared

        data = prepared(flags, max(map(flags.ipus_of, flags.modes)))
        from mnist_example import training  # imports jax

        trainings = [training.TrainingRun(flags, mode, data) for mode in flags.modes]
    except (ValueError, OSError) as error:
        parser.refuse(error)
    return training.train_all(flags, trainings)


if __name__ == "__main__":
    command()
