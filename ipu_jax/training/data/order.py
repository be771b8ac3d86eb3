"""Decide which examples each batch contains, as plain numbers that every instance computes for itself.

    the epoch's order   7 2 5 0 9 1 | 8 3 6 4 . .     10 examples, shuffled by seed and epoch
                        batch 0     | batch 1         of 6: here 3 replicas x 1 micro-batch x 2 examples
    instances 0, 1, 2   7 2|5 0|9 1 | 8 3|6 4|. .     a replica each

The order does not depend on the number of instances, and the examples read from an epoch are always its first
`position` examples. So a position is two numbers, and any number of instances, with batches of any size, can continue
from it: no example is lost, and none is read twice. This module does not import jax.
"""

import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ipu_jax.base.checks import as_int, check_choice, check_count

_Value = TypeVar("_Value", bound=np.generic)

REMAINDERS: Final = ("drop", "updates", "pad", "wrap")
"""The ways to treat examples at the end of an epoch that do not fill a whole batch: see `EpochOrder`."""


class BatchDims:
    """The dims of every batch of a feed, and this instance's share of its rows.

    A batch has iterations x replicas x M x micro-batch examples, in this order.

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
        counts: the sizes of the dims of a batch, over all instances, by the names of the arguments.
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
        self.counts = {
            "micro_batch": micro_batch,
            "gradient_accumulation": gradient_accumulation,
            "replicas": replicas,
            "device_iterations": iterations,
        }
        micro_batch, gradient_accumulation, replicas, iterations = (
            check_count(*count) for count in self.counts.items()
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
        product = " x ".join(f"{name}={value}" for name, value in self.counts.items() if value > 1) or "micro_batch=1"
        return ValueError(
            f"{product} takes {needed} examples for {whole}, but there are {examples}: lower one of them, or fill "
            f"up with {fillers}"
        )


def _equal_share(replicas: int, instances: int, instance: int) -> range:
    """Return the numbers of an instance's replicas if all instances have the same number of replicas."""
    instances, number = check_count("instances", instances), as_int(instance)
    if number is None or not 0 <= number < instances:
        raise ValueError(f"instance={instance!r} is not one of instances={instances}: give an int from 0 on")
    if replicas % instances:
        raise ValueError(
            f"replicas={replicas} cannot be shared by instances={instances}: use a multiple of {instances}"
        )
    each = replicas // instances
    return range(number * each, (number + 1) * each)


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in the data: before example number `position` of the epoch's order. Both count from 0."""

    epoch: int
    position: int

    def __str__(self) -> str:
        return f"the batch from example {self.position} of epoch {self.epoch} on"


@dataclasses.dataclass(frozen=True, eq=False)
class BatchRows:
    """The examples of one batch on one instance.

    Attributes:
        indices: (iterations, local replicas, M, micro-batch) intp; where `is_real` is False, any index that can be
            read.
        is_real: bool, of the same shape: False for rows that only fill the batch up.
        examples: the number of real examples of the batch, over all instances.
    """

    indices: npt.NDArray[np.intp]
    is_real: npt.NDArray[np.bool_]
    examples: int


