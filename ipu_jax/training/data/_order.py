"""Decide which examples each batch contains, as plain numbers that every instance computes for itself.

    the epoch's order   7 2 5 0 9 1 | 8 3 6 4 . .     10 examples, shuffled by seed and epoch
                        batch 0     | batch 1         of 6: here 3 replicas x 1 micro-batch x 2 examples
    instances 0, 1, 2   7 2|5 0|9 1 | 8 3|6 4|. .     a replica each

The order does not depend on the number of instances, and the examples read from an epoch are always its first
`position` examples. So a position is two numbers, and any number of instances, with batches of any size, can continue
from it: no example is lost, and none is read twice. With buckets of lengths, an epoch's order also depends on the size
of its batches. This module does not import jax.
"""

import dataclasses
import functools
import math
import threading
import warnings
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ipu_jax.base.checks import as_int, check_choice, check_count


class BatchDims:
    """The dims of every batch of a feed, this instance's share of its rows, and what an epoch's last batch contains.

    A batch has iterations x replicas x M x micro-batch examples, in this order. Its shape never changes. `remainder`
    says how the examples at the end of an epoch that do not fill a whole batch are treated:

        "drop"      they are left out
        "updates"   examples that do not fill a whole update are left out; missing updates of the batch are filled up
        "pad"       the batch is filled up with rows that are not real
        "wrap"      the same, and these rows are the epoch's first examples again

    Args:
        micro_batch: B, the examples of a micro-batch.
        gradient_accumulation: M, the micro-batches of an update on each replica.
        replicas: the number of replicas of all instances.
        iterations: the updates of a batch.
        own_replicas: the numbers of the replicas whose rows this instance has, ascending. Several instances may have
            the same replica, each with a part of its IPUs.
        remainder: one of the above.

    Attributes:
        counts: the sizes of the dims of a batch, over all instances, by the names that users know.
        per_update, per_batch: the examples of an update and of a batch, over all instances.
        shape: (iterations, own replicas, M, micro-batch), the dims of this instance's rows.

    Raises:
        ValueError: a count is below 1, or `remainder` is unknown.

    >>> counts = {"gradient_accumulation": 1, "replicas": 3, "iterations": 2}
    >>> dims = BatchDims(2, **counts, own_replicas=[1], remainder="drop")
    >>> dims.per_batch, dims.shape, dims.own.tolist()
    (12, (2, 1, 1, 2), [2, 3, 8, 9])
    """

    def __init__(
        self,
        micro_batch: int,
        *,
        gradient_accumulation: int,
        replicas: int,
        iterations: int,
        own_replicas: Sequence[int],
        remainder: str,
    ):
        counts = {"micro_batch": micro_batch, "gradient_accumulation": gradient_accumulation, "replicas": replicas}
        counts["device_iterations"] = iterations
        self.counts = {name: check_count(name, count) for name, count in counts.items()}
        self.remainder = check_choice("remainder", remainder, ("drop", "updates", "pad", "wrap"))
        micro_batch, gradient_accumulation, replicas, self.iterations = self.counts.values()
        self._own = list(own_replicas)
        self._whole = (self.iterations, replicas, gradient_accumulation, micro_batch)
        self.shape = (self.iterations, len(self._own), gradient_accumulation, micro_batch)
        self.per_update = replicas * gradient_accumulation * micro_batch
        self.per_batch = self.iterations * self.per_update

    @functools.cached_property
    def own(self) -> npt.NDArray[np.intp]:
        """Return the numbers of this instance's examples in a batch, (rows,), in the order of its rows."""
        return np.arange(self.per_batch).reshape(self._whole)[:, self._own].reshape(-1)

    def kept(self, examples: int) -> int:
        """Return how many of an epoch's last `examples`, at most one batch, are in its last batch."""
        if self.remainder == "drop" and examples < self.per_batch:
            return 0
        return examples - examples % self.per_update if self.remainder == "updates" else examples

    def updates(self, examples: int) -> int:
        """Return the number of updates that contain any of the first `examples` of a batch."""
        return math.ceil(examples / self.per_update)

    def warn_of_updates_left_out(self, left_out: int, examples: int, stacklevel: int) -> None:
        """Warn if an epoch leaves out whole updates, although the user did not ask for this.

        Args:
            left_out: the number of examples that are left out, fewer than in a batch.
            examples: the number of examples in an epoch.
            stacklevel: the stack level of the warning, as the caller counts it.
        """
        updates = left_out // self.per_update
        if updates:
            warnings.warn(
                f"each epoch leaves out {updates} of {examples // self.per_update} updates ({left_out} of {examples} "
                f"examples), since they do not fill a batch of device_iterations={self.iterations}: give "
                "remainder='updates' to make them, or remainder='drop' to leave them out without this warning",
                stacklevel=stacklevel + 1,
            )

    def too_few(self, examples: int, fillers: str) -> ValueError:
        """Return the error for an epoch of so few examples that it has no batch, with the ways to fill one up."""
        whole, needed = ("an update", self.per_update) if self.remainder == "updates" else ("a batch", self.per_batch)
        product = " x ".join(f"{name}={value}" for name, value in self.counts.items() if value > 1) or "micro_batch=1"
        return ValueError(
            f"{product} takes {needed} examples for {whole}, but there are {examples}: lower one of them, or fill "
            f"up with {fillers}"
        )


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in the data: before example number `position` of the epoch's order. Both count from 0."""

    epoch: int
    position: int

    def __str__(self) -> str:
        return f"the batch from example {self.position} of epoch {self.epoch} on"


