"""sharded-embedding-tool: compare a tied embedding, sharded over IPUs as a pipeline, with the unsharded program.

    hidden = table[tokens]          table (vocabulary, features) with its rows split over the IPUs
    logits = hidden @ table.T       the same table: its gradients from both ends add up
    loss   = mean softmax cross-entropy of the logits with random targets

The three lines are three concurrent stages of an `ipu_jax.Pipeline`, written with `sharded_ops`. The tool computes the
loss and the table's gradient twice, with that pipeline on virtual IPUs and with plain jax and optax on one device, and
reports whether they agree (`tied_embedding.py`). Its exit code is 0 if they do, 1 if they don't, and 2 if the arguments
are impossible. Arguments are checked before jax is imported.

    $ sharded-embedding-tool --ipus 4 --vocab-size 8000 --feature-size 768 --sequence-length 256
    Loss on 4 IPUs: 8.9867
    Loss unsharded: 8.9867
    Results match.
"""

import functools
from collections.abc import Sequence
from typing import NoReturn

from ipu_jax import cli
from ipu_jax.tools.agreement import HINTS, add_dtypes_and_checks, check_memory, dtype_of, report

PROG = "sharded-embedding-tool"


def command() -> NoReturn:
    """Run the tool as the process's own command."""
    cli.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or with the command line's, and return the exit code."""
    parser = _parser()
    args = parser.parse(argv)
    table, logits = args.vocab_size * args.feature_size, args.sequence_length * args.vocab_size
    try:
        # the table is drawn in float64 and scaled; logits and their gradient are float32
        check_memory(
            16 * table + 8 * logits,
            f"--vocab-size {args.vocab_size}, --feature-size {args.feature_size} and --sequence-length "
            f"{args.sequence_length}",
        )
        from ipu_jax import configure  # imports jax

        configure(args.ipus)
        from ipu_jax.tools import tied_embedding

        pipeline = tied_embedding.make_pipeline(args.ipus, args.vocab_size)
        inputs = tied_embedding.random_inputs(
            args.vocab_size, args.feature_size, args.sequence_length, args.seed, dtype_of(args)
        )
    except (ValueError, MemoryError) as error:
        parser.refuse(error)
    return report(
        args,
        functools.partial(tied_embedding.run_pipeline, pipeline, inputs),
        functools.partial(tied_embedding.run_dense, inputs),
        tied_embedding.differences,
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(
        PROG,
        "Compares a tied embedding, its projection and softmax cross-entropy, sharded over IPUs, with the "
        "unsharded program.",
        called={"num_ipus": "--ipus"},
        hints=HINTS,
    )
    parser.add_ipus(4, "IPUs to split the table over")
    parser.add_size("--vocab-size", 8000, "rows of the table")
    parser.add_size("--feature-size", 768, "columns of the table")
    parser.add_size("--sequence-length", 256, "tokens")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    add_dtypes_and_checks(parser, "the table")
    return parser


if __name__ == "__main__":
    command()
