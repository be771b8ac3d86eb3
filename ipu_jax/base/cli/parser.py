"""Parse a command line. An error is one line that names the flag as typed, and says what to give instead.

@dataclasses.dataclass(frozen=True)
class Flags:
    ipus: int = flag(2, count, "virtual IPUs")
    compare: bool = flag(False, None, "train in both modes")

args = flags_of(Flags, parser.parse(argv))          # after add_flags(parser, Flags)

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import os
import platform
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from ipu_jax.base.checks import check_choice, shown
from ipu_jax.base.cli.process import is_of_a_removed_directory
from ipu_jax.base.version import __version__

_Value = TypeVar("_Value")
_Flags = TypeVar("_Flags")

MOST_IPUS = 1024
"""The largest number of virtual IPUs in a command's process. Each has its own threads and compiled programs."""

_LARGEST = 2**31 - 1
_MOST_NEAR = 3
_NAMED_VALUE = re.compile(r"\b([a-z]+(?:_[a-z]+)*)=(?=\S)")


class CommandParser(argparse.ArgumentParser):
    """A parser with --version. Its errors are one line each, without the usage that argparse prints before them.

    A flag cannot be abbreviated. An unknown flag is refused with a hint, or the names of the nearest flags.

    Args:
        prog: the name of the command.
        description, epilog: as for `argparse.ArgumentParser`; paragraphs that begin with two blanks, such as
            examples, are printed as they are.
        called: other names of flags, such as `{"schedule": "--pipeline-schedule"}`. Errors of the library may use them,
            and so may the command line: `--schedule`.
        hints: what to do instead of flags that there are not: names without dashes, separated by blanks, and a text,
            such as `{"momentum nesterov": "--optimizer momentum has one of 0.9"}`.
        brief: whether --help prints a flag's text up to its first semicolon or full stop, and --help-all all of it.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        epilog: str | None = None,
        called: Mapping[str, str] = types.MappingProxyType({}),
        *,
        hints: Mapping[str, str] = types.MappingProxyType({}),
        brief: bool = False,
    ):
        formatter = functools.partial(_Brief, max_help_position=33) if brief else _Formatter
        super().__init__(prog, "%(prog)s [flags]" if brief else None, description, epilog, formatter_class=formatter,
                         allow_abbrev=False, exit_on_error=False)  # fmt: skip
        self._called, self._argv = called, list[str]()
        self._hints = {word: text for words, text in hints.items() for word in words.split()}
        alone: dict[str, Any] = {"nargs": 0, "dest": argparse.SUPPRESS}
        if brief:
            self.add_argument("--help-all", action=_HelpAll, **alone, help="explain each flag at length, and exit")
        self.add_argument("--version", action=_Version, **alone, help="print the versions, and exit")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed flags of `argv`, by default the process's command line; wrong flags exit with status 2."""
        self._argv = list(sys.argv[1:] if argv is None else argv)
        for name, action in self._other_names().items():
            self._option_string_actions.setdefault(name, action)
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
        if message.startswith("the following arguments are required"):  # one may be there under a wrong name
            first = self._argv[0] if self._argv else ""
            is_wrong = first.startswith("-") and first.split("=")[0] not in self._option_string_actions
            message = f"{message.removesuffix(', ...')}: give them as --help shows"
            message = f"unrecognized arguments: {shown(first)}: {self._nearest([first])}" if is_wrong else message
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
        flag, message = self._typed(error.argument_name.split("/")[0]), error.message
        if message.startswith("expected"):
            message += f": give one as {flag}=VALUE, or see --help"
        elif message.startswith("ignored explicit argument"):
            message = f"takes no value: leave {message.removeprefix('ignored explicit argument ')} out"
        return f"argument {flag}: {message}"

    def _other_names(self) -> dict[str, argparse.Action]:
        """Return the names in `called` that are not flags of their own, and the flags that they mean here."""
        flags = {name: action for action in self._actions for name in action.option_strings}
        names = {"--" + name.replace("_", "-"): flag for name, flag in self._called.items() if flag in flags}
        return {name: flags[flag] for name, flag in names.items() if name not in flags}

    def _typed(self, flag: str) -> str:
        """Return the name under which a flag was typed, or else `flag`, one of its names."""
        typed = {argument.split("=")[0] for argument in self._argv}
        action, actions = self._option_string_actions.get(flag), self._option_string_actions
        return next((name for name in actions if actions[name] is action and name in typed), flag)

    def _flag_of(self, name: str) -> str | None:
        """Return the flag of the value with that name, and a space, as in "--batch-size ", or None if there is none."""
        flag = self._called.get(name, "--" + name.replace("_", "-"))
        return self._typed(flag) + " " if flag in self._option_string_actions else None

    def _nearest(self, unknown: Sequence[str]) -> str:
        first = unknown[0].split("=")[0]
        word = first.lstrip("-\u2013\u2014").replace("_", "-").lower()  # word processors make dashes of two hyphens
        word = "version" if first == "-V" else word
        if first in self._option_string_actions:
            return "it is after --, which ends the flags: leave -- out"
        if f"--{word}" in self._option_string_actions:
            return f"did you mean --{word}? --help lists all flags"
        if not first.startswith("-"):
            takes_values = any(action.nargs != 0 for action in self._actions)
            return (
                "every value needs a flag before it; --help lists them"
                if takes_values
                else "leave it out, or see --help"
            )
        if word in self._hints:
            return f"{self._hints[word]}; --help lists all flags"
        flags = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        flags = [flag for flag in flags if flag.startswith("--no-") == word.startswith("no-")]
        near = [flag for flag in flags if flag.startswith(f"--{word}") or flag.endswith(f"-{word}")]
        near = near or difflib.get_close_matches(f"--{word}", flags, n=1, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}? " if 1 <= len(near) <= _MOST_NEAR else ""
        return f"{hint}--help lists all flags"

    def add_size(self, name: str, default: int, meaning: str, *, least: int = 1, most: int = _LARGEST) -> None:
        """Add a flag for a whole number of at least `least` and at most `most`; by default it fits in 32 bits."""
        self.add_argument(
            name, type=whole_number(least, most), default=default, metavar="N", help=f"{meaning} (default: {default})"
        )

    def add_ipus(self, default: int, meaning: str) -> None:
        """Add --ipus, a number of virtual IPUs."""
        self.add_size("--ipus", default, meaning, most=MOST_IPUS)


