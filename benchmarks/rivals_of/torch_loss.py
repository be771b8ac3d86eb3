"""Run one rank of torch's `loss_parallel`: projection and cross-entropy over a split vocabulary, on orders.

    python torch_loss.py RANK FOLDER

The ranks connect over gloo, through a file in FOLDER, where `whole.npz` contains hidden (N, D), table (V, D) and labels
(N,). Orders and answers are those of `workers.py`: "steps" runs the given number of steps with the given number of
threads, and "result" runs one step and writes its loss and both gradients to FOLDER/result-RANK.npz. The program
follows torch's own idiom: hidden is replicated, the table is a DTensor split by rows, logits are split by columns, and
`cross_entropy` and the backward pass run in `loss_parallel()`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] (an extra of its own)
from torch.distributed.device_mesh import init_device_mesh  # pyright: ignore[reportMissingImports]
from torch.distributed.tensor import (  # pyright: ignore[reportMissingImports]
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import loss_parallel  # pyright: ignore[reportMissingImports]
from torch_rank import RANKS, costs_of, serve


class Worker:
    """One rank's part of the program."""

    def __init__(self, rank: int, folder: Path):
        self.rank, self.folder = rank, folder
        self.mesh = init_device_mesh("cpu", (RANKS,))
        with np.load(folder / "whole.npz") as data:
            hidden, table, labels = (torch.from_numpy(data[name]) for name in ("hidden", "table", "labels"))
        self.hidden: Any = hidden.requires_grad_()
        self.table: Any = torch.nn.Parameter(distribute_tensor(table, self.mesh, [Shard(0)]))
        self.labels = DTensor.from_local(labels.long(), self.mesh, [Replicate()], run_check=False)

    def step(self) -> Any:
        self.hidden.grad = self.table.grad = None
        hidden = DTensor.from_local(self.hidden, self.mesh, [Replicate()], run_check=False)
        logits = torch.nn.functional.linear(hidden, self.table)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(logits, self.labels)
            loss.backward()
        return loss

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "result":
            loss = self.step().full_tensor().detach().numpy()
            table = self.table.grad.to_local().numpy()
            np.savez(self.folder / f"result-{self.rank}.npz", loss=loss, hidden=self.hidden.grad.numpy(), table=table)
            return {}
        return costs_of(self.step, order["steps"])


if __name__ == "__main__":
    serve(Worker)
