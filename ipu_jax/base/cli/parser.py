"""Parse a command line. An error is one line that names the flag as typed, and says what to give instead.

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import argparse
import contextlib
import difflib
import math
import platform
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ipu_jax.base.checks import check_choice
from ipu_jax.base.cli.process import is_of_a_removed_directory
from ipu_jax.base.version import __version__

_Value = TypeVar("_Value")

MOST_IPUS = 1024
"""The largest number of virtual IPUs in a command's process. Each has its own threads and compiled programs."""

_LARGEST = 2**31 - 1
_LONGEST_SHOWN = 60
_NAMED_VALUE = re.compile(r"\b([a-z]+(?:_[a-z]+)*)=(?=\S)")


class Parser(argparse.ArgumentParser):
    """A parser with --version. Its errors are one line each, without the usage that argparse prints before them.

    A flag cannot be abbreviated. An unknown flag is refused with the name of the nearest one.

    Args:
        prog: the name of the command.
        description, epilog: as for `argparse.ArgumentParser`.
        called: the flags of values that errors call by another name, such as `{"schedule": "--pipeline-schedule"}`.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        epilog: str | None = None,
        called: Mapping[str, str] = types.MappingProxyType({}),
    ):
        super().__init__(prog=prog, description=description, epilog=epilog, allow_abbrev=False, exit_on_error=False)
        self._called, self._argv = called, list[str]()
        self.add_argument("--version", action=_Version, help="print the versions, and exit")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed flags of `argv`, by default the process's command line; wrong flags exit with status 2."""
        self._argv = list(sys.argv[1:] if argv is None else argv)
        try:
            args, unknown = self.parse_known_args(self._argv)
        except argparse.ArgumentError as error:
            self.error(self._as_typed(error))
        unknown = [argument for argument in unknown if argument != "--"]
        if unknown:
            self.error(f"unrecognized arguments: {shown(' '.join(unknown))}: {self._nearest(unknown)}")
        return args

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def refuse(self, error: Exception) -> NoReturn:
        """Exit with status 2 and the error's message, in which values that have flags are named by their flags.

        `batch_size=8` becomes `--batch-size 8`, since a user who typed the flag does not know the argument.
        """
        if is_of_a_removed_directory(error):
            raise error  # its message says nothing; `ipu_jax.base.cli.process` prints a better one
        self.error(_NAMED_VALUE.sub(lambda found: self._flag_of(found[1]) or found[0], str(error)))

    def _as_typed(self, error: argparse.ArgumentError) -> str:
        if error.argument_name is None:
            return error.message
        flag, message = self._typed(error.argument_name.split("/")), error.message
        if message.startswith("expected"):
            message += f": give one as {flag}=VALUE, or see --help"
        elif message.startswith("ignored explicit argument"):
            message = f"takes no value: leave {message.removeprefix('ignored explicit argument ')} out"
        return f"argument {flag}: {message}"

    def _typed(self, names: Sequence[str]) -> str:
        """Return the name of a flag that was typed, or else its first name."""
        typed = {argument.split("=")[0] for argument in self._argv}
        return next((name for name in names if name in typed), names[0])

    def _flag_of(self, name: str) -> str | None:
        """Return the flag of the value with that name, and a space, as in "--batch-size ", or None if there is none."""
        flag = self._called.get(name, "--" + name.replace("_", "-"))
        for action in self._actions:
            if flag in action.option_strings:
                return self._typed(action.option_strings) + " "
        return None

    def _nearest(self, unknown: Sequence[str]) -> str:
        flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        first = unknown[0].split("=")[0]
        if not first.startswith("-"):
            return "every value needs a flag before it; --help lists them"
        word = first.lstrip("-").replace("_", "-")
        ends = [flag for flag in flags if flag.endswith(f"-{word}")]
        begins = [flag for flag in flags if word and flag.startswith(f"--{word}")]
        near = ends or begins or difflib.get_close_matches(f"--{word}", flags, n=1)
        return f"did you mean {near[0]}? --help lists all flags" if near else "--help lists all flags"

    def add_size(self, name: str, default: int, meaning: str, *, least: int = 1, most: int = _LARGEST) -> None:
        """Add a flag for a whole number of at least `least` and at most `most`; by default it fits in 32 bits."""
        self.add_argument(
            name, type=whole_number(least, most), default=default, metavar="N", help=f"{meaning} (default: {default})"
        )

    def add_ipus(self, default: int, meaning: str) -> None:
        """Add --ipus, a number of virtual IPUs."""
        self.add_size("--ipus", default, meaning, most=MOST_IPUS)


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(versions(parser.prog))
        parser.exit()


def versions(prog: str) -> str:
    """Return what --version prints: the versions of the command, its packages and Python."""
    import importlib.metadata  # no other command line needs it

    packages = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy", "optax"))
    return f"{prog} {__version__} ({', '.join(packages)}, Python {platform.python_version()})"


def shown(text: str) -> str:
    """Return a user's text as it is shown in an error: a long text is cut.

    >>> shown("12"), shown(100 * "1")
    ('12', '1111111111111111111111111...1111111111111111111111111')
    """
    half = (_LONGEST_SHOWN - 10) // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        value = None
        with contextlib.suppress(ValueError):
            value = int(text)
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{shown(text)!r} is too large: give {most} at most")
        return value

    return number


def number_that(kind: Callable[[str], _Value], accept: Callable[[_Value], bool], rule: str) -> Callable[[str], _Value]:
    """Return an argparse type for numbers for which `accept` is true; the error for other numbers ends in `rule`."""

    def of_text(text: str) -> _Value:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if accept(value):
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not {rule}")

    return of_text


count = number_that(int, lambda n: n >= 1, "a count: give a whole number of at least 1")
positive = number_that(float, lambda x: 0 < x < math.inf, "a positive number: give one such as 0.01")
# rates that float32 can represent: a rate rounded to 0 would silently train nothing
rate = number_that(float, lambda x: 2.0**-126 <= x < 2.0**128, "a positive number: give one such as 0.01")
seed = number_that(int, lambda n: 0 <= n < 2**32, "a seed: give a whole number from 0 to 4294967295")


def path(text: str) -> Path:
    """Return `text` as a path. An empty path is refused: it would be the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no path: give one that is not empty")
    return Path(text)


def checkpoint(text: str) -> str:
    """Return "auto", "never" or the path of a checkpoint, which must exist; `./auto` is a folder of that name."""
    if text not in ("auto", "never") and not path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no checkpoint: give its folder, or auto, or never")
    return text


def checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return an argparse type for texts that `check` accepts. The message of its ValueError is shown for others."""

    def of_text(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of_text


def one_of(name: str, choices: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type for one of `choices`, in upper or lower case (TensorFlow for the IPU wrote "Grouped")."""
    return checked(lambda text: check_choice(name, shown(text.lower()), tuple(choices)))


def braces(names: Sequence[str]) -> str:
    """Return the metavar of a choice: "{basic,concurrent}"."""
    return "{" + ",".join(names) + "}"
