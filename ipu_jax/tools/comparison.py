"""Say whether a sharded program agrees with the unsharded one: the flags, the tolerances and the printed lines.

Differences are judged as numpy.allclose judges them. Nothing here imports jax.
"""

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ipu_jax import cli


class Tolerance(NamedTuple):
    """Two values agree if |got - want| <= atol + rtol * |want|, as in numpy.allclose."""

    rtol: float
    atol: float


FLOAT32_TOLERANCE = Tolerance(rtol=1e-6, atol=1e-5)
HALF_TOLERANCE = Tolerance(rtol=1e-3, atol=1e-2)
HINTS = {
    "dtype precision half float16 bfloat16": "--fp16 and --bf16 are the dtypes, and float32 without them",
    "cpu gpu gpus tpu cuda device devices use-ipu-model": "--ipus gives their number, $JAX_PLATFORMS their kind",
    "fp32 float32": "float32 is what is used without --fp16 and --bf16",
    "check checks verbose v": "results are compared and differences printed, unless --no-checks is given",
}


def add_dtypes_and_checks(parser: cli.Parser, what: str) -> None:
    """Add --fp16 and --bf16, for the dtype of `what`, and --no-checks."""
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--fp16", action="store_true", help=f"{what} in float16, rather than float32")
    half.add_argument("--bf16", action="store_true", help=f"{what} in bfloat16, rather than float32")
    parser.add_argument(
        "--no-checks", dest="checks", action="store_false", help="run the sharded program only, and compare nothing"
    )


def dtype_of(args: argparse.Namespace) -> str:
    """Return the name of the dtype that the flags ask for."""
    return "float16" if args.fp16 else "bfloat16" if args.bf16 else "float32"


def report(args: argparse.Namespace, got: Any, dense: Callable[[], Any], *, of_norm: float | None = None) -> int:
    """Print the loss of the sharded program and, with checks, the unsharded one's and the differences.

    Args:
        args: the command line.
        got: the sharded program's results, a named tuple of arrays with a `loss`.
        dense: runs the unsharded program, and returns its results.
        of_norm: as in `differences`.

    Returns:
        The exit status: 0 if nothing differs, else 1.
    """
    print(f"Loss on {args.ipus} IPU{'s' if args.ipus > 1 else ''}: {got.loss:.4f}")
    if not args.checks:
        return 0
    want = dense()
    print(f"Loss unsharded: {want.loss:.4f}")
    tolerance = FLOAT32_TOLERANCE if dtype_of(args) == "float32" else HALF_TOLERANCE
    differing = differences(got, want, tolerance, of_norm)
    for name, error in differing.items():
        print(f"Max ABS error: {error:.3g} ({name})")
    if differing:
        return 1
    print("Results match.")
    return 0


def differences(got: Any, want: Any, tolerance: Tolerance, of_norm: float | None = None) -> dict[str, float]:
    """Return the largest absolute error of each result that is out of tolerance. NaN is always out of tolerance.

    Args:
        got, want: named tuples of arrays.
        tolerance: of each element.
        of_norm: the largest norm of an error, as a share of the array's norm; None for no such limit.
    """
    differing: dict[str, float] = {}
    for name in want._fields:
        one, other = (np.asarray(getattr(results, name), np.float64) for results in (got, want))
        error = np.abs(one - other)
        is_right = np.all(error <= tolerance.atol + tolerance.rtol * np.abs(other))
        # A gradient that is exactly zero, as with a vocabulary of one row, has no norm to compare with.
        if of_norm is not None and np.any(other):
            is_right = is_right and np.linalg.norm(error) <= of_norm * np.linalg.norm(other)
        if not is_right:
            differing[name] = float(error.max())
    return differing


_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def check_memory(needed: float, sizes: str) -> None:
    """Check that arrays of `needed` bytes fit in the memory of this machine, or of its container.

    Args:
        needed: the least number of bytes in memory at once.
        sizes: the flags and values that determine it, as in "--rows 5 and --cols 7".

    Raises:
        ValueError: the arrays do not fit.
    """
    there = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        there = min(there, float(_OF_CONTAINER.read_text()))
    if needed > there:
        raise ValueError(
            f"{sizes} need {needed / 1e9:,.0f} GB or more, and this machine has {there / 1e9:,.0f} GB of memory: "
            "give smaller ones"
        )