def flag(
    default: Any,
    kind: Callable[[str], Any] | None,
    help: str,
    metavar: str | None = None,
    *,
    group: str | None = None,
    excludes: str | None = None,
) -> Any:
    """Return a field of a dataclass that is a flag, named like the field.

    Args:
        default: the default value, which the help names unless it is None.
        kind: turns a text into the value, or raises `argparse.ArgumentTypeError`. None for a switch.
        help: what the flag does.
        metavar: the name of the value in the help. Default: `kind.metavar`.
        group: the flag's heading in the help.
        excludes: flags with the same word exclude each other.
    """
    return dataclasses.field(default=default, metadata={**locals()})


def add_flags(parser: argparse.ArgumentParser, of: type) -> None:
    """Add a flag to a parser for each field of a dataclass, under the heading of its group."""
    under = functools.cache(parser.add_argument_group)
    one_of_those = functools.cache(lambda heading, excludes: heading.add_mutually_exclusive_group())
    for field in dataclasses.fields(of):
        how = dict(field.metadata)
        target: Any = under(how["group"]) if how["group"] else parser
        target = one_of_those(target, how["excludes"]) if how["excludes"] else target
        name = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"default": how["default"], "help": how["help"].replace("%", "%%")}
        if how["kind"] is None:
            options["action"] = argparse.BooleanOptionalAction if how["default"] else "store_true"
            if how["default"]:
                options["help"] += f" (default: {name})"
        else:
            options |= {"type": how["kind"], "metavar": how["metavar"] or getattr(how["kind"], "metavar", None)}
            if how["default"] is not None:
                default = f"{how['default']:g}" if isinstance(how["default"], float) else how["default"]
                options["help"] += f" (default: {default})"
        target.add_argument(name, **options)


