"""Measure what equal bits cost: `verify(exact=True)` beside `verify`, and exact training beside the default.

The GPT of from_function.py is cut for 4 virtual IPUs, with stacked or listed layers. A verification is measured in CPU
work, from tracing on, since it is mostly compiling. Its pipelines are new, so that nothing is compiled already.

    python benchmarks/verify.py [--check]
"""

import itertools
import sys
import time
from typing import Any

import jax
import optax

from figures import Figures, Program, side_by_side
from from_function import init_params, loss
from gpt import Sizes, random_batch
from ipu_jax import Pipeline, TrainOptions, configure, make_train_step, verify

SIZES = Sizes(vocabulary=256, length=32, features=128, heads=4, layers=8)
IPUS, MICRO_BATCHES, SEQUENCES, ROUNDS, REPEATS = 4, 8, 4, 20, 2


def compare(figures: Figures, schedule: str, *, scan: bool) -> None:
    """Compare both verifications of one model, and both of its training steps."""
    params, batch = init_params(SIZES, scan=scan), random_batch(SIZES, MICRO_BATCHES, SEQUENCES)
    how: dict[str, Any] = {"ipus": IPUS, "schedule": schedule, "gradient_accumulation": MICRO_BATCHES}
    cut = lambda: Pipeline.from_function(loss, params, jax.tree.map(lambda leaf: leaf[0], batch), **how)
    cpu: dict[bool, list[float]] = {False: [], True: []}
    errors: list[float] = []
    for _, exact in itertools.product(range(REPEATS), cpu):
        pipeline = cut()
        weights, before = pipeline.shard(params), time.process_time()
        errors.append(verify(pipeline, weights, batch, exact=exact).worst[1])
        cpu[exact].append(time.process_time() - before)
    name = f"{'stacked' if scan else 'listed'} layers, {schedule}"
    figures.add(f"exact gradients, largest relative difference to the function, {name}", errors[-1], 1e-5)
    figures.add(f"CPU work of verify, exact / default, {name}", min(cpu[True]) / min(cpu[False]), 1.5)
    pipeline, programs, temporary = cut(), list[Program](), list[int]()
    batch = jax.device_put(batch, jax.NamedSharding(pipeline.mesh, jax.P()))
    for exact in (False, True):
        step = make_train_step(pipeline, optax.adamw(1e-3), TrainOptions(exact=exact, donate=False))
        state = step.init(params)
        programs.append(Program(step, (state, batch)))
        memory: Any = step.lower(state, batch).compile().memory_analysis()
        temporary.append(memory.temp_size_in_bytes)
    default, exact_costs = side_by_side(*programs, rounds=ROUNDS)
    figures.add(f"CPU work of training, exact / default, {name}", (exact_costs / default).cpu, 1.02)
    figures.add(f"temporary bytes of training, exact / default, {name}", temporary[1] / temporary[0], 1.1)


def main() -> int:
    figures = Figures("what equal bits cost, in verify and in training")
    smallest = Sizes(vocabulary=11, length=4, features=8, heads=2, layers=4)
    figures.shrink(__name__, SIZES=smallest, MICRO_BATCHES=2, REPEATS=1)
    configure(IPUS)
    for scan in (True, False):
        compare(figures, "1f1b", scan=scan)
    compare(figures, "zb-h1", scan=True)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
