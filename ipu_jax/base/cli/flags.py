"""Read a command line into a frozen dataclass: each field is a flag.

@dataclasses.dataclass(frozen=True)
class Flags:
    ipus: int = flag(2, count, "virtual IPUs", metavar="N")
    compare: bool = flag(False, None, "train in both modes")

args = flags_of(Flags, parser.parse(argv))          # after add_flags(parser, Flags)
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_Flags = TypeVar("_Flags")


def flag(
    default: Any,
    kind: Callable[[str], Any] | None,
    help: str,
    *,
    metavar: str | None = None,
    also: str | None = None,
    group: str | None = None,
    excludes: str | None = None,
) -> Any:
    """Return a field that is a flag.

    Args:
        default: the default value, which the help names unless it is None.
        kind: turns a text into the value, or raises `argparse.ArgumentTypeError`. None for a switch.
        help: what the flag does.
        metavar: the name of the value in the help.
        also: a second name.
        group: the flag's heading in the help.
        excludes: flags with the same word exclude each other.
    """
    return dataclasses.field(default=default, metadata={**locals()})


def add_flags(parser: argparse.ArgumentParser, of: type) -> None:
    """Add a flag for each field of a dataclass, under the heading of its group."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(of):
        how = dict(field.metadata)
        target: Any = parser
        if how["group"]:
            target = groups.setdefault(how["group"], None) or parser.add_argument_group(how["group"])
            groups[how["group"]] = target
        if how["excludes"]:
            heading, name = target, f"one of {how['excludes']}"
            target = groups.setdefault(name, None) or heading.add_mutually_exclusive_group()
            groups[name] = target
        names = ["--" + field.name.replace("_", "-"), *([how["also"]] if how["also"] else [])]
        options: dict[str, Any] = {"default": how["default"], "help": how["help"].replace("%", "%%")}
        if how["kind"] is None:
            options["action"] = argparse.BooleanOptionalAction if how["default"] else "store_true"
            if how["default"]:
                options["help"] += f" (default: {names[0]})"
        else:
            options |= {"type": how["kind"], "metavar": how["metavar"]}
            if how["default"] is not None:
                default = f"{how['default']:g}" if isinstance(how["default"], float) else how["default"]
                options["help"] += f" (default: {default})"
        target.add_argument(*names, **options)


def flags_of(of: type[_Flags], parsed: argparse.Namespace) -> _Flags:
    """Return the parsed flags as the dataclass that defines them."""
    return of(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(of)})  # pyright: ignore[reportArgumentType]
