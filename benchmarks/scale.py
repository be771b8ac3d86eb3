"""Say how schedules scale: bubble, bytes sent and stash per IPU for 8 to 1,024 IPUs and up to 4,096 micro-batches.

The figures come from closed forms. These hold for S IPUs, where S is a power of two of at least 8, and M micro-batches,
where M is a multiple of 2 S. An IPU's whole share of the model costs F = B = W = 1, and there are two stages per IPU
under the schedules that need several. The script compares each closed form with the simulated table of `make_schedule`
for 8 to 64 IPUs. With `--full` it also does so for 1,024 IPUs, and reports how long such a table takes. No closed form
gives the bubble of "zbv": the formula shown is a lower bound.

Units: the stash is counted in micro-batches of an IPU's whole share. A message is y or dx of one micro-batch between
two stages. Messages that an IPU sends to itself are not counted.

    python benchmarks/scale.py [--check] [--full] [--table]
"""

import argparse
import sys
import time
from collections.abc import Iterator

from figures import Figures
from ipu_jax import make_schedule
from ipu_jax.schedules import SCHEDULES, Schedule

ROUNDS = 2  # stages per IPU under the looped and folded schedules
FLAGS = ("--full",)  # run_all.py calls this script with these
SHOWN = (
    *((8, m) for m in (16, 256, 4096)),
    *((64, m) for m in (128, 1024, 4096)),
    *((256, m) for m in (512, 4096)),
    *((1024, m) for m in (2048, 4096)),
)
CHECKED = tuple((s, m * s) for s in (8, 16, 32, 64) for m in (2, 4))
LARGEST = (1024, 2048)
SECONDS = 60.0  # CPU time for the table of the largest size

# one sequence of 8,192 tokens per micro-batch, two bytes per feature
MODELS = {"Llama 3 8B": 8192 * 4096 * 2, "Llama 3 70B": 8192 * 8192 * 2}

ZBV = 0.03  # the bubble of "zbv" is above its closed form by at most this

_SEVERAL_STAGES = ("looped", "looped-bfs", "looped-zb", "zbv", "zb-wave", "dualpipev")


def makespan(name: str, s: int, m: int) -> float:
    """Return the time of a step, in which an IPU works for 3 M; under "zbv" the real time is a little longer."""
    if name == "sequential":
        return 3 * s * m
    if name in ("looped", "looped-bfs"):
        return 3 * (m + (s - 1) / ROUNDS)
    if name in ("grouped-zb", "zb-h1"):
        return 3 * m + s - 1
    if name in ("looped-zb", "zbv", "zb-wave", "dualpipev"):
        return 3 * m + (s - 1) / ROUNDS
    return 3 * (m + s - 1)


def bubble(name: str, s: int, m: int) -> float:
    return 1 - 3 * m / makespan(name, s, m)


def stash(name: str, s: int, m: int) -> float:
    """Return the stash of the fullest IPU."""
    if name == "sequential":
        return 1
    if name in ("gpipe", "looped-bfs"):
        return m
    if name in ("grouped", "grouped-zb"):
        return 2 * s - 1
    if name in ("looped", "looped-zb"):  # a group of S micro-batches waits for each additional round
        return (2 * (s - 1) + (ROUNDS - 1) * s + 1) / ROUNDS
    return s + (name == "dualpipev")


def messages(name: str, m: int) -> int:
    """Return how many messages an IPU that is not at an end sends in a step: y and dx of each of its stages."""
    return 2 * m * (ROUNDS if name in _SEVERAL_STAGES else 1)


def messages_of(schedule: Schedule) -> int:
    """Return how many messages the busiest IPU sends, counted in the placement."""
    sends = [0] * schedule.ipus
    for here, there in zip(schedule.placement, schedule.placement[1:], strict=False):
        if here is not None and there is not None and here != there:
            sends[here] += schedule.micro_batches  # y
            sends[there] += schedule.micro_batches  # dx
    return max(sends)


def check_figures(figures: Figures) -> None:
    sizes = (*CHECKED, LARGEST) if figures.args.full else CHECKED
    for name in SCHEDULES:
        worst = [0.0, 0.0, 0.0]
        seconds = 0.0
        for s, m in sizes:
            if name == "sequential" and (s, m) == LARGEST:
                continue  # four million ticks, one after the other
            before = time.process_time()
            schedule = make_schedule(name, ipus=s, gradient_accumulation=m)
            seconds = time.process_time() - before
            run = schedule.simulate(forward=1, backward=2, weight=1)
            share = len(schedule.placement) / s  # stages per IPU
            found = run.bubble, max(run.peak_stash) / share, messages_of(schedule)
            formulas = bubble(name, s, m), stash(name, s, m), messages(name, m)
            # no bubble is below its closed form, except by rounding
            assert found[0] >= formulas[0] - 1e-9, f"{name}, {s} IPUs, {m} micro-batches: {found[0]} < {formulas[0]}"
            worst = [max(w, abs(f - e)) for w, f, e in zip(worst, found, formulas, strict=True)]
        for what, difference in zip(("bubble", "stash", "messages"), worst, strict=True):
            bound = ZBV if (what, name) == ("bubble", "zbv") else 1e-9
            figures.add(f"{what}, largest difference from the closed form, {name}", difference, bound)
        if figures.args.full and name != "sequential":
            figures.add(f"seconds of CPU for 1,024 IPUs x 2,048 micro-batches, {name}", seconds, SECONDS)


def table() -> Iterator[str]:
    """Yield the lines of the tables of docs/measured.md; schedules with the same figures share a line."""
    sizes = (8, 64, 256, 1024)
    yield from _rows(
        ["bubble", *(f"S={s}, M={m}" for s, m in SHOWN)],
        {name: [f"{'≥ ' * (name == 'zbv')}{bubble(name, s, m):.1%}" for s, m in SHOWN] for name in SCHEDULES},
    )
    yield from _rows(
        ["M=4096", *(f"stash, S={s}" for s in sizes)],
        {name: [f"{stash(name, s, 4096):g}" for s in sizes] for name in SCHEDULES},
    )
    yield from _rows(
        ["sent per IPU and step", "messages, M=256", "M=4096", *(f"{model}, M=4096" for model in MODELS)],
        {
            name: [
                *(f"{messages(name, m):,}" for m in (256, 4096)),
                *(f"{messages(name, 4096) * size / 1e12:.2f} TB" for size in MODELS.values()),
            ]
            for name in SCHEDULES
        },
    )


def _rows(titles: list[str], cells: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines of one table, and an empty line."""
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    names: dict[str, list[str]] = {}
    for name, row in cells.items():
        names.setdefault(" | ".join(row), []).append(name)
    yield from (f"| {', '.join(alike)} | {row} |" for row, alike in names.items())
    yield ""


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", action="store_true", help="print the tables, and no figures")
    parser.add_argument("--full", action="store_true", help="make and check tables of 1,024 IPUs as well: minutes")


def main() -> int:
    figures = Figures("scale: bubble, messages and stash of each schedule for up to 1,024 IPUs", flags=_flags)
    figures.shrink(__name__, CHECKED=((8, 16),))
    if figures.args.table:
        print("\n".join(table()))
    else:
        check_figures(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
