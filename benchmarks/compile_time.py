"""Measure whether compiling a pipeline takes longer with more micro-batches, or with more stages.

All stages are equal: four 1024x1024 relu layers each. There are 8 virtual IPUs, and each stage uses one of them. One
time is for XLA alone. The other is for everything that a first call waits for, including tracing and lowering.

    python benchmarks/compile_time.py [--check]
"""

import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from figures import Figures, median_ratio
from ipu_jax import Pipeline, Stage, configure
from pipeline import ROWS, WIDTH, layers

LAYERS_A_STAGE, MOST_STAGES, ROUNDS = 4, 8, 6


def mean_squared_error(_: None, y: Any, microbatch: Any) -> Any:
    return jnp.mean((y - microbatch["y"]) ** 2)


class Program:
    """A pipeline of equal stages, and for each round the seconds that compiling it took."""

    def __init__(self, stages: int, micro_batches: int):
        # all stages are the same function, so that they differ only in their places
        self.pipeline = Pipeline(
            [
                *(Stage(layers, params=f"part{i}", ipu=i) for i in range(stages)),
                Stage(mean_squared_error, ipu=stages - 1),
            ],
            gradient_accumulation=micro_batches,
        )
        weights = [np.zeros((WIDTH, WIDTH), np.float32)] * LAYERS_A_STAGE
        self.params = self.pipeline.shard({f"part{i}": weights for i in range(stages)})
        self.batch = {key: np.zeros((micro_batches, ROWS, WIDTH), np.float32) for key in ("x", "y")}
        self.compile: list[float] = []
        self.all: list[float] = []

    def measure(self) -> None:
        jax.clear_caches()  # otherwise a traced function is not traced again
        started = time.perf_counter()
        lowered = jax.jit(self.pipeline.value_and_grad).lower(self.params, self.batch)
        traced = time.perf_counter()
        lowered.compile()
        ended = time.perf_counter()
        self.compile.append(ended - traced)
        self.all.append(ended - started)


def main() -> int:
    figures = Figures("compile time of a pipeline as its micro-batches and its stages grow")
    figures.shrink(__name__, WIDTH=4, ROWS=2, LAYERS_A_STAGE=1, MOST_STAGES=4, ROUNDS=1)
    configure(MOST_STAGES)
    few_batches, many_batches, many_stages = Program(2, 4), Program(2, 64), Program(MOST_STAGES, 4)
    for _ in range(ROUNDS):
        for program in (few_batches, many_batches, many_stages):
            program.measure()
    for what, more, most in (
        ("M=64 / M=4, 2 stages", many_batches, 1.10),
        (f"{MOST_STAGES} stages / 2 stages, M=4", many_stages, 2.0),
    ):
        figures.add(f"compile time, {what}", median_ratio(more.compile, few_batches.compile), most)
        figures.add(f"compile time with tracing and lowering, {what}", median_ratio(more.all, few_batches.all), most)
    figures.add("compile time with tracing and lowering, 2 stages, M=4, seconds", statistics.median(few_batches.all))
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