class EpochOrder:
    """Divides the examples of every epoch into batches.

    The shape of a batch never changes. `remainder` says how the examples at the end of an epoch that do not fill a
    whole batch are treated:

        "drop"      they are left out
        "updates"   examples that do not fill a whole update are left out; missing updates of the batch are filled up
        "pad"       the batch is filled up with rows that are not real
        "wrap"      the same, and these rows are the epoch's first examples again

    With shuffling, each epoch leaves out different examples; without, always the last examples.

    Args:
        examples: the number of examples.
        dims: the dims of a batch.
        shuffle: whether each epoch has a new order. Otherwise it is the source's own order.
        seed: the seed of the shuffling, at least 0.
        remainder: one of the above.

    Raises:
        ValueError: a count is below 1, `remainder` is unknown, or there are too few examples.

    >>> dims = BatchDims(2, replicas=3, instances=3, instance=1)
    >>> order = EpochOrder(10, dims, shuffle=False, remainder="pad")
    >>> order.rows(Position(0, 0)).indices.tolist(), order.rows(Position(0, 6)).indices.tolist()
    ([[[[2, 3]]]], [[[[8, 9]]]])
    >>> order.after(Position(0, 0)), order.after(Position(0, 6))
    (Position(epoch=0, position=6), Position(epoch=1, position=0))
    """

    def __init__(self, examples: int, dims: BatchDims, *, shuffle: bool = True, seed: int = 0, remainder: str = "drop"):
        self.examples, self.dims = check_count("examples", examples), dims
        self.per_update, self.per_batch = dims.per_update, dims.per_batch
        own_seed = as_int(seed)
        if own_seed is None or own_seed < 0:
            raise ValueError(f"seed={seed!r} is not a seed: give an int of at least 0")
        self.seed, self.shuffle, self.remainder = own_seed, shuffle, check_choice("remainder", remainder, REMAINDERS)
        if not self.batches_from(0):
            raise dims.too_few(examples, remainder, "remainder='pad' or 'wrap'")
        self._lock = threading.Lock()
        self._orders: dict[int, npt.NDArray[np.intp]] = {}

    def batches_from(self, position: int) -> int:
        """Return how many batches begin at this position of an epoch or after it."""
        whole, left = divmod(max(self.examples - position, 0), self.per_batch)
        return whole + (self.dims.kept(left, self.remainder) > 0)

    @property
    def updates_per_epoch(self) -> int:
        """Return the number of updates in a whole epoch, including the updates that are filled up."""
        return self.updates_from(0)

    def updates_from(self, position: int) -> int:
        """Return the number of updates in an epoch from this position on."""
        whole, left = divmod(max(self.examples - position, 0), self.per_batch)
        of_last = self.dims.updates(self.dims.kept(left, self.remainder))
        return whole * (self.per_batch // self.per_update) + of_last

    def later(self, start: Position, updates: int) -> Position:
        """Return the position after this many updates from `start` on."""
        left = self.updates_from(start.position)
        if updates < left:
            return Position(start.epoch, start.position + updates * self.per_update)
        epochs, of_last = divmod(updates - left, self.updates_per_epoch)
        return Position(start.epoch + 1 + epochs, of_last * self.per_update)

    def updates_between(self, start: Position, end: Position) -> int:
        """Return the number of updates from `start` on until every example before `end` is read; 0 if all are.

        >>> order = EpochOrder(10, BatchDims(2))
        >>> order.updates_between(Position(0, 6), Position(2, 3))
        9
        """
        epochs = end.epoch - start.epoch
        if epochs <= 0:
            missing = math.ceil((end.position - start.position) / self.per_update) if epochs == 0 else 0
            return min(max(missing, 0), self.updates_from(start.position))
        of_last = min(math.ceil(end.position / self.per_update), self.updates_per_epoch)
        return self.updates_from(start.position) + (epochs - 1) * self.updates_per_epoch + of_last

    def of_epoch(self, epoch: int) -> npt.NDArray[np.intp]:
        """Return the order of all examples in an epoch, (examples,), read-only."""
        with self._lock:  # one worker shuffles, the others wait for it
            if epoch not in self._orders:
                order = np.arange(self.examples)
                if self.shuffle:
                    np.random.default_rng([self.seed, epoch]).shuffle(order)
                order.flags.writeable = False
                # two orders are kept, since at the end of an epoch some workers are in the next epoch already
                self._orders = {key: self._orders[key] for key in sorted(self._orders)[-1:]} | {epoch: order}
            return self._orders[epoch]

    def first(self, start: Position) -> Position:
        """Return `start`, or the start of the next epoch if no batch begins at `start` or after it."""
        return start if self.batches_from(start.position) else Position(start.epoch + 1, 0)

    def after(self, start: Position) -> Position:
        """Return the start of the batch that follows the batch at `start`."""
        return self.first(Position(start.epoch, start.position + self.per_batch))

    def rows(self, start: Position) -> BatchRows:
        """Return this instance's part of the batch that begins at `start`."""
        order, per_batch = self.of_epoch(start.epoch), self.per_batch
        chosen = order[start.position : start.position + per_batch]
        examples = self.dims.kept(len(chosen), self.remainder)
        if examples < per_batch:
            # filled up with the epoch's first examples, repeated if they are too few
            chosen = np.concatenate([chosen[:examples], np.resize(order, per_batch - examples)])
        is_real = np.arange(per_batch) < examples
        return BatchRows(self.dims.of_instance(chosen), self.dims.of_instance(is_real), examples)