class EpochOrder:
    """Divides the examples of every epoch into batches.

    With shuffling, each epoch leaves out different examples; without, always the last examples.

    Args:
        examples: the number of examples.
        dims: the dims of a batch.
        shuffle: whether each epoch has a new order. Otherwise it is the source's own order.
        seed: the seed of the shuffling, at least 0.
        sizes: the bucket of each example, (examples,), or None. Each batch then has examples of one bucket.

    Attributes:
        facts: the settings that a saved position belongs to, as plain ints.
        grouping: more such facts, of buckets, which may differ at the start of an epoch.

    Raises:
        ValueError: the seed is not one, or there are too few examples.

    >>> counts = {"gradient_accumulation": 1, "replicas": 3, "iterations": 1}
    >>> order = EpochOrder(10, BatchDims(2, **counts, own_replicas=[1], remainder="pad"), shuffle=False, seed=0)
    >>> order.rows(Position(0, 0)), order.rows(Position(0, 6))
    ((array([2, 3]), array([ True,  True]), 6), (array([8, 9]), array([ True,  True]), 4))
    >>> order.after(Position(0, 0)), order.after(Position(0, 6))
    (Position(epoch=0, position=6), Position(epoch=1, position=0))
    """

    def __init__(
        self,
        examples: int,
        dims: BatchDims,
        *,
        shuffle: bool,
        seed: int,
        sizes: npt.NDArray[np.intp] | None = None,
    ):
        self.examples, self.dims, self.shuffle, own_seed = examples, dims, shuffle, as_int(seed)
        if own_seed is None or own_seed < 0:
            raise ValueError(f"seed={seed!r} is not a seed: give an int of at least 0")
        self.facts, self._sizes = {"examples": examples, "seed": own_seed, "shuffle": int(shuffle)}, sizes
        self.grouping: dict[str, int] = {}
        if sizes is not None:
            checksum = zlib.crc32(sizes.astype(np.int64).tobytes())
            self.grouping = {"examples_per_batch": dims.per_batch, "bucket_checksum": checksum}
        self.updates_per_epoch = self.updates_from(0)
        if not self.updates_per_epoch:
            raise dims.too_few(examples, "remainder='pad' or 'wrap'")
        self._lock = threading.Lock()
        self._orders: dict[int, npt.NDArray[np.intp]] = {}

    def updates_from(self, position: int) -> int:
        """Return the number of updates in an epoch from this position on, including updates that are filled up."""
        whole, left = divmod(max(self.examples - position, 0), self.dims.per_batch)
        return whole * self.dims.iterations + self.dims.updates(self.dims.kept(left))

    def later(self, start: Position, updates: int) -> tuple[int, int]:
        """Return the epoch and the position after this many updates from `start` on."""
        left = self.updates_from(start.position)
        if updates < left:
            return start.epoch, start.position + updates * self.dims.per_update
        epochs, of_last = divmod(updates - left, self.updates_per_epoch)
        return start.epoch + 1 + epochs, of_last * self.dims.per_update

    def updates_between(self, start: Position, epoch: int, position: int) -> int:
        """Return the number of updates from `start` on until every example before a position is read; 0 if all are."""
        to = lambda end, begin: min(self.dims.updates(max(end - begin, 0)), self.updates_from(begin))
        if epoch <= start.epoch:
            return to(position, start.position) if epoch == start.epoch else 0
        whole_epochs = (epoch - start.epoch - 1) * self.updates_per_epoch
        return self.updates_from(start.position) + whole_epochs + to(position, 0)

    def of_epoch(self, epoch: int) -> npt.NDArray[np.intp]:
        """Return the order of all examples in an epoch, (examples,)."""
        with self._lock:  # one worker shuffles, the others wait for it
            if epoch not in self._orders:
                order = np.arange(self.examples)
                if self.shuffle:
                    np.random.default_rng([self.facts["seed"], epoch]).shuffle(order)
                if self._sizes is not None:  # the examples that are left out are chosen before, whatever their length
                    per_batch = self.dims.per_batch
                    end = self.examples - (left := self.examples % per_batch) + self.dims.kept(left)
                    order[:end] = _grouped(order[:end], self._sizes, per_batch)
                # two orders are kept, since at the end of an epoch some workers are in the next epoch already
                self._orders = {key: self._orders[key] for key in sorted(self._orders)[-1:]} | {epoch: order}
            return self._orders[epoch]

    def first(self, start: Position) -> Position:
        """Return `start`, or the start of the next epoch if no batch begins at `start` or after it."""
        return start if self.updates_from(start.position) else Position(start.epoch + 1, 0)

    def after(self, start: Position) -> Position:
        """Return the start of the batch that follows the batch at `start`."""
        return self.first(Position(start.epoch, self._end(start.position)))

    def rows(self, start: Position) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_], int]:
        """Return which examples the batch at `start` contains.

        Returns:
            (rows of this instance,): the numbers of the examples; where a row is not real, any that can be read.
            (rows of this instance,): bool, whether each row is real; the others only fill the batch up.
            The number of real examples of the batch, over all instances.
        """
        (chosen, examples), own = self._chosen(start), self.dims.own
        return chosen[own], own < examples, examples

    def size(self, start: Position) -> int | None:
        """Return the bucket of the batch at `start`, the same on every instance; None without buckets."""
        if self._sizes is None:
            return None
        chosen, examples = self._chosen(start)
        return int(self._sizes[chosen if self.dims.remainder == "wrap" else chosen[:examples]].max())

    def _chosen(self, start: Position) -> tuple[npt.NDArray[np.intp], int]:
        """Return the numbers of the examples of the batch at `start`, (per_batch,), and how many of them are real."""
        order, per_batch = self.of_epoch(start.epoch), self.dims.per_batch
        chosen = order[start.position : self._end(start.position)]
        examples = self.dims.kept(len(chosen))
        if examples < per_batch:
            # filled up with the epoch's first examples, repeated if they are too few
            chosen = np.concatenate([chosen[:examples], np.resize(order, per_batch - examples)])
        return chosen, examples

    def _end(self, position: int) -> int:
        """Return where the batch at a position ends. With buckets, a batch that begins inside a group ends with it.

        Under "drop", where each batch is whole, it goes on instead, and is padded to the larger bucket.
        """
        is_in_group = self._sizes is not None and self.dims.remainder != "drop"
        return position + self.dims.per_batch - is_in_group * (position % self.dims.per_batch)


