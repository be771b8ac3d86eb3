"""Show the IPUs of this host and what runs on them: the command `ipu-monitor`.

    ipu-monitor                   a table that is drawn again every second; q ends it
    ipu-monitor --once            one table
    ipu-monitor --json            one line of JSON
    ipu-monitor --pid 3207 --user me

Nothing here imports jax.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pwd
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from ipu_jax._processes import own_identity
from ipu_jax._record import SWITCH, is_off
from ipu_jax.observe.monitor import screen, table
from ipu_jax.observe.monitor.rows import Look, Watch, user_name
from ipu_jax.tools import process
from ipu_jax.tools.command_line import Parser, number_that, shown, whole_number

PROG: Final = "ipu-monitor"
FORMAT: Final = 1
"""The version of what --json prints."""

_EVERY: Final = 1.0
_SAMPLE: Final = 0.3
_LARGEST_PID: Final = 2**31 - 1


def command() -> NoReturn:
    """Run the monitor as a process."""
    process.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the monitor, and return its exit status."""
    parser = _parser()
    args = parser.parse(argv)
    if args.once and args.watch is not None:
        parser.error("--once and --watch contradict each other: give one of the two")
    own = own_identity()
    if own is None:
        parser.error("/proc cannot be read, so that nothing is known of processes: mount it")
    watch = Watch(own, users=args.user, pids=args.pid)
    repeats = args.watch is not None or (sys.stdout.isatty() and not args.once and not args.json)
    seconds = _EVERY if args.watch is None else args.watch
    if args.json:
        return _as_json(watch, seconds if repeats else None)
    return _as_table(watch, args, seconds if repeats else None)


def _parser() -> Parser:
    parser = Parser(
        PROG,
        "Shows the processes on this host that use ipu_jax: their IPUs, stages, steps, speed and state. Only those of "
        "this user, or all for root.",
        "On a terminal it watches until q is pressed; otherwise it shows one table. docs/monitor.md describes the "
        "columns and the JSON.",
    )
    parser.add_argument("--once", action="store_true", help="show one table, and end")
    parser.add_argument(
        "--watch",
        type=number_that(float, lambda seconds: 0.1 <= seconds <= 3600, "a time of 0.1 to 3600 seconds"),
        nargs="?",
        const=_EVERY,
        metavar="SECONDS",
        help=f"show it again every so many seconds (default: {_EVERY:g})",
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
    raise argparse.ArgumentTypeError(f"{shown(text)!r} is no user of this host: give a user's name or number")


def _sampled(watch: Watch) -> Look:
    """Return a second look after a short time, in which shares of CPU time are measured."""
    look = watch.look()
    if not look.rows:
        return look
    time.sleep(_SAMPLE)
    return watch.look()


def _as_json(watch: Watch, seconds: float | None) -> int:
    look = _sampled(watch)
    while True:
        # json escapes all that is not printed but DEL
        print(json.dumps(json_of(look)).replace("\x7f", r"\u007f"))
        if seconds is None:
            return 0
        time.sleep(seconds)
        look = watch.look()


def json_of(look: Look) -> dict[str, Any]:
    """Return a look as what --json prints."""
    return {
        "format": FORMAT,
        "time": look.at,
        "host": socket.gethostname(),
        "processes": [dataclasses.asdict(row) for row in look.rows],
        "ignored": [dataclasses.asdict(ignored) for ignored in look.ignored],
    }


def _as_table(watch: Watch, args: argparse.Namespace, seconds: float | None) -> int:
    host, is_terminal = socket.gethostname(), sys.stdout.isatty()
    coloured = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    look = _sampled(watch)

    def lines(width: int | None) -> list[str]:
        drawn = table.lines_of(look, width, about=table.about_host(host), coloured=coloured)
        return drawn if look.rows else [*drawn, *_why_empty(args)]

    if seconds is not None and is_terminal:

        def picture(width: int) -> list[str]:
            nonlocal look
            look = watch.look()
            return lines(width)

        return screen.show(picture, seconds)
    while True:
        print("\n".join(lines(shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else None)))
        if seconds is None:
            return 0
        time.sleep(seconds)
        look = watch.look()


def _why_empty(args: argparse.Namespace) -> list[str]:
    """Return what to say if there is nothing to show."""
    others = [user_name(uid) for uid in args.user if uid != os.geteuid()]
    if others and os.geteuid() != 0:
        return [f"What {' and '.join(others)} runs, only that user and root can see."]
    chosen = " of those that were asked for" if args.user or args.pid else ""
    if is_off():
        return [f"No process{chosen} uses ipu_jax, and {SWITCH}=off asks for no records."]
    return [f"No process{chosen} uses ipu_jax."]


if __name__ == "__main__":
    command()
