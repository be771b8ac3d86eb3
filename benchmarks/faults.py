"""Break a training run in fifteen ways at random moments, for real, and judge how poprun and `Checkpoints` take it.

Each run starts a small run (`faults_of/training.py`) on two instances under poprun, makes one fault, and lets the
training go on: by `--max-restarts` or by the same command again, chosen at random. A run is fine if poprun ends with
the right status and names the instance and the reason in time, no process, run folder or damaged checkpoint is left,
and all losses and the last weights equal those of an undisturbed run in every bit. The folder of a run that falls short
is kept.

    python benchmarks/faults.py [--times 20] [--only CASE] [--seed N] [--check]
"""

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from faults_of import cases, real_program, surroundings
from faults_of.runs import Started
from faults_of.trial import EVERY, PROGRAM, TRIES, Result, Trial, flags, poprun_words
from faults_of.twin import Twin, twin_of
from figures import Figures

APART = True  # it takes an hour: `make faults` runs it, and `make bench` does not
CASES: Final = {**cases.CASES, **surroundings.CASES}


def undisturbed(folder: Path, warm: int = 2) -> tuple[Twin, Path]:
    """Return the results of undisturbed runs, and a cache of compiled programs: one fills it, `warm` use it."""
    cache, runs = folder / "cache", list[Started]()
    for i in range(1 + warm):
        words = [*poprun_words(cache), sys.executable, str(PROGRAM), *flags(folder / f"checkpoints-{i}")]
        run = Started(words, folder, f"run-{i}")
        if run.end():
            raise RuntimeError(f"an undisturbed run ended with {run.process.returncode}:\n" + "\n".join(run.errors))
        runs.append(run)
    return twin_of(runs[0], runs[1:] or runs, EVERY), cache


def one_run(name: str, number: int, twin: Twin, cache: Path, folder: Path, seed: int) -> Result:
    """Return the result of one run of a case; its folder is kept if the run falls short."""
    make, phases = CASES[name]
    for attempt in range(TRIES):
        dice = random.Random(f"{seed} {name} {number} {attempt}")
        own = folder / f"{name.replace(' ', '-')}-{number}-{attempt}"
        own.mkdir()
        trial = Trial(own, twin, cache, dice)
        try:
            result = make(trial, phases[number % len(phases)])
        except surroundings.NoMountError as error:
            return Result("", problems=[str(error)])
        finally:
            for run in trial.started:
                run.kill_all()
                run.end(10)
        if result is not None:
            if problems := result.judge():
                (own / "short.txt").write_text("\n".join([result.moment, *problems]) + "\n")
            else:
                shutil.rmtree(own)
            return result
        shutil.rmtree(own)
    return Result("", problems=[f"{TRIES} moments in a row came after the end of the training"])


def add_case(figures: Figures, name: str, results: Sequence[Result]) -> None:
    """Print the figures of a case."""
    fine = sum(not result.judge() for result in results)
    figures.add(f"runs that are fine, {name}", fine, at_least=len(results))
    for what in ("found", "gone", "resumed", "lost"):
        shown = [(getattr(result, what), result.bounds.get(what)) for result in results]
        values = [(value, bound) for value, bound in shown if value is not None]
        if values:
            # each run has its own bound: take the value nearest to its bound, or farthest beyond it
            worst = max(values, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
            unit = "steps made again" if what == "lost" else f"{what} within, s"
            figures.add(f"{unit}, {name}", *worst)


def table(results: dict[str, list[Result]]) -> list[str]:
    """Return a table: for each case the largest figures of all its runs, with the medians in parentheses."""
    lines = [
        "| case | fine | found within, s | gone within, s | resumed within, s | lost steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_case in results.items():
        cells = [f"{sum(not result.judge() for result in of_case)} of {len(of_case)}"]
        for what in ("found", "gone", "resumed", "lost"):
            values = [value for result in of_case if (value := getattr(result, what)) is not None]
            digits = 0 if what == "lost" else 2
            median = statistics.median(values) if values else 0
            cells.append(f"{max(values):.{digits}f} ({median:.{digits}f})" if values else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=20, help="runs of each case (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", choices=[*CASES, real_program.NAME], help="this case; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the runs that fall short (default: a temporary one)")


def main(argv: list[str] | None = None) -> int:
    figures = Figures("faults: what happens to a training run that breaks at random moments", argv, arguments)
    args = figures.args
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=args.keep))
    began = time.monotonic()
    first = folder / "undisturbed"
    first.mkdir()
    twin, cache = undisturbed(first)
    print(
        f"undisturbed: first step after {twin.first_step:.2f} s, {twin.first_step_cold:.2f} s without a cache; "
        f"a step {twin.step:.3f} s, a save {twin.save:.3f} s, an interval {twin.interval:.3f} s",
        flush=True,
    )
    results: dict[str, list[Result]] = {}
    for name in args.only or [*CASES, real_program.NAME]:
        results[name] = []
        for number in range(args.times):
            since = time.monotonic()
            if name == real_program.NAME:
                result = real_program.one_run(number, folder, args.seed)
            else:
                result = one_run(name, number, twin, cache, folder, args.seed)
            results[name].append(result)
            problems = result.judge()
            shown = f"{result.figures()}: {'; '.join(problems) if problems else 'fine'}"
            print(
                f"  {name} {number + 1}/{args.times}, {time.monotonic() - since:.1f} s, {result.moment}; {shown}",
                flush=True,
            )
    for name, of_case in results.items():
        add_case(figures, name, of_case)
    print("\n" + "\n".join(table(results)))
    cleaned = sum(result.left_over for of_case in results.values() for result in of_case)
    print(f"\n{cleaned} leftovers of killed saves were named and removed by who resumed")
    print(f"\n{sum(map(len, results.values()))} runs in {time.monotonic() - began:.0f} s")
    if any(result.judge() for of_case in results.values() for result in of_case):
        print(f"what falls short is kept in {folder}")
    else:
        shutil.rmtree(folder)
    return figures.status()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that runs and disks are cleared away
    sys.exit(main())