def _grouped(order: npt.NDArray[np.intp], sizes: npt.NDArray[np.intp], per_batch: int) -> npt.NDArray[np.intp]:
    """Return an order in which every `per_batch` examples are of one bucket, as far as they fill batches.

    Each bucket collects its own examples, and a batch comes where its last example is in the shuffled order. Examples
    that are left over share batches, the longest first. So there are as many batches as without buckets, and only the
    last one is incomplete.

        by bucket       8 16 8 8 16 16 8 16 8
        batches of 2    8 8 | 16 16 | 8 8 | 16 16 | 8

    Args:
        order: the shuffled order, (n,).
        sizes: the bucket of each example, by its number.
        per_batch: the examples of a batch.

    >>> _grouped(np.arange(9), np.array([8, 16, 8, 8, 16, 16, 8, 16, 8]), 2).tolist()
    [0, 2, 1, 4, 3, 6, 5, 7, 8]
    """
    of = sizes[order]
    by_size = [np.flatnonzero(of == size) for size in np.unique(of)[::-1]]
    full = [len(places) - len(places) % per_batch for places in by_size]
    whole = [places[:count] for places, count in zip(by_size, full, strict=True)]
    places = np.concatenate([*whole, *[places[count:] for places, count in zip(by_size, full, strict=True)]])
    end = len(places) - len(places) % per_batch
    batches = places[:end].reshape(-1, per_batch)
    batches = batches[np.argsort(batches.max(axis=1))]
    return order[np.concatenate([batches.reshape(-1), places[end:]])]
