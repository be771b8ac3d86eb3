"""Run one replica of MNIST's network under torch's `DistributedDataParallel`, on orders.

    python torch_replica.py RANK FOLDER

Orders and answers are those of `torch_stage.py`. A batch is (replicas, rows, 28, 28), of which each rank uses its own
part. "result" makes one update, and writes the loss over both replicas and the new weights to FOLDER/result-RANK.npz.
The program follows torch's own idiom: eager mode, DDP's own buckets, which are reduced while the backward pass runs,
and plain `optim.SGD`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] (an extra of its own)
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]
from torch_rank import costs_of, serve
from torch_stage import Images, linear

LAYERS = ("hidden", "features", "classifier")
RATE = 0.1


class Worker:
    """The replica of one rank."""

    def __init__(self, rank: int, folder: Path):
        self.rank, self.folder = rank, folder
        self.layers = {name: linear(folder, name) for name in LAYERS}
        hidden, features, classifier = self.layers.values()
        self.model = DistributedDataParallel(
            nn.Sequential(Images(), hidden, nn.ReLU(), features, nn.ReLU(), classifier), gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def batch(self, name: str) -> tuple[Any, Any]:
        with np.load(self.folder / f"batch-{name}.npz") as data:
            return torch.from_numpy(data["images"][self.rank]), torch.from_numpy(data["labels"][self.rank]).long()

    def step(self, images: Any, labels: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        fed = self.batch(order["batch"])
        if order["do"] == "result":
            loss = self.step(*fed)
            dist.all_reduce(loss)
            found = {"loss": loss.numpy() / dist.get_world_size()}
            for name, layer in self.layers.items():
                found |= {f"{name}.w": layer.weight.detach().numpy().T, f"{name}.b": layer.bias.detach().numpy()}
            np.savez(self.folder / f"result-{self.rank}.npz", **found)
            return {}
        return costs_of(lambda: self.step(*fed), order["steps"])


if __name__ == "__main__":
    serve(Worker)
