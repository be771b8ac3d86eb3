"""Measure what saving costs the steps around it, its bytes on disk and in memory, and how long restoring takes.

The program is the training step of the MNIST example with adam, in basic mode on two IPUs. A round is 50 steps; rounds
with a checkpoint saved at the beginning and rounds without take turns in one run.

    python benchmarks/checkpoints.py [--check]
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from figures import Cost, Costs, Figures, cost_of, side_by_side
from ipu_jax import Checkpoints, Feed, configure, make_train_step
from ipu_jax.steps import TrainState
from mnist_example.model import init_params, make_pipeline

STEPS = 50
ROUNDS = 5
ROWS, MICRO_BATCHES = 64, 4


def resident_bytes() -> int:
    """Return how much of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Measures the process's memory every millisecond in a `with` block, and keeps the maximum."""

    def __enter__(self) -> "PeakMemory":
        self.most = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, resident_bytes())


class Training:
    """The steps of one continuing training."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        source = {
            "images": rng.uniform(size=(4096, 28, 28)).astype(np.float32),
            "labels": rng.integers(0, 10, 4096).astype(np.int32),
        }
        one = {name: leaf[:ROWS] for name, leaf in source.items()}
        pipeline = make_pipeline("basic", one, gradient_accumulation=MICRO_BATCHES)
        self.step = make_train_step(pipeline, optax.adam(1e-3))
        self.state: TrainState = self.first()
        options: dict[str, Any] = {"micro_batch": ROWS, "gradient_accumulation": MICRO_BATCHES}
        with Feed(source, mesh=pipeline.mesh, **options) as feed:
            self.batches = [next(feed).data for _ in range(8)]

    def first(self) -> TrainState:
        return self.step.init(init_params(0))

    def steps(self, checkpoints: Checkpoints | None = None, count: int = STEPS) -> Any:
        """Run the steps of a round, with or without a save at its beginning."""
        loss: Any = None
        for i in range(count):
            self.state, outputs = self.step(self.state, self.batches[i % len(self.batches)])
            if checkpoints is not None:
                checkpoints.save(self.state, now=i == 0)
            loss = outputs.loss
        return loss


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def held_bytes(state: TrainState) -> int:
    """Return the bytes of a state; values that several IPUs hold count once."""
    return sum(array.nbytes for array in jax.tree.leaves(state))


def read(folder: Path) -> int:
    """Read the bytes of a checkpoint and drop them."""
    return sum(len(path.read_bytes()) for path in files_in(folder))


def main() -> int:
    figures = Figures("checkpoints: steps while one is saved over steps without, bytes, memory, time to restore")
    figures.shrink(__name__, STEPS=2, ROUNDS=1, ROWS=2, MICRO_BATCHES=2)
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    configure(2)
    training = Training()
    held = held_bytes(training.state)
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, training.step, keep=1) as checkpoints:
        training.steps(checkpoints, count=2)  # compiles
        checkpoints.wait()
        blocked: list[float] = []
        plain, saving = side_by_side(training.steps, lambda: training.steps(checkpoints), rounds=ROUNDS, warm_up=1)
        figures.add(f"{STEPS} steps with a save / without", (saving / plain).wall, 1.05)
        figures.add("CPU work of these / without", (saving / plain).cpu)
        figures.add_spread(f"{STEPS} steps", plain)
        work: list[float] = []
        for _ in range(ROUNDS):
            jax.block_until_ready(training.steps(count=1))
            begin, cpu = time.perf_counter(), time.process_time()
            checkpoints.save(training.state, now=True)
            blocked.append(time.perf_counter() - begin)
            checkpoints.wait()
            work.append(time.process_time() - cpu)
        figures.add(f"CPU work of a save alone / of {STEPS} steps", sorted(work)[ROUNDS // 2] / plain.cpu, 0.05)
        a_step = plain.wall / STEPS
        figures.add("save() until the next step may begin / a step", sorted(blocked)[ROUNDS // 2] / a_step)

        checkpoints.wait()
        with PeakMemory() as alone:
            jax.block_until_ready(training.steps())
        with PeakMemory() as saved:
            jax.block_until_ready(training.steps(checkpoints))
            checkpoints.wait()
        added = (saved.most - alone.most) / held
        figures.add("memory that a save adds / the state of this host's IPUs", added, 1.2)

        last = Path(folder) / f"step-{checkpoints.last}"
        written = sum(path.stat().st_size for path in files_in(last))
        figures.add("bytes written / bytes of the state", written / held, 1.05)
        figures.add("bytes of the state, MB", held / 1e6)

        like, calls = training.first(), list[tuple[Cost, Cost]]()
        restored: Callable[[], Any] = lambda: checkpoints.restore(like)
        for _ in range(ROUNDS):
            calls.append((cost_of(lambda: read(last)), cost_of(lambda: restored().state)))
        reading, restoring = (Costs([pair[i] for pair in calls]) for i in (0, 1))
        figures.add("restore, checksums and all / reading the bytes", (restoring / reading).wall)
        figures.add("restore, s", restoring.wall)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
