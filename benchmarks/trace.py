"""Measure what recording a trace costs the steps that are recorded, and that it costs the others nothing.

The program is the training step of the MNIST example, in basic mode on two IPUs. A round is 6 recorded steps and 6
steps that are not recorded, in turn in one run. Starting and stopping the profiler is not part of a step; it has its
own figure.

    python benchmarks/trace.py [--check]
"""

import contextlib
import re
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax

from figures import Cost, Costs, Figures, cost_of
from ipu_jax import configure, make_train_step
from ipu_jax.observe import trace
from ipu_jax.steps import TrainStep
from mnist_example.model import init_params, make_pipeline

STEPS = 6
ROUNDS = 7
ROWS, MICRO_BATCHES = 64, 4


class Training:
    """The steps of one continuing training."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.batch = {
            "images": rng.uniform(size=(MICRO_BATCHES, ROWS, 28, 28)).astype(np.float32),
            "labels": rng.integers(0, 10, (MICRO_BATCHES, ROWS)).astype(np.int32),
        }
        self.step = new_step(self.batch)
        self.state: Any = self.step.init(init_params(0))

    def steps(self, count: int = STEPS) -> Cost:
        """Run steps and return their cost."""

        def run() -> Any:
            outputs: Any = None
            for _ in range(count):
                self.state, outputs = self.step(self.state, self.batch)
            return outputs.loss

        return cost_of(run)

    def recorded_steps(self, folder: str) -> tuple[Cost, float]:
        """Run steps while they are recorded; return their cost, and the seconds that everything else took."""
        begin = time.perf_counter()
        with trace(folder, steps=2 * STEPS):
            before = self.steps(1)  # the profiler starts at the end of this step
            cost = self.steps()
        return cost, time.perf_counter() - begin - before.wall - cost.wall


def new_step(batch: Any) -> TrainStep:
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    return make_train_step(make_pipeline("basic", one, gradient_accumulation=MICRO_BATCHES), optax.sgd(1e-2))


def compiled_lines(training: Training, *, named: bool) -> list[str]:
    """Compile the step again, and return the program without operation names; `named` says if ours must be in it."""
    text = new_step(training.batch).lower(training.state, training.batch).compile().as_text()
    assert ("ipu_jax.plan." in text) == named, "it would be compared with itself"
    # names of operations, and the tables of source lines that they refer to
    return re.sub(r", metadata=\{[^}]*\}", "", text.partition("\nFileNames")[0]).splitlines()


def main() -> int:
    figures = Figures("trace: steps that are recorded over steps that are not")
    figures.shrink(__name__, STEPS=1, ROUNDS=1, ROWS=2, MICRO_BATCHES=2)
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    configure(2)
    training = Training()
    with mock.patch.object(jax, "named_scope", return_value=contextlib.nullcontext()):
        unnamed = compiled_lines(training, named=False)
    named = compiled_lines(training, named=True)
    differing = sum(a != b for a, b in zip(named, unnamed, strict=False)) + abs(len(named) - len(unnamed))
    figures.add("lines of the compiled program that names change", differing, 0)
    training.steps()
    plain: list[Cost] = []
    recorded: list[Cost] = []
    around: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            plain.append(training.steps())
            cost, rest = training.recorded_steps(folder)
            recorded.append(cost)
            around.append(rest)
    ratio = Costs(recorded) / Costs(plain)
    figures.add("CPU work of recorded steps / of others", ratio.cpu, 1.05)
    figures.add("time of recorded steps / of others", ratio.wall, 1.05)
    figures.add_spread(f"{STEPS} steps", Costs(plain))
    figures.add("starting, stopping, reading and writing, s", sorted(around)[ROUNDS // 2])
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
