"""Run `torch.distributed.pipelining` as a rival, with one process per stage.

    with TorchPipeline(weights, batches) as rival:
        loss, gradients = rival.result("64x16", "1F1B")
        costs = rival.costs("64x16", "1F1B", threads=2, steps=3)

The processes run `torch_stage.py`, and `workers.py` starts and ends them. This file does not need torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from figures import Cost
from rivals_of.workers import Workers

SCHEDULES: Final = ("1F1B", "GPipe")
_PROGRAM: Final = Path(__file__).with_name("torch_stage.py")


class TorchPipeline(Workers):
    """The processes of one pipeline; use it in a `with`, which ends them all.

    Args:
        weights: `{"hidden.w": (P, H), "hidden.b": (H,), ...}` for "hidden", "features" and "classifier".
        batches: for each name, `{"images": (M, B, 28, 28) uint8, "labels": (M, B)}`.
        limit: seconds that the processes may take for one order. The first order also waits until they have started.
        program: the script that each process runs with its rank and a folder; tests give their own.

    Raises:
        RuntimeError: as for `Workers`.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        batches: Mapping[str, Mapping[str, np.ndarray]],
        *,
        limit: float = 120.0,
        program: Path = _PROGRAM,
    ):
        files = {"weights": weights, **{f"batch-{name}": batch for name, batch in batches.items()}}
        super().__init__("torch pipeline", program, files=files, each="stage", limit=limit)
        self._micro_batches = {name: len(batch["labels"]) for name, batch in batches.items()}

    def result(self, batch: str, schedule: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the mean loss over the micro-batches, and the gradients of the losses' sum, named like the weights."""
        self.order(do="result", batch=batch, count=self._micro_batches[batch], schedule=schedule, threads=1)
        found = {name: array for result in self.results() for name, array in result.items()}
        return found.pop("loss"), found

    def losses(self, batch: str, schedule: str, *, updates: int, rate: float, momentum: float) -> np.ndarray:
        """Return the mean loss before each update, (updates,): each uses the next of the batch's M / updates parts."""
        self.order(
            do="train",
            batch=batch,
            count=self._micro_batches[batch] // updates,
            schedule=schedule,
            threads=1,
            updates=updates,
            rate=rate,
            momentum=momentum,
        )
        return self.results()[-1]["losses"]

    def step_costs(self, batch: str, schedule: str, *, threads: int, steps: int) -> list[Cost]:
        """Return the cost of each step, as `Workers.costs` does."""
        order = {"batch": batch, "count": self._micro_batches[batch], "schedule": schedule}
        return self.costs(**order, threads=threads, steps=steps)
