"""Run one replica of MNIST's network under torch's `DistributedDataParallel`, on orders.

    python torch_replica.py RANK FOLDER

Orders and answers are the same as in `torch_stage.py`. A batch is (replicas, rows, 28, 28), and each rank uses its own
part. "result" makes one update, and writes the loss over both replicas and the new weights to FOLDER/result-RANK.npz.
"alone" instead of "steps" runs steps of the same network without DDP, on the whole batch in rank 0's process; rank 1
does nothing, and answers with steps that took no time. The program follows torch's own idiom: eager mode, DDP's own
buckets, which are reduced while the backward pass runs, and plain `optim.SGD`.
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


def network_of(folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the layers with the weights from the folder, by name, and the network made of them."""
    layers = {name: linear(folder, name) for name in LAYERS}
    hidden, features, classifier = layers.values()
    return layers, nn.Sequential(Images(hidden.weight.dtype), hidden, nn.ReLU(), features, nn.ReLU(), classifier)


def update(model: Any, optimizer: Any, images: Any, labels: Any) -> Any:
    """Make one update of the model's weights, and return the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Worker:
    """The replica of one rank."""

    def __init__(self, rank: int, folder: Path):
        self.rank, self.folder = rank, folder
        self.layers, network = network_of(folder)
        self.model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        _, self.alone = network_of(folder)
        self.optimizer_alone = torch.optim.SGD(self.alone.parameters(), lr=RATE)

    def batch(self, name: str) -> tuple[Any, Any]:
        with np.load(self.folder / f"batch-{name}.npz") as data:
            return torch.from_numpy(data["images"][self.rank]), torch.from_numpy(data["labels"][self.rank]).long()

    def whole_batch(self, name: str) -> tuple[Any, Any]:
        with np.load(self.folder / f"batch-{name}.npz") as data:
            images, labels = (torch.from_numpy(data[k]).flatten(0, 1) for k in ("images", "labels"))
        return images, labels.long()

    def step(self, images: Any, labels: Any) -> Any:
        return update(self.model, self.optimizer, images, labels)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "alone":
            if self.rank:
                return dict.fromkeys(("wall", "cpu"), [0.0] * order["steps"])
            whole = self.whole_batch(order["batch"])
            return costs_of(lambda: update(self.alone, self.optimizer_alone, *whole), order["steps"], alone=True)
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
