"""Choose the images of each update, and feed them to the IPUs.

epoch      every image once, in an order given by seed and epoch, except for a remainder too small for an update
update     gradient_accumulation micro-batches of batch_size images on each replica: one change of the weights
call       up to repeat_count updates in one program: images are sent to the IPUs as bytes, and losses come back
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ipu_jax import EpochOrder, Feed, Position, normalise
from mnist_example.checks import check_count

_BATCHES_AHEAD = 2  # batches made ahead, one for each device call, besides those of the running and the waiting call


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The images of each update.

    An epoch has floor(images / (batch_size * gradient_accumulation * replicas)) updates. The images left over are not
    used in that epoch: with `shuffle` they differ from epoch to epoch, without it they are always the last ones.

    Attributes:
        images: (N, 28, 28) uint8.
        labels: (N,) uint8.
        batch_size: images of a micro-batch, B.
        gradient_accumulation: micro-batches of an update on each replica, M.
        shuffle: use a new order in each epoch, the same for the same seed; else the order of the data.
        seed: at least 0.
        replicas: the number of pipelines that share an update, R.

    Raises:
        ValueError: a count below 1, a negative seed, too few images for one update, or not as many labels as images.

    >>> images = np.zeros((7, 28, 28), np.uint8)
    >>> batches = Batches(images, np.arange(7), batch_size=1, gradient_accumulation=3, shuffle=False)
    >>> batches.updates_per_epoch, batches.of_epoch(0).tolist()
    (2, [[[0], [1], [2]], [[3], [4], [5]]])
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]
    batch_size: int
    gradient_accumulation: int
    shuffle: bool = True
    seed: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("gradient_accumulation", self.gradient_accumulation)
        check_count("replicas", self.replicas)
        if len(self.images) != len(self.labels):
            raise ValueError(f"there are {len(self.images)} images and {len(self.labels)} labels: give one for each")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative: give one of at least 0")
        if self.updates_per_epoch < 1:
            of_replicas = f" x replicas={self.replicas}" if self.replicas > 1 else ""
            raise ValueError(
                f"batch_size={self.batch_size} x gradient_accumulation={self.gradient_accumulation}{of_replicas} takes "
                f"{self.images_per_update} images for an update, but there are {len(self.images)}: lower one of the "
                f"{'three' if of_replicas else 'two'}"
            )

    @property
    def images_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation * self.replicas

    @property
    def updates_per_epoch(self) -> int:
        return len(self.images) // self.images_per_update

    def of_epoch(self, epoch: int) -> npt.NDArray[np.intp]:
        """Return the indices of the images of each update, (updates_per_epoch, R, M, B), without R if it is 1.

        Epochs are counted from 0. The images of an update do not depend on the number of replicas that share them.
        """
        order = EpochOrder(
            len(self.images),
            self.batch_size,
            gradient_accumulation=self.gradient_accumulation,
            replicas=self.replicas,
            iterations=self.updates_per_epoch,
            shuffle=self.shuffle,
            seed=self.seed,
        )
        indices = order.rows(Position(epoch, 0)).indices
        return indices[:, 0] if self.replicas == 1 else indices


class _AsFloats:
    """A data source of the images as float32 from 0 to 1, and their labels, for feeds that don't send bytes."""

    def __init__(self, batches: Batches):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.images)

    def __getitem__(self, indices: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
        batches = self._batches
        return {"images": normalise(batches.images.take(indices, axis=0)), "labels": batches.labels[indices]}


def make_feed(
    batches: Batches,
    mesh: Mesh,
    *,
    repeat_count: int = 100,
    eight_bit_io: bool = True,
    num_workers: int = 0,
    state: Mapping[str, SupportsIndex] | None = None,
) -> Feed:
    """Return a feed of one batch for each device call, on the mesh: `{"images", "labels"}`, (updates, R, M, B, ...).

    A call has up to `repeat_count` updates; the last call of an epoch may have fewer real ones. Each of the first two
    dims is left out if it is 1.

    Args:
        batches: the images of each update.
        mesh: the mesh of the replicas of `batches`.
        repeat_count: updates in one device call, at least 1.
        eight_bit_io: send images as bytes and let the network normalise them. If False, the host normalises them, and
            four times as many bytes are sent, as float32 from 0 to 1.
        num_workers: threads that assemble the batches of future calls; with 0 the caller assembles each batch when it
            asks for it.
        state: the `state()` of another such feed, from which this feed continues.

    Raises:
        ValueError: a `repeat_count` below 1, a negative `num_workers`, or a state of other batches.
    """
    return Feed(
        {"images": batches.images, "labels": batches.labels} if eight_bit_io else _AsFloats(batches),
        mesh=mesh,
        micro_batch=batches.batch_size,
        gradient_accumulation=batches.gradient_accumulation,
        device_iterations=min(check_count("repeat_count", repeat_count), batches.updates_per_epoch),
        shuffle=batches.shuffle,
        seed=batches.seed,
        remainder="updates",
        prefetch=num_workers and max(_BATCHES_AHEAD, num_workers),
        workers=num_workers or 1,
        state=state,
    )
