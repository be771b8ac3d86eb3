"""`torch.distributed.pipelining` as a rival: a process a stage.

    with TorchPipeline(weights, batches) as rival:
        loss, gradients = rival.result("64x16", "1F1B")
        costs = rival.costs("64x16", "1F1B", threads=2, steps=3)

`torch_stage.py` is what the processes run, `workers.py` what looks after them. This file needs no torch.
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
        batches: per name `{"images": (M, B, 28, 28) uint8, "labels": (M, B)}`.
        limit: seconds that the processes may take for one order, the first of which waits for them to start.
        program: the script that each process runs with its rank and a folder; tests put their own.

    Raises:
        RuntimeError: as `Workers` says.
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
        """Mean loss over the micro-batches, and the gradients of their sum, laid out and named as the weights."""
        self.order(do="result", batch=batch, count=self._micro_batches[batch], schedule=schedule, threads=1)
        found = {name: array for result in self.results() for name, array in result.items()}
        return found.pop("loss"), found

    def step_costs(self, batch: str, schedule: str, *, threads: int, steps: int) -> list[Cost]:
        """What each step cost, as `Workers.costs` says."""
        order = {"batch": batch, "count": self._micro_batches[batch], "schedule": schedule}
        return self.costs(**order, threads=threads, steps=steps)
