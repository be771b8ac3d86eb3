"""Measure what it costs to have two replicas on two host processes (instances) rather than on one.

The program is the MNIST example's network with plain SGD, on two replicas of one virtual IPU each. Two instances, which
exchange gradients by gloo over the loopback, are compared with one process that has both replicas, and with one program
that has the whole batch and both cores. `DDP` is torch's `DistributedDataParallel` with two processes over gloo. It is
compared with one torch process that computes the whole batch with two threads. An overhead is the step time of two
processes relative to one program of the same framework. CPU work is the sum over all processes. All programs run in
turn.

Start-up is the time from starting the command to the first step's loss, with a warm executable cache. The figure is for
poprun with two instances relative to one process with two replicas. The first call of a step compares what the
instances are about to run: it is timed with the comparison and without (`popdist.init(check_programs=False)`), in turn.

    python benchmarks/instances.py [--check]
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from figures import Cost, Figures, in_turn, median_ratio
from mnist_example.model import init_params
from replicas import REPLICAS, named
from rivals_of.torch_pipeline import TorchPipeline
from rivals_of.workers import NEEDS_TORCH, Workers, torch_is_installed

ROUNDS, STEPS, STARTS, COMPARISONS = 12, 5, 7, 10
OURS = Path(__file__).with_name("rivals_of") / "jax_instance.py"
TORCH = Path(__file__).with_name("rivals_of") / "torch_replica.py"
FIRST_STEP = Path(__file__).with_name("rivals_of") / "first_step.py"
POPRUN = [sys.executable, "-m", "ipu_jax.distributed.poprun", "--num-replicas", "2", "--num-instances", "2"]
# global batch, bound for step time of 2 instances / 1 instance with 2 replicas, bound for our overhead / torch's
SIZES = ((256, 1.8, 1.0), (2048, 1.15, 1.0))
KINDS = ("replicated", "sharded")


def batches() -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return {
        str(size): {
            "images": random.integers(0, 256, (REPLICAS, size // REPLICAS, 28, 28), np.uint8),
            "labels": random.integers(0, 10, (REPLICAS, size // REPLICAS), np.int32),
        }
        for size, *_ in SIZES
    }


def instances(count: int, files: dict[str, Any]) -> Workers:
    """Return the processes of one of our runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        run = {"instances": np.array(count), "port": np.array(free.getsockname()[1])}
    return Workers("instances", OURS, files={**files, "run": run}, count=count, each="instance")


def step_figures(figures: Figures, rounds: int) -> None:
    fed, start = batches(), named(init_params(0))
    files = {"weights": start, **{f"batch-{name}": batch for name, batch in fed.items()}}
    with instances(2, files) as two, instances(1, files) as one:
        for size, most, _ in SIZES:
            name = str(size)
            check_results(figures, two, one, name)
            programs: dict[str, Callable[[], list[Cost]]] = {"alone": steps_of(one, name, program="alone")}
            for kind in KINDS:
                programs[f"{kind}, 2 instances"] = steps_of(two, name, program=kind)
                programs[f"{kind}, 1 instance"] = steps_of(one, name, program=kind)
            costs = in_turn(programs, rounds)
            for kind in KINDS:
                of_two, where = costs[f"{kind}, 2 instances"], f"{kind}, batch {name}"
                ratio = of_two / costs[f"{kind}, 1 instance"]
                figures.add(
                    f"step time, 2 instances / 1 instance, {where}", ratio.wall, most if kind == "sharded" else None
                )
                figures.add(f"CPU work, 2 instances / 1 instance, {where}", ratio.cpu)
                of_whole = (of_two / costs["alone"]).wall
                figures.add(f"step time, 2 instances / one program on both cores, {where}", of_whole)
        for kind in KINDS:
            (answer, _) = two.order(do="collectives", program=kind, batch=str(SIZES[0][0]))
            for collective, (count, _) in answer["collectives"].items():
                figures.add(f"{collective}s in a step of 2 instances, {kind}", count, 4)
        if torch_is_installed():
            torch_figures(figures, two, one, start, fed, rounds)
        else:
            figures.leave_out("torch's DistributedDataParallel", NEEDS_TORCH)


def check_results(figures: Figures, two: Workers, one: Workers, batch: str) -> None:
    """Compare the loss and the weights after one update of both runs."""
    for workers in (two, one):
        workers.order(do="result", program="sharded", batch=batch)
    (found, other), (expected,) = two.results(), one.results()
    worst = max(
        float(np.abs(result[name] - array).max() / np.abs(array).max())
        for result in (found, other)
        for name, array in expected.items()
    )
    figures.add(f"loss and weights, 2 instances / 1 instance, relative difference, batch {batch}", worst, 1e-5)


