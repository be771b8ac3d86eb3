"""Run every benchmark, each in a process of its own, and write what they found to `results.json` and `RESULTS.md`.

    python benchmarks/run_all.py [--only NAME ...] [--limit SECONDS]

A script is any file of this folder that runs as a program. If a script fails or does not run this time, its figures
stay as they are. Files are written after each script, so that nothing is lost if the run is stopped. The exit status is
1 if a script falls short of a bound this time, fails, or takes longer than its limit; the last lines name these
scripts.

A script is called with the flags that it names in a line such as `FLAGS = ("--full",)`. `make pictures` draws the plots
of the documentation from `results.json`.
"""

import argparse
import ast
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import results
from results import Figure, Run

ROOT: Final = results.FOLDER.parent
LIMIT: Final = 3600.0
PACKAGES: Final = ("jax", "jaxlib", "numpy", "optax", "torch")
_GRACE: Final = 10.0


def scripts(folder: Path) -> dict[str, Path]:
    """Return the benchmarks by name: the files that run as programs, except this file and files that set `APART`."""
    programs = (path for path in sorted(folder.glob("*.py")) if '\nif __name__ == "__main__":\n' in path.read_text())
    return {path.stem: path for path in programs if path.name != Path(__file__).name and not constant_of(path, "APART")}


def constant_of(script: Path, name: str) -> Any:
    """Return the value that a script assigns to a name at its top level, without running it; None if there is none."""
    for statement in ast.parse(script.read_text()).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value)
            ) if found == name:
                return ast.literal_eval(value)
            case _:
                pass
    return None


def measure(script: Path, *, limit: float = LIMIT) -> Run:
    """Run one script and return its results.

    Args:
        limit: seconds after which the script and its processes are ended.
    """
    command = [sys.executable, str(script), *(constant_of(script, "FLAGS") or ())]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "figures"
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        commit, load, begun = committed(), os.getloadavg()[0], time.monotonic()
        # without --check, so that the status only says whether the script failed; the record contains the bounds
        problem = _problem([*command, "--record", str(record)], limit)
        seconds = time.monotonic() - begun
        lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return Run(
        date=date,
        machine=machine(),
        versions=versions(),
        seconds=seconds,
        load_before=load,
        load_after=os.getloadavg()[0],
        figures=tuple(Figure(**line) for line in lines if "name" in line),
        left_out=tuple(line["left_out"] for line in lines if "left_out" in line),
        problem=problem,
        commit=commit,
        card="".join(line["card"] for line in lines if "card" in line),
        curves={line["curve"]: tuple(line["points"]) for line in lines if "curve" in line},
    )


def latest(run: Run, older: Run | None) -> Run:
    """Return the run to keep: a failed run does not replace older figures, but they then mention the failure."""
    if not run.problem or older is None:
        return run
    return dataclasses.replace(older, problem=f"the run of {run.date} failed ({run.problem}), the figures are older")


def _problem(command: Sequence[str], limit: float) -> str:
    """Run a command, and return why it did not end as it should, or "". None of its processes is left."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {limit:g} s"
    finally:
        _end(process)
    return "" if status == 0 else f"exit status {status}" if status > 0 else f"ended by signal {-status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it still runs, and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def committed(root: Path = ROOT) -> str:
    """Return the short hash of the tree's commit, with "+" if files have changed since; "" without git."""
    git = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True)
    ours = (f"benchmarks/{results.DATA}", f"benchmarks/{results.TABLE}", "docs/pictures")  # a run rewrites them
    try:
        head = git(["git", "rev-parse", "--short", "HEAD"])
        changes = git(["git", "status", "--porcelain", ".", *(f":(exclude){path}" for path in ours)])
    except FileNotFoundError:
        return ""
    return "" if head.returncode else head.stdout.strip() + "+" * bool(changes.stdout)


def machine() -> str:
    """Return the processor, cores and system of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {platform.system()} {platform.machine()}"


def versions() -> str:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        if importlib.util.find_spec(name):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def main(argv: Sequence[str] | None = None, folder: Path = results.FOLDER) -> int:
    """Run the benchmarks that the command line names, and return the exit status."""
    known = scripts(folder)
    args = _arguments(known, argv)
    chosen = [name for name in known if name in (args.only or known)]
    runs = {name: run for name, run in results.read(folder).items() if name in (*known, *results.KEPT)}
    short: dict[str, Run] = {}
    for k, name in enumerate(chosen):
        print(f"== {k + 1} of {len(chosen)}: {name}, load {os.getloadavg()[0]:.1f}", flush=True)
        run = measure(known[name], limit=args.limit)
        runs[name] = latest(run, runs.get(name))
        results.write(runs, not_run=known.keys() - runs.keys(), folder=folder)
        print(f"== {name}: {run.seconds:.0f} s, {run.summary()}", flush=True)
        if run.falls_short:
            short[name] = run
    print(f"== written: {folder / results.TABLE}", flush=True)
    for name, run in short.items():
        for what in [run.problem, *(figure.name for figure in run.figures if figure.holds is False)]:
            if what:
                print(f"falls short: {name}: {what}", file=sys.stderr)
    return 1 if short else 0


def _arguments(known: Mapping[str, Path], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the benchmarks, and writes benchmarks/RESULTS.md.")
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=f"run these: {', '.join(known)}")
    parser.add_argument("--limit", type=_seconds, default=LIMIT, help="seconds for each script (default: %(default)g)")
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time limit: give a positive number of seconds")
    return seconds


if __name__ == "__main__":
    # treat SIGTERM as Ctrl-C, so that the running script is ended, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped: the scripts before have their figures in the table")
