"""Measure how many examples per second the lesson on distributed training reaches in each of its steps.

It runs `examples/distributed.py`, which decodes examples one by one in Python, and runs it again with a wait for each
example, as if it were read from a slow disk. Threads of the feed help where reading waits. Decoding holds Python's
lock, so for decoding only instances help. Rates are relative to one replica's in the same round.

    python benchmarks/distributed_lesson.py [--check] [--plot docs/pictures/distributed.png]
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from figures import Figures

ROOT = Path(__file__).parents[1]
ROUNDS = 3
PICTURE = "docs/pictures/distributed.png"
PYTHON = [sys.executable, "-m", "examples.distributed"]
# waiting for one example takes as long as decoding a few of them
WAIT = ("--wait", "0.002")
POPRUN = [sys.executable, "-m", "ipu_jax.distributed.poprun", "--num-replicas", "8", "--num-instances"]
STEPS = {
    "1 replica": [*PYTHON, "--replicas", "1"],
    "8 replicas": [*PYTHON, "--replicas", "8"],
    "8 replicas, only reading": [*PYTHON, "--replicas", "8", "--only-read"],
    "8 replicas, 4 workers": [*PYTHON, "--replicas", "8", "--workers", "4"],
    "8 replicas on 2 instances": [*POPRUN, "2", *PYTHON],
    "8 replicas on 2 instances, 4 workers": [*POPRUN, "2", *PYTHON, "--workers", "4"],
}
KINDS = {"decoding": [], "waiting": [*WAIT]}
# the lesson says that these are reached
BOUNDS = {
    ("decoding", "8 replicas on 2 instances"): 1.2,
    ("waiting", "8 replicas, 4 workers"): 1.5,
}


def rate_of(command: list[str]) -> float:
    """Return the examples per second that a command prints, over all epochs except the first, which compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rates = [float(text.replace(",", "")) for text in re.findall(r"([\d,]+) examples/s", done.stdout)]
    return statistics.harmonic_mean(rates[1:])


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """Return, for each kind of reading and each step, the median over rounds of the rate relative to one replica's."""
    found: dict[str, dict[str, list[float]]] = {kind: {step: [] for step in STEPS} for kind in KINDS}
    for _ in range(rounds):
        for kind, flags in KINDS.items():
            rates = {step: rate_of([*command, *flags]) for step, command in STEPS.items()}
            for step, rate in rates.items():
                found[kind][step].append(rate / rates["1 replica"])
    return {kind: {step: statistics.median(of) for step, of in steps.items()} for kind, steps in found.items()}


def draw(ratios: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure  # an extra, and slow to import

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    names, height = list(STEPS), 0.38
    colours = {"decoding": "#08519c", "waiting": "#fd8d3c"}
    titles = {"decoding": "Python decodes", "waiting": "reading also waits, 2 ms an example"}
    for k, (kind, steps) in enumerate(ratios.items()):
        at = [row + (k - 0.5) * height for row in range(len(names))]
        bars = axes.barh(at, [steps[name] for name in names], height, color=colours[kind], label=titles[kind])
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("examples per second, over those of one replica")
    axes.set_title("What makes the training faster: 2 cores, one host")
    axes.legend(loc="upper right", fontsize=9)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)


def main() -> int:
    def flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
        parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")

    figures = Figures("distributed_lesson: examples per second of each step of the lesson", flags=flags)
    smallest = {"1 replica": [*PYTHON, "--replicas", "1", "--examples", "512", "--epochs", "2"]}
    figures.shrink(__name__, STEPS=smallest, KINDS={"decoding": []})
    ratios = measured(1 if figures.args.smallest else figures.args.rounds)
    for kind, steps in ratios.items():
        for step, ratio in steps.items():
            figures.add(f"examples/s / one replica's, {kind}, {step}", ratio, at_least=BOUNDS.get((kind, step)))
    if figures.args.plot is not None:
        draw(ratios, figures.args.plot)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
