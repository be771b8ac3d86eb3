"""Train a network on handwritten digits as a pipeline over virtual IPUs: the `run-sharded-mnist` command.

    run-sharded-mnist --pipeline-mode basic
    run-sharded-mnist --pipeline-mode concurrent --ipus 4
    run-sharded-mnist --pipeline-mode basic --model resnet18 --epochs 1
    run-sharded-mnist --pipeline-mode concurrent --replicas 2 --optimizer adamw --shard-optimizer
    run-sharded-mnist --compare --plot losses.png
    poprun --num-replicas 4 --num-instances 2 --ipus-per-replica 2 run-sharded-mnist --pipeline-mode basic

Exit status: 0 after training, and when SIGTERM has ended and saved it; 1 when it diverged, 2 for bad input (before
anything is compiled), 74 when the picture, a checkpoint or the output could not be written, 130 after Ctrl-C, 143 after
a second SIGTERM.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__" and not __package__:  # run as a script: the packages of this very checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mnist_example import instances
from mnist_example.extra import run_with_extra
from mnist_example.flag_checks import check_flags, ipus_of
from mnist_example.flags import make_parser, parse

PROG = "run-sharded-mnist"


def command() -> NoReturn:
    """Run the command as the process's own."""
    run_with_extra(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on `argv` (default: the process's own), and return its exit status; bad input exits."""
    parser = make_parser(PROG, "Trains a network on handwritten digits, as a pipeline over virtual IPUs.")
    args = parse(parser, argv)
    try:
        check_flags(args)
        from mnist_example import inputs

        data, batches = inputs.prepare(args, max(ipus_of(args).values()))
        from mnist_example import training_run

        trainers = training_run.make_trainers(args, batches)
        record = training_run.RunRecord(args)
    except (ValueError, OSError) as error:
        parser.refuse(instances.explained(error))
    return training_run.train_and_compare(args, trainers, data, record)


if __name__ == "__main__":
    command()
