"""Make a page of the logs of runs, and print what differs between them: the command `ipu-report`.

    ipu-report run.jsonl                    the page about a run, also one that was killed or still goes on
    ipu-report a.jsonl b.jsonl -o ab.html   curves over each other, and what differs

Logs are only read, so other processes may still write them.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from ipu_jax.base.cli import process
from ipu_jax.base.cli.output_paths import check_file, reason_of
from ipu_jax.base.cli.parser import CommandParser
from ipu_jax.base.terminal import printable
from ipu_jax.run.observe.runs.digest import check_runs
from ipu_jax.run.observe.runs.log import RunLog

PROG: Final = "ipu-report"
_OUTPUT: Final = "report.html"
_EPILOG: Final = """
A program writes such a log with RunLog, fit(log=...), or --log-file of run-sharded-mnist.

  ipu-report run.jsonl
  ipu-report runs/x/log.jsonl runs/y/log.jsonl -o x-and-y.html
"""


def command() -> NoReturn:
    """Make the page for the command line, and end the process with the exit status."""
    process.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the page for a command line, print what differs, and return the exit status."""
    about = "Makes a page of the log of a run; of several logs, one with curves over each other and what differs."
    parser = CommandParser(PROG, about, _EPILOG, hints={"report html": f"-o {_OUTPUT} names the page"})
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log of a run, such as run.jsonl; eight at most")
    output = f"the page (default: {_OUTPUT}, which is replaced)"
    parser.add_argument("-o", "--output", type=Path, default=Path(_OUTPUT), metavar="FILE", help=output)
    args = parser.parse(argv)
    try:
        check_file("-o", args.output, (".html",))
        names = names_of(args.logs)
        logs = {name: _read(path) for name, path in zip(names, args.logs, strict=True)}
        check_runs({path: log.digest for path, log in zip(args.logs, logs.values(), strict=True)})
    except ValueError as error:
        parser.refuse(error)
    from ipu_jax.run.observe.runs import comparison, page  # jax, which a wrong command line need not wait for
    from ipu_jax.run.observe.runs._verdict import verdict_of

    digests = {name: log.digest for name, log in logs.items()}
    compared = comparison.SideBySide(digests) if len(names) > 1 else None
    print(compared or printable(" ".join(verdict_of(digests[names[0]])[1])))
    try:
        if compared:
            compared.write(args.output, f"{len(names)} runs: {', '.join(names)}")
        else:
            page.write_report(args.output, logs[names[0]], title=names[0])
    except OSError as error:
        print(f"{PROG}: {args.output} was not written ({reason_of(error)})", file=sys.stderr)
        return process.CANNOT_WRITE
    print(f"the page is {args.output}")
    return 0


def names_of(paths: Sequence[str]) -> list[str]:
    """Return the shortest names that distinguish files.

    Raises:
        ValueError: a file is there twice.

    >>> names_of(["runs/a.jsonl", "runs/b.jsonl"]), names_of(["runs/x/log.jsonl", "runs/y/log.jsonl"])
    (['a.jsonl', 'b.jsonl'], ['x', 'y'])
    >>> names_of(["x/a.jsonl", "y/a.jsonl", "y/b.jsonl"])
    ['x/a.jsonl', 'y/a.jsonl', 'b.jsonl']
    """
    files = [os.path.realpath(path) for path in paths]
    if twice := next((path for path, file in zip(paths, files, strict=True) if files.count(file) > 1), None):
        raise ValueError(f"{twice} is given twice: name each log once")
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    while len(parts) > 1 and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    ends = [[each[-length:] for length in range(1, len(each) + 1)] for each in parts]
    return [next(os.path.join(*end) for end in mine if sum(end in each for each in ends) == 1) for mine in ends]


def _read(path: str) -> RunLog:
    try:
        return RunLog.read(path)
    except OSError as error:
        raise ValueError(f"log {path} cannot be read ({error.strerror}): give another file") from error


if __name__ == "__main__":
    command()
