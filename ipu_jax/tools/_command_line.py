"""Parse the tools' command lines: sizes, dtypes, tolerances, and one-line errors."""

import argparse
from collections.abc import Callable
from typing import NamedTuple, NoReturn

_LARGEST = 2**31 - 1


class Tolerance(NamedTuple):
    """Two values agree if |got - want| <= atol + rtol * |want|, as in numpy.allclose."""

    rtol: float
    atol: float


FLOAT32_TOLERANCE = Tolerance(rtol=1e-6, atol=1e-5)
HALF_TOLERANCE = Tolerance(rtol=1e-3, atol=1e-2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage that argparse puts before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def add_size(self, name: str, default: int, meaning: str, *, least: int = 1) -> None:
        """Add a flag for a whole number of at least `least` that fits in 32 bits."""
        self.add_argument(
            name, type=_at_least(least), default=default, metavar="N", help=f"{meaning} (default: {default})"
        )

    def add_dtypes_and_checks(self, what: str) -> None:
        """Add --fp16 and --bf16, for the dtype of `what`, and --no-checks."""
        half = self.add_mutually_exclusive_group()
        half.add_argument("--fp16", action="store_true", help=f"{what} in float16, rather than float32")
        half.add_argument("--bf16", action="store_true", help=f"{what} in bfloat16, rather than float32")
        self.add_argument(
            "--no-checks", dest="checks", action="store_false", help="run the sharded program only, and compare nothing"
        )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        if value > _LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is more than 32 bits hold: give {_LARGEST} at most")
        return value

    return number
