"""Measure every schedule as users of a CPU run it: virtual IPUs share the cores, and one that waits uses none.

The model is the same as in part 3 of `schedules.py`: equal stages of relu layers, 16 micro-batches of 64 rows, on 2
virtual IPUs. Here a bubble hardly costs any time, since the working IPU has both cores. Each step is compared with the
unsharded program on both cores, in time and in CPU work.

    python benchmarks/shared_cores.py [--check]
"""

import sys

from figures import Figures, side_by_side
from ipu_jax import configure
from schedules import IPUS, MEASURED, equal_stages

MOST_TIME = {
    "sequential": 1.10,
    "grouped": 1.03,
    "interleaved": 1.05,
    "gpipe": 1.05,
    "1f1b": 1.05,
    "looped": 1.08,
    "zb-h1": 1.08,
    "zbv": 1.08,
}
MOST_WORK = 1.04


def main() -> int:
    figures = Figures("shared cores: what each schedule costs on a CPU beside the unsharded program")
    figures.shrink(__name__, MEASURED=("sequential",))
    figures.shrink("schedules", D=4, MICRO_BATCHES=2)
    configure(IPUS)
    dense, steps = equal_stages(MEASURED, rows=64, options={})
    whole, *costs = side_by_side(dense, *(step for _, step in steps.values()), rounds=20)
    for name, cost in zip(steps, costs, strict=True):
        figures.add(f"step time / unsharded, shared cores, {name}", (cost / whole).wall, MOST_TIME[name])
        figures.add(f"CPU work / unsharded, shared cores, {name}", (cost / whole).cpu, MOST_WORK)
    figures.add_spread("unsharded, shared cores", whole)
    for name, cost in zip(steps, costs, strict=True):
        figures.add_spread(f"{name}, shared cores", cost)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
