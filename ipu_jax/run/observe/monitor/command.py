"""Show the IPUs of this host and what runs on them: the command `ipu-monitor`.

    ipu-monitor                   a table that is redrawn every second; q ends it, other keys sort it
    ipu-monitor --once            one table
    ipu-monitor --json            one line of JSON
    ipu-monitor --pid 3207 --user me
    ipu-monitor --sort memory

Nothing here imports jax.
"""

import argparse
import contextlib
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from rich.console import Console, Group
from rich.text import Text

from ipu_jax.base.checks import shown
from ipu_jax.base.cli import process
from ipu_jax.base.cli.parser import CommandParser, number_that, one_of, whole_number
from ipu_jax.distributed.processes.identity import own_identity
from ipu_jax.distributed.processes.record import SWITCH, is_off
from ipu_jax.run.observe.monitor import table
from ipu_jax.run.observe.monitor.rows import SORTS, Look, Watch, user_name

PROG: Final = "ipu-monitor"
FORMAT: Final = 1
"""The version of the format that --json prints."""

_EVERY: Final = 1.0
_SAMPLE: Final = 0.3
_LARGEST_PID: Final = 2**31 - 1
_NO_LIMIT: Final = 10_000
"""The width of a file or a pipe, in characters."""
_KEYS: Final = {{"state": "a", "step": "t"}.get(name, name[0]): name for name in SORTS}
"""The keys of the screen, and the orders that they choose."""


def command() -> NoReturn:
    """Run the monitor, and end the process with its exit status."""
    process.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the monitor, and return its exit status."""
    parser = _parser()
    args = parser.parse(argv)
    if args.once and args.watch is not None:
        parser.error("--once and --watch contradict each other: give one of the two")
    own = own_identity()
    if own is None:
        parser.error("neither /proc nor psutil can list processes: mount /proc, or run it elsewhere")
    view = _View(Watch(own, users=args.user, pids=args.pid), args)
    repeats = args.watch is not None or (sys.stdout.isatty() and not args.once and not args.json)
    seconds = _EVERY if args.watch is None else args.watch
    if view.look().rows:
        time.sleep(_SAMPLE)  # the next look measures shares of CPU time since this one
    if repeats and not args.json and view.is_screen:
        from ipu_jax.run.observe.monitor import screen  # a single table starts faster without

        return max(screen.show(view.draw, view.press, view.console, seconds), view.say_missing())
    view.show()
    status = view.say_missing()
    while repeats:
        time.sleep(seconds)
        view.show()
    return status


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        "Shows the processes on this host that use ipu_jax: their IPUs, stages, steps, speed and state. Only those of "
        "this user, or all for root.",
        "On a terminal it watches until q is pressed; otherwise it shows one table. docs/watching.md describes the "
        "columns and the JSON.",
        hints={"n interval": "--watch=2 looks every 2 s", "no-color no-colour color": "NO_COLOR=1 leaves colours out"},
    )
    parser.add_argument("--once", action="store_true", help="show one table, and end")
    parser.add_argument(
        "--watch",
        type=number_that(float, lambda seconds: 0.1 <= seconds <= 3600, "a time of 0.1 to 3600 seconds"),
        nargs="?",
        const=_EVERY,
        metavar="SECONDS",
        help=f"refresh it at this interval, in seconds (default: {_EVERY:g})",
    )
    parser.add_argument(
        "--sort",
        type=one_of("sort", tuple(SORTS)),
        metavar=f"{{{','.join(SORTS)}}}",
        help="order the rows by this, the largest or the most urgent first (default: by run and start)",
    )
    parser.add_argument("--json", action="store_true", help="print each look as one line of JSON")
    parser.add_argument(
        "--user", type=_user, action="append", default=[], metavar="NAME", help="only this user's; may be repeated"
    )
    parser.add_argument(
        "--pid",
        type=whole_number(1, _LARGEST_PID),
        action="append",
        default=[],
        metavar="N",
        help="only this process; may be repeated",
    )
    return parser


def _user(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        return int(text)
    with contextlib.suppress(KeyError, ValueError):
        return pwd.getpwnam(text).pw_uid
    raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a user of this host: give a user's name or number")


class _View:
    """Shows looks as tables or as JSON, in the order that the user has chosen."""

    def __init__(self, watch: Watch, args: argparse.Namespace):
        self._watch, self._args, self._sort, self._missing = watch, args, args.sort, set(args.pid)
        is_terminal = sys.stdout.isatty()
        self.console = Console(width=None if is_terminal or os.environ.get("COLUMNS") else _NO_LIMIT)
        self.is_screen = is_terminal and not self.console.is_dumb_terminal

    def look(self) -> Look:
        """Look at the processes."""
        self._last = self._watch.look()
        self._missing -= {row.pid for row in self._last.rows}
        return self._last

    def show(self) -> None:
        """Look, and print what is seen."""
        look = self.look().sorted(self._sort)
        if self._args.json:
            about = {"format": FORMAT, "time": look.at, "host": socket.gethostname()}
            seen = {"processes": [*map(vars, look.rows)], "ignored": [*map(vars, look.ignored)]}
            # json escapes every character that is not printable except DEL
            print(json.dumps({**about, **seen}, default=vars).replace("\x7f", r"\u007f"))
        else:
            self.console.print(self._table())

    def draw(self, *, anew: bool) -> tuple[Group, Text]:
        """Return a table, of a new look or of the last one, and a line with the keys."""
        if anew:
            self.look()
        keys = Text("Sort by ", no_wrap=True, overflow="ellipsis")
        for key, name in _KEYS.items():
            keys.append(name.replace(key, f"[{key}]", 1) + " ", "bold" if name == self._sort else "dim")
        return self._table(), keys.append("[q]uit")

    def press(self, key: str) -> bool:
        """Choose the order of a key, or the usual one by the same key again; return whether it is a key of an order."""
        name = _KEYS.get(key.lower())
        self._sort = self._sort if name is None else None if name == self._sort else name
        return name is not None

    def say_missing(self) -> int:
        """Return 1, and say which, if a process that the user has named has not been seen; else return 0."""
        if self._missing:
            pids = ", ".join(map(str, sorted(self._missing)))
            line = f"{PROG}: --pid {pids}: no such process of yours uses ipu_jax; without --pid, all are shown"
            print(line, file=sys.stderr)
        return int(bool(self._missing))

    def _table(self) -> Group:
        look, about = self._last.sorted(self._sort), table.about_host(socket.gethostname())
        notes = () if look.rows else (_why_empty(self._args),)
        bars = self.is_screen and self.console.encoding.startswith("utf")  # rich's is in lower case
        return table.picture_of(look, self.console.width, about, notes, bars=bars)


def _why_empty(args: argparse.Namespace) -> str:
    """Return the note for a table without rows."""
    others = [user_name(uid) for uid in args.user if uid != os.geteuid()]
    if others and os.geteuid() != 0:
        return f"Only root and that user can see what {' and '.join(others)} runs."
    which = "None of the processes asked for" if args.user or args.pid else "No process"
    switched_off = f", and {SWITCH}=off asks for no records" if is_off() else ""
    return f"{which} uses ipu_jax{switched_off}."


if __name__ == "__main__":
    command()
