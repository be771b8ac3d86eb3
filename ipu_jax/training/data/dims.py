"""Describe the dims of a batch: how many examples it takes, and which of its rows belong to this instance.

    a batch     iterations x replicas x M x micro-batch examples, in this order
    an instance has the rows of its replicas:  (iterations, own replicas, M, micro-batch)

This module does not import jax.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ipu_jax.base.checks import as_int, check_count

_Value = TypeVar("_Value", bound=np.generic)

REMAINDERS: Final = ("drop", "updates", "pad", "wrap")
"""The ways to treat examples at the end of an epoch that do not fill a whole batch: see `EpochOrder`."""


class BatchDims:
    """The dims of every batch of a feed, and this instance's share of its rows.

    Args:
        micro_batch: B, the examples of a micro-batch.
        gradient_accumulation: M, the micro-batches of an update on each replica.
        replicas: the number of replicas of all instances.
        iterations: the updates of a batch.
        instances: the number of processes that share the replicas equally.
        instance: the number of this process among them, from 0.
        own_replicas: the numbers of the replicas whose rows this instance has, ascending, if they are not its equal
            share. Several instances may have the same replica, each with a part of its IPUs.

    Attributes:
        per_update, per_batch: the examples of an update and of a batch, over all instances.
        shape: (iterations, own replicas, M, micro-batch), the dims of this instance's rows.

    Raises:
        ValueError: a count is below 1, or the instances cannot share the replicas equally.

    >>> dims = BatchDims(2, replicas=3, iterations=2, instances=3, instance=1)
    >>> dims.per_batch, dims.shape, dims.own.tolist()
    (12, (2, 1, 1, 2), [2, 3, 8, 9])
    """

    def __init__(
        self,
        micro_batch: int,
        *,
        gradient_accumulation: int = 1,
        replicas: int = 1,
        iterations: int = 1,
        instances: int = 1,
        instance: int = 0,
        own_replicas: Sequence[int] | None = None,
    ):
        self._counts = {
            "micro_batch": micro_batch,
            "gradient_accumulation": gradient_accumulation,
            "replicas": replicas,
            "device_iterations": iterations,
        }
        micro_batch, gradient_accumulation, replicas, iterations = (
            check_count(*count) for count in self._counts.items()
        )
        self._own = list(_equal_share(replicas, instances, instance) if own_replicas is None else own_replicas)
        self._whole = (iterations, replicas, gradient_accumulation, micro_batch)
        self.shape = (iterations, len(self._own), gradient_accumulation, micro_batch)
        self.per_update = replicas * gradient_accumulation * micro_batch
        self.per_batch = iterations * self.per_update

    @functools.cached_property
    def own(self) -> npt.NDArray[np.intp]:
        """Return the numbers of this instance's examples in a batch, (rows,), in the order of its rows."""
        return self.of_instance(np.arange(self.per_batch)).reshape(-1)

    def of_instance(self, of_batch: npt.NDArray[_Value]) -> npt.NDArray[_Value]:
        """Return this instance's part of an array with one value per example of a batch, in its dims `shape`.

        Args:
            of_batch: (per_batch,).
        """
        return of_batch.reshape(self._whole)[:, self._own]

    def kept(self, examples: int, remainder: str) -> int:
        """Return how many of an epoch's last `examples`, at most one batch, are in its last batch."""
        if remainder == "drop" and examples < self.per_batch:
            return 0
        return examples - examples % self.per_update if remainder == "updates" else examples

    def updates(self, examples: int) -> int:
        """Return the number of updates that contain any of the first `examples` of a batch."""
        return math.ceil(examples / self.per_update)

    def warn_of_updates_left_out(self, left_out: int, examples: int, stacklevel: int) -> None:
        """Warn if whole updates of an epoch are left out although the user did not ask for this.

        Args:
            left_out: the number of examples that are left out, fewer than in a batch.
            examples: the number of examples in an epoch.
            stacklevel: the stack level of the warning, as the caller counts it.
        """
        updates = left_out // self.per_update
        if updates:
            warnings.warn(
                f"each epoch leaves out {updates} of {examples // self.per_update} updates ({left_out} of {examples} "
                f"examples), since they do not fill a batch of device_iterations={self._whole[0]}: give "
                "remainder='updates' to make them, or remainder='drop' to leave them out without this warning",
                stacklevel=stacklevel + 1,
            )

    def too_few(self, examples: int, remainder: str, fillers: str) -> ValueError:
        """Return the error for an epoch that has no batch.

        Args:
            examples: the number of its examples.
            remainder: one of `REMAINDERS`.
            fillers: the ways to fill up a batch instead, in words.
        """
        whole, needed = ("an update", self.per_update) if remainder == "updates" else ("a batch", self.per_batch)
        product = " x ".join(f"{name}={value}" for name, value in self._counts.items() if value > 1) or "micro_batch=1"
        return ValueError(
            f"{product} takes {needed} examples for {whole}, but there are {examples}: lower one of them, or fill "
            f"up with {fillers}"
        )


def _equal_share(replicas: int, instances: int, instance: int) -> range:
    """Return the numbers of an instance's replicas if all instances have the same number of replicas."""
    instances, number = check_count("instances", instances), as_int(instance)
    if number is None or not 0 <= number < instances:
        raise ValueError(f"instance={instance!r} is none of instances={instances}: give an int from 0 on")
    if replicas % instances:
        raise ValueError(
            f"replicas={replicas} cannot be shared by instances={instances}: use a multiple of {instances}"
        )
    each = replicas // instances
    return range(number * each, (number + 1) * each)