def torch_figures(
    figures: Figures, two: Workers, one: Workers, start: dict[str, Any], fed: dict[str, Any], rounds: int
) -> None:
    with TorchPipeline(start, fed, program=TORCH) as torch:
        for size, _, bound in SIZES:
            name = str(size)
            costs = in_turn(
                {
                    "ours": steps_of(two, name, program="sharded"),
                    "our one": steps_of(one, name, program="alone"),
                    "DDP": steps_of(torch, name, threads=1),
                    "torch's one": steps_of(torch, name, do="alone", threads=2),
                },
                rounds,
            )
            for what, over in (
                ("DDP / torch on both cores", costs["DDP"] / costs["torch's one"]),
                ("2 instances / DDP, sharded", costs["ours"] / costs["DDP"]),
            ):
                figures.add(f"step time, {what}, batch {name}", over.wall)
                figures.add(f"CPU work, {what}, batch {name}", over.cpu)
            overheads = [
                [a.wall / b.wall for a, b in zip(costs[ours].calls, costs[base].calls, strict=True)]
                for ours, base in (("ours", "our one"), ("DDP", "torch's one"))
            ]
            figures.add(f"overhead of 2 instances / DDP's, sharded, batch {name}", median_ratio(*overheads), bound)


def steps_of(workers: Workers, batch: str, **order: Any) -> Callable[[], list[Cost]]:
    return partial(workers.costs, batch=batch, steps=STEPS, **order)


def start_figures(figures: Figures, rounds: int) -> None:
    """Start both commands in turn, each with its own cache, which its first start fills."""
    with tempfile.TemporaryDirectory(prefix="instances-") as folder:
        program, own = [sys.executable, str(FIRST_STEP)], ["--executable-cache-path", str(Path(folder, "poprun"))]
        commands = {"poprun": [*POPRUN, *own, *program], "alone": program}
        costs = in_turn(
            {name: lambda n=name, c=command: [start_of(c, Path(folder, n))] for name, command in commands.items()},
            rounds,
        )
    what = "to the first step's loss, poprun with 2 instances / 1 process, warm cache"
    ratio = costs["poprun"] / costs["alone"]
    figures.add(f"time {what}", ratio.wall, 1.3)
    figures.add(f"CPU work {what}", ratio.cpu)


def comparison_figures(figures: Figures, rounds: int) -> None:
    """Make the first call on two instances with the comparison of programs and without, in turn."""
    with tempfile.TemporaryDirectory(prefix="instances-") as folder:
        command = [*POPRUN, "--executable-cache-path", str(Path(folder, "poprun")), sys.executable, str(FIRST_STEP)]
        seconds: dict[str, list[float]] = {"checked": [], "unchecked": []}
        for number in range(rounds + 1):
            for name, of_name in seconds.items():
                done = ended([*command, name], Path(folder))
                of_name += [float(done.partition("call=")[2].split()[0])] * bool(number)  # the first fills the cache
    more = statistics.median(seconds["checked"]) - statistics.median(seconds["unchecked"])
    figures.add("first call of 2 instances, more for comparing programs, ms, warm cache", 1000 * more, 50)


def start_of(command: list[str], cache: Path) -> Cost:
    """Return the time from a command's start to the loss that it prints, and the CPU time of all its processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    printed = ended(command, cache)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    at = float(printed.partition("time=")[2].split()[0])
    return Cost(at - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def ended(command: list[str], cache: Path) -> str:
    """Return what a command has printed. It must end with status 0."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("steps", "start"), help="measure a part only")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of steps (default: %(default)s)")


def main() -> int:
    figures = Figures("instances: two replicas on two host processes over both on one, beside torch's", flags=flags)
    figures.shrink(__name__, SIZES=((8, None, None),), KINDS=("sharded",), STEPS=1, STARTS=1, COMPARISONS=1)
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    rounds = 1 if figures.args.smallest else figures.args.rounds
    jax.config.update("jax_platforms", "cpu")  # this process only makes the weights
    if figures.args.only != "start":
        step_figures(figures, rounds)
    if figures.args.only != "steps":
        start_figures(figures, min(rounds, STARTS))
        comparison_figures(figures, min(rounds, COMPARISONS))
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
