"""Which example stands in which batch: plain numbers, that every instance finds for itself and all find alike.

    the epoch's order   7 2 5 0 9 1 | 8 3 6 4 . .     10 examples, shuffled by seed and epoch
                        batch 0     | batch 1         of 6: here 3 replicas x 1 micro-batch x 2 examples
    instances 0, 1, 2   7 2|5 0|9 1 | 8 3|6 4|. .     a replica each

The order does not depend on the instances, and what was read of an epoch is its first `position` examples. So a place
is two numbers, and any number of instances, with batches of any size, goes on from it: nothing is lost, nothing read
twice. No jax in here.
"""

import dataclasses
import math
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from ipu_jax._checks import as_int, check_choice, check_count

REMAINDERS: Final = ("drop", "updates", "pad", "wrap")
"""What becomes of the examples at the end of an epoch that fill no whole batch: see `EpochOrder`."""


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in the data: before example number `position` of the epoch's order. Both count from 0."""

    epoch: int
    position: int

    def __str__(self) -> str:
        return f"the batch from example {self.position} of epoch {self.epoch} on"


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The examples of one batch on one instance.

    Attributes:
        indices: (iterations, local replicas, M, micro-batch) intp; where `is_real` is False, any that can be read.
        is_real: bool, of that shape: False for what only fills the batch up.
        examples: real examples of the batch, over all instances.
        updates: weight updates that hold a real example, counted from the first.
    """

    indices: npt.NDArray[np.intp]
    is_real: npt.NDArray[np.bool_]
    examples: int
    updates: int


class EpochOrder:
    """The batches of every epoch.

    A batch is `iterations` updates of `replicas` x `gradient_accumulation` x `micro_batch` examples, in this order. Its
    shape never changes; `remainder` says what becomes of the remainder of an epoch:

        "drop"      what fills no whole batch is left out
        "updates"   what fills no whole update is left out; updates that miss in the batch are filled up
        "pad"       the batch is filled up; what fills it is not real
        "wrap"      so too, and what fills it are the epoch's first examples again

    With shuffling, others are left out in each epoch; without, always the last.

    Args:
        examples: how many there are.
        micro_batch: examples of a micro-batch, B.
        gradient_accumulation: micro-batches of an update on each replica, M.
        replicas: of all instances.
        iterations: updates of a batch.
        shuffle: a new order in each epoch; else the source's own.
        seed: of the shuffling, at least 0.
        remainder: as above.
        instances: how many share the replicas, each as many.
        instance: which of them asks, from 0.

    Raises:
        ValueError: a count below 1, an unknown rule, replicas that the instances can't share, or too few examples.

    >>> order = EpochOrder(10, 2, replicas=3, shuffle=False, remainder="pad", instances=3, instance=1)
    >>> order.rows(Position(0, 0)).indices.tolist(), order.rows(Position(0, 6)).indices.tolist()
    ([[[[2, 3]]]], [[[[8, 9]]]])
    >>> order.after(Position(0, 0)), order.after(Position(0, 6))
    (Position(epoch=0, position=6), Position(epoch=1, position=0))
    """

    def __init__(
        self,
        examples: int,
        micro_batch: int,
        *,
        gradient_accumulation: int = 1,
        replicas: int = 1,
        iterations: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        remainder: str = "drop",
        instances: int = 1,
        instance: int = 0,
    ):
        self.examples = check_count("examples", examples)
        counts = {
            "micro_batch": micro_batch,
            "gradient_accumulation": gradient_accumulation,
            "replicas": replicas,
            "device_iterations": iterations,
        }
        micro_batch, gradient_accumulation, replicas, iterations = (check_count(*count) for count in counts.items())
        instances = check_count("instances", instances)
        number, own_seed = as_int(instance), as_int(seed)
        if number is None or not 0 <= number < instances:
            raise ValueError(f"instance={instance!r} is none of instances={instances}: give an int from 0 on")
        if replicas % instances:
            raise ValueError(
                f"replicas={replicas} cannot be shared by instances={instances}: use a multiple of {instances}"
            )
        if own_seed is None or own_seed < 0:
            raise ValueError(f"seed={seed!r} is not a seed: give an int of at least 0")
        self.seed, self.shuffle, self.remainder = own_seed, shuffle, check_choice("remainder", remainder, REMAINDERS)
        self._shape = (iterations, replicas, gradient_accumulation, micro_batch)
        own = replicas // instances
        self._own = slice(number * own, (number + 1) * own)
        self.per_update = replicas * gradient_accumulation * micro_batch
        self.per_batch = iterations * self.per_update
        if not self.batches_from(0):
            whole, needed = ("an update", self.per_update) if remainder == "updates" else ("a batch", self.per_batch)
            product = " x ".join(f"{name}={value}" for name, value in counts.items() if value > 1) or "micro_batch=1"
            raise ValueError(
                f"{product} takes {needed} examples for {whole}, but there are {examples}: lower one of them, or fill "
                "up with remainder='pad' or 'wrap'"
            )
        self._lock = threading.Lock()
        self._orders: dict[int, npt.NDArray[np.intp]] = {}

    def batches_from(self, position: int) -> int:
        """Return how many batches begin at this position of an epoch or behind it."""
        left = self.examples - position
        if self.remainder == "drop":
            return left // self.per_batch
        if self.remainder == "updates":
            left -= left % self.per_update
        return -(-left // self.per_batch)

    def of_epoch(self, epoch: int) -> npt.NDArray[np.intp]:
        """Return the order of all examples in an epoch, (examples,), read-only."""
        with self._lock:  # one worker shuffles, the others wait for it
            if epoch not in self._orders:
                order = np.arange(self.examples)
                if self.shuffle:
                    np.random.default_rng([self.seed, epoch]).shuffle(order)
                order.flags.writeable = False
                # two, since at the end of an epoch some workers are in the next one already
                self._orders = {key: self._orders[key] for key in sorted(self._orders)[-1:]} | {epoch: order}
            return self._orders[epoch]

    def first(self, start: Position) -> Position:
        """Return `place`, or the start of the next epoch where no batch begins there or behind it."""
        return start if self.batches_from(start.position) else Position(start.epoch + 1, 0)

    def after(self, start: Position) -> Position:
        """Return where the batch after the one from `place` on begins."""
        return self.first(Position(start.epoch, start.position + self.per_batch))

    def rows(self, start: Position) -> Rows:
        """Return this instance's part of the batch that begins at `place`."""
        order = self.of_epoch(start.epoch)
        chosen = order[start.position : start.position + self.per_batch]
        if self.remainder == "updates":
            chosen = chosen[: len(chosen) - len(chosen) % self.per_update]
        examples = len(chosen)
        if examples < self.per_batch:
            # the first ones again, and again where they are fewer than what misses
            chosen = np.concatenate([chosen, np.resize(order, self.per_batch - examples)])
        is_real = np.arange(self.per_batch) < examples
        indices, is_real = chosen.reshape(self._shape)[:, self._own], is_real.reshape(self._shape)[:, self._own]
        return Rows(indices, is_real, examples, math.ceil(examples / self.per_update))
