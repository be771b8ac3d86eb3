"""Feed the images of each update to the IPUs: as bytes or as floats, one batch for each device call."""

from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ipu_jax import Feed, normalise
from mnist_example.batches import Batches
from mnist_example.checks import check_count

_BATCHES_AHEAD = 2  # batches made ahead, one for each device call, besides those of the running and the waiting call


class _AsFloats:
    """A data source of the images as float32 from 0 to 1, and their labels, for feeds that don't send bytes."""

    def __init__(self, batches: Batches):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches.images)

    def __getitem__(self, indices: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
        batches = self._batches
        return {"images": normalise(batches.images.take(indices, axis=0)), "labels": batches.labels[indices]}


def position_after(batches: Batches, updates: int) -> dict[str, int]:
    """Return the state of a feed from which so many updates have been made, whatever the size of a device call.

    >>> position_after(Batches(np.zeros((7, 28, 28), np.uint8), np.arange(7), batch_size=1, gradient_accumulation=3), 3)
    {'epoch': 1, 'position': 3, 'examples': 7, 'seed': 0, 'shuffle': 1}
    """
    epoch, left = divmod(updates, batches.updates_per_epoch)
    return {
        "epoch": epoch,
        "position": left * batches.images_per_update,
        "examples": len(batches.images),
        "seed": batches.seed,
        "shuffle": int(batches.shuffle),
    }


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
