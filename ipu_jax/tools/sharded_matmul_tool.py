"""sharded-matmul-tool: compare the sharded matmul with the unsharded program, on inputs of any size.

    logits = lhs @ rhs          lhs (rows, cols) on every IPU, rhs (cols, outsize) with its columns split over the IPUs
    loss   = mean softmax cross-entropy of the logits with random labels

It computes logits, loss, dLhs and dRhs twice, with `sharded_ops` on virtual IPUs and with plain jax and optax on one
device, and reports whether they agree (`split_matmul.py`). Its exit code is 0 if they do, 1 if they don't, and 2 if the
arguments are impossible. Arguments are checked before jax is imported.

    $ sharded-matmul-tool --ipus 4
    Loss on 4 IPUs: 9.0730
    Loss unsharded: 9.0730
    Results match.
"""

import functools
from collections.abc import Sequence
from typing import NoReturn

from ipu_jax import cli
from ipu_jax.tools.agreement import HINTS, add_dtypes_and_checks, check_memory, dtype_of, report

PROG = "sharded-matmul-tool"


def command() -> NoReturn:
    """Run the tool as the process's own command."""
    cli.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or with the command line's, and return the exit code."""
    parser = _parser()
    args = parser.parse(argv)
    rows, cols, outsize = args.rows, args.cols, args.outsize
    try:
        # lhs and rhs are drawn in float64; logits and their gradient are float32
        check_memory(
            8 * (rows * cols + cols * outsize) + 8 * rows * outsize,
            f"--rows {rows}, --cols {cols} and --outsize {outsize}",
        )
        from ipu_jax import configure  # imports jax

        configure(args.ipus)
        from ipu_jax.tools import split_matmul

        inputs = split_matmul.random_inputs(rows, cols, outsize, args.seed, dtype_of(args))
    except (ValueError, MemoryError) as error:
        parser.refuse(error)
    return report(
        args,
        functools.partial(split_matmul.run_sharded, args.ipus, inputs),
        functools.partial(split_matmul.run_dense, inputs),
        split_matmul.differences,
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(
        PROG,
        "Compares a matmul and its softmax cross-entropy, sharded over IPUs, with the unsharded program.",
        called={"num_ipus": "--ipus", "m": "--rows", "k": "--cols", "n": "--outsize"},
        hints=HINTS,
    )
    parser.add_size("--rows", 256, "rows of lhs, the tokens")
    parser.add_size("--cols", 768, "columns of lhs, and rows of rhs")
    parser.add_size("--outsize", 8000, "columns of rhs, which are split over the IPUs")
    parser.add_ipus(2, "IPUs to split them over")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    add_dtypes_and_checks(parser, "lhs and rhs")
    return parser


if __name__ == "__main__":
    command()
