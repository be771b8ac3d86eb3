"""Measure which number of threads in XLA's pool makes a pipeline of 2, 4, 8 and 16 virtual IPUs fastest on a CPU.

The model is 16 relu layers of 512x512, evenly spread over the IPUs, under "grouped" and "1f1b", with 16 micro-batches
of 64 rows. XLA reads the size of its pool when its backend starts, so each size runs in a process of its own. This
process compares each schedule with the unsharded program. `configure` makes one thread per core and one per IPU.

    python benchmarks/thread_pool.py [--check]
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial

import jax

from figures import Figures, side_by_side
from ipu_jax import Pipeline, Stage, configure
from schedules import layers, squared_error, step_of, unsharded

IPUS = (2, 4, 8, 16)
SCHEDULES = ("grouped", "1f1b")
LAYERS, D, ROWS, MICRO_BATCHES, ROUNDS = 16, 512, 64, 16, 12
FLAGS_OF_CHILDREN = ()


def pools(ipus: int, cores: int) -> dict[str, int]:
    """Return sizes of the pool by their names."""
    return {
        "cores": cores,
        "cores + IPUs / 2": cores + ipus // 2,
        "cores + IPUs": cores + ipus,
        "cores + 2 IPUs": cores + 2 * ipus,
    }


def measure(ipus: int) -> dict[str, float]:
    """Return, by schedule, the step time relative to the unsharded program's in this process."""
    configure(ipus)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (D, D)) * (2 / D) ** 0.5 for key in keys]
    each = LAYERS // ipus
    params = {f"layers{i:02}": weights[each * i : each * (i + 1)] for i in range(ipus)}
    x, y = jax.random.normal(jax.random.key(1), (2, MICRO_BATCHES, ROWS, D))
    batch = {"x": x, "y": y}
    stages = [Stage(layers, params=f"layers{i:02}", ipu=i) for i in range(ipus)]
    stages.append(Stage(squared_error, ipu=ipus - 1))
    steps = [
        step_of(Pipeline(stages, schedule=name, gradient_accumulation=MICRO_BATCHES), params, batch, options={})
        for name in SCHEDULES
    ]
    dense = partial(jax.jit(partial(unsharded, loss=squared_error)), params, batch=batch)
    whole, *costs = side_by_side(dense, *steps, rounds=ROUNDS)
    return {name: (cost / whole).wall for name, cost in zip(SCHEDULES, costs, strict=True)}


def measured_with(threads: int, ipus: int) -> dict[str, float]:
    """Return the result of `measure` in a process whose pool has `threads` threads."""
    command = [sys.executable, __file__, "--child", str(ipus), *FLAGS_OF_CHILDREN]
    done = subprocess.run(
        command, env=os.environ | {"PJRT_NPROC": str(threads)}, stdout=subprocess.PIPE, timeout=600, check=True
    )
    return json.loads(done.stdout)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)


def main() -> int:
    figures = Figures("the size of XLA's thread pool: which one makes a pipeline fastest on a CPU", flags=flags)
    one_pool = lambda ipus, cores: {"cores + IPUs": cores + ipus}
    figures.shrink(
        __name__,
        IPUS=(2,),
        SCHEDULES=("grouped",),
        D=4,
        MICRO_BATCHES=2,
        pools=one_pool,
        FLAGS_OF_CHILDREN=("--smallest",),
    )
    if figures.args.child is not None:
        print(json.dumps(measure(figures.args.child)))
        return 0
    cores = len(os.sched_getaffinity(0))
    for ipus in IPUS:
        found = {name: measured_with(threads, ipus) for name, threads in pools(ipus, cores).items()}
        for schedule in SCHEDULES:
            for name, ratios in found.items():
                figures.add(f"step time / unsharded, {ipus} IPUs, {schedule}, threads: {name}", ratios[schedule])
            best = min(ratios[schedule] for ratios in found.values())
            figures.add(
                f"cores + IPUs / the best, {ipus} IPUs, {schedule}", found["cores + IPUs"][schedule] / best, 1.1
            )
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
