"""Choose the images of each update. `feeding.py` feeds them to the IPUs; nothing here imports jax.

epoch      every image once, in an order given by seed and epoch, except for a remainder too small for an update
update     gradient_accumulation micro-batches of batch_size images on each replica: one change of the weights
call       up to repeat_count updates in one program: images are sent to the IPUs as bytes, and losses come back
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ipu_jax import EpochOrder, Position
from mnist_example.checks import check_count


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
