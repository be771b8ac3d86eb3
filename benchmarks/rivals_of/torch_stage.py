"""Run one stage of MNIST's MLP and classifier under `torch.distributed.pipelining`, on orders.

    python torch_stage.py RANK FOLDER

Rank 0 is the MLP, rank 1 the classifier with its cross-entropy. They connect over gloo, through a file in FOLDER, which
also contains weights and batches as .npz. An order is a line of JSON on stdin, and its answer is a line of JSON on
stdout:

    {"do": "steps", "batch": "64x16", "count": 16, "schedule": "1F1B", "threads": 1, "steps": 3}
    {"wall": [0.41, 0.40, 0.42], "cpu": [0.39, 0.39, 0.39]}

"result" instead of "steps" runs one step, and writes its loss and gradients to FOLDER/result-RANK.npz. "train" makes
updates by SGD, each on the next part of the batch, with the order's rate and momentum, and writes their losses there.
The process ends when stdin ends. The program follows torch's own idiom: eager mode, weights as `nn.Linear` stores them,
gradients set to None rather than zeroed before a step, sums that are not divided, and message shapes that are known
before steps are timed. It computes in the dtype of the weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] (an extra of its own)
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.distributed.pipelining import (  # pyright: ignore[reportMissingImports]
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch_rank import costs_of, serve

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Images(nn.Module):
    """Convert images, (B, 28, 28) uint8 from 0 to 255, to (B, 784) from 0 to 1 in the given dtype."""

    def __init__(self, dtype: Any):
        super().__init__()
        self.dtype = dtype

    def forward(self, images: Any) -> Any:
        return images.flatten(1).to(self.dtype) / 255


def linear(folder: Path, name: str) -> Any:
    """Return the layer with the weights from the folder. torch stores the transpose."""
    with np.load(folder / "weights.npz") as weights:
        w, b = (torch.from_numpy(weights[f"{name}.{k}"]) for k in "wb")
    layer = nn.Linear(*w.shape, dtype=w.dtype)
    with torch.no_grad():
        layer.weight.copy_(w.T)
        layer.bias.copy_(b)
    return layer


class Worker:
    """The stage of one rank, with a schedule for each batch and schedule name that an order has named."""

    def __init__(self, rank: int, folder: Path):
        self.rank, self.folder = rank, folder
        names = [("hidden", "features"), ("classifier",)][rank]
        self.layers = {name: linear(folder, name) for name in names}
        first = [Images(self.layers["hidden"].weight.dtype)] if rank == 0 else []
        relu = [nn.ReLU()] if rank == 0 else []
        self.module = nn.Sequential(*first, *(m for layer in self.layers.values() for m in (layer, *relu)))
        self.made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def schedule(self, batch: str, count: int, name: str) -> tuple[Any, Any]:
        """Return the schedule, and this rank's input to it: images or labels."""
        if (batch, name) not in self.made:
            with np.load(self.folder / f"batch-{batch}.npz") as data:
                images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"]).long()
            # the stages find out the shapes of their messages in the first step, which is not measured
            stage = PipelineStage(self.module, self.rank, 2, torch.device("cpu"))
            made = SCHEDULES[name](stage, count, loss_fn=nn.functional.cross_entropy, scale_grads=False)
            self.made[batch, name] = made, (images if self.rank == 0 else labels).flatten(0, 1)
        return self.made[batch, name]

    def step(self, schedule: Any, fed: Any) -> list[Any]:
        self.module.zero_grad(set_to_none=True)
        losses: list[Any] = []
        if self.rank == 0:
            schedule.step(fed)
        else:
            schedule.step(target=fed, losses=losses, return_outputs=False)
        return losses

    def train(self, schedule: Any, fed: Any, order: dict[str, Any]) -> Any:
        """Make the order's updates, and return the mean loss before each; nothing on rank 0."""
        optimizer = torch.optim.SGD(self.module.parameters(), lr=order["rate"], momentum=order["momentum"])
        means = []
        for part in fed.chunk(order["updates"]):
            losses = self.step(schedule, part)
            optimizer.step()
            means += [torch.stack(losses).mean().item()] if losses else []
        return means

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        schedule, fed = self.schedule(order["batch"], order["count"], order["schedule"])
        if order["do"] == "result":
            losses = self.step(schedule, fed)
            found: dict[str, Any] = {"loss": torch.stack(losses).mean().detach().numpy()} if losses else {}
            for name, layer in self.layers.items():
                found |= {f"{name}.w": layer.weight.grad.numpy().T, f"{name}.b": layer.bias.grad.numpy()}
            np.savez(self.folder / f"result-{self.rank}.npz", **found)
            return {}
        if order["do"] == "train":
            np.savez(self.folder / f"result-{self.rank}.npz", losses=self.train(schedule, fed, order))
            return {}
        return costs_of(lambda: self.step(schedule, fed), order["steps"])


if __name__ == "__main__":
    serve(Worker)