def flags_of(of: type[_Flags], parsed: argparse.Namespace) -> _Flags:
    """Return the parsed flags as the dataclass that defines them."""
    return of(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(of)})  # pyright: ignore[reportArgumentType]


class _Formatter(argparse.HelpFormatter):
    """Wraps paragraphs to the width of the terminal, except for those that begin with two blanks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill, paragraphs = super()._fill_text, text.strip().split("\n\n")
        return "\n\n".join(each if each.startswith("  ") else fill(each, width, indent) for each in paragraphs)


class _Brief(_Formatter):
    """Prints the first sentence or clause of each flag's text, and its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = re.search(r" \(default: [^()]*\)$", text)
        return re.split("[;.] ", text[: default.start() if default else None])[0] + (default[0] if default else "")


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: object) -> None:
        also = ", ".join(f"{name} for {action.option_strings[0]}" for name, action in parser._other_names().items())
        parser.formatter_class, parser.epilog = _Formatter, f"{parser.epilog or ''}\n\nAlso understood: {also}."
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(versions(parser.prog))
        parser.exit()


def versions(prog: str) -> str:
    """Return what --version prints: the versions of the command, its packages and Python."""
    import importlib.metadata  # no other command line needs it

    packages = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy", "optax"))
    return f"{prog} {__version__} ({', '.join(packages)}, Python {platform.python_version()})"


@dataclasses.dataclass(frozen=True)
class _Kind(Generic[_Value]):
    """Turns a text into a value, or raises `argparse.ArgumentTypeError`. The help calls the value `metavar`."""

    of_text: Callable[[str], _Value] = dataclasses.field(repr=False)
    metavar: str

    def __call__(self, text: str) -> _Value:
        return self.of_text(text)


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

    return _Kind(number, "N")


def number_that(kind: Callable[[str], _Value], accept: Callable[[_Value], bool], rule: str) -> Callable[[str], _Value]:
    """Return an argparse type for numbers for which `accept` is true; the error for other numbers ends in `rule`."""

    def of_text(text: str) -> _Value:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if accept(value):
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not {rule}")

    return _Kind(of_text, "N" if kind is int else "X")


count = number_that(int, lambda n: n >= 1, "a count: give a whole number of at least 1")
"""An argparse type for whole numbers of at least 1."""

positive = number_that(float, lambda x: 0 < x < math.inf, "a positive number: give one such as 0.01")
"""An argparse type for positive numbers."""

# a rate rounded to 0 would silently train nothing
rate = number_that(float, lambda x: 2.0**-126 <= x < 2.0**128, "a positive number: give one such as 0.01")
"""An argparse type for learning rates: positive numbers that float32 can represent."""

seed = number_that(int, lambda n: 0 <= n < 2**32, "a seed: give a whole number from 0 to 4294967295")
"""An argparse type for seeds: whole numbers of 32 bits."""


def path(text: str) -> Path:
    """Return a text as a path. An empty path is refused: it would be the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a path: give one that is not empty")
    return Path(os.path.expanduser(text))  # the shell leaves the ~ of --name=~/folder


def checked(check: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return an argparse type for texts that `check` accepts. The message of its ValueError is shown for others.

    A message that begins with the name of an argument, as in "kind='x' is unknown", is shown without it: the flag is
    named before it.
    """

    def of_text(text: str) -> _Value:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(re.sub(r"^\w+=(?=['\"])", "", str(error))) from error

    return of_text


def one_of(name: str, choices: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type for one of `choices`, in upper or lower case (TensorFlow for the IPU wrote "Grouped")."""
    check = checked(lambda text: check_choice(name, shown(text.lower()), tuple(choices)))
    return _Kind(check, "{" + ",".join(choices) + "}")
