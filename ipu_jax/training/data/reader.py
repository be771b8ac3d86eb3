"""Read batches from examples that have numbers, and define the interface that a feed needs from any reader.

feed --run(position)--> Run: positions() --position--> run(position) --> the batch there, and the next position
                             `----------- on workers, ahead of the feed ----------'
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import jax
import numpy as np
import numpy.typing as npt

from ipu_jax.training.data.batch import FeedBatch, Sender
from ipu_jax.training.data.leaves import filling
from ipu_jax.training.data.order import EpochOrder, Position
from ipu_jax.training.data.source import Indexed

_STATE: Final = ("epoch", "position", "examples", "seed", "shuffle")


class Run(Protocol):
    """Makes the batches from one position on. It has no reference to the feed, which workers must not keep alive."""

    def positions(self) -> Iterator[Position]:
        """Yield the start of each batch, without end if the number of epochs is not limited."""
        ...

    def __call__(self, position: Position) -> tuple[FeedBatch | None, Position]:
        """Return the batch at a position, or None if its epoch ends there, and the start of the next batch."""
        ...


class Reader(Protocol):
    """Reads from a source, from any position that it can return to.

    Attributes:
        like: the pytree of a batch's `data`, with leaves `jax.ShapeDtypeStruct` with sharding.
        start: where the feed begins.
    """

    like: Any
    start: Position

    def run(self, position: Position) -> Run:
        """Return the run that makes the batches from this position on."""
        ...

    def at_epoch(self, epoch: int) -> Position:
        """Return the start of an epoch.

        Raises:
            ValueError: the source cannot return to it.
        """
        ...

    def state(self, position: Position) -> dict[str, Any]:
        """Return the position as plain data, from which another feed continues."""
        ...

    def position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` returned as plain data.

        Raises:
            ValueError: the state is not a state of this source, or the source cannot return to the position.
        """
        ...

    def within(self, start: Position, examples: int) -> Position:
        """Return the position after this many examples of the batch at `start`."""
        ...

    def batches_per_epoch(self) -> int:
        """Return the number of batches in a whole epoch.

        Raises:
            TypeError: the number is unknown.
        """
        ...


class IndexedReader:
    """Reads examples by their numbers, in an order that depends on seed and epoch.

    Args:
        source: the source of the examples.
        order: the order of the examples.
        sender: the sender of the batches.
        fill: the values that fill up batches.
        epochs: the number of epochs after which positions end; None for never.
        state: a result of `state`, or None for the very first batch.

    Raises:
        ValueError: the state belongs to another order, or `fill` does not fit the source.
    """

    def __init__(
        self,
        source: Indexed,
        order: EpochOrder,
        sender: Sender,
        *,
        fill: Any,
        epochs: int | None,
        state: Mapping[str, Any] | None,
    ):
        self.like = sender.like
        self._source, self._order, self._sender, self._epochs = source, order, sender, epochs
        self._fill = filling(fill, source.like)
        self.start = Position(0, 0) if state is None else self.position_of(state)

    def run(self, position: Position) -> Run:
        """Return the run that makes the batches from this position on."""
        return _IndexedRun(self._source, self._order, self._sender, self._fill, position, self._epochs)

    def at_epoch(self, epoch: int) -> Position:
        """Return the start of an epoch."""
        return Position(epoch, 0)

    def state(self, position: Position) -> dict[str, Any]:
        """Return the position as plain ints, the same on every instance."""
        order = self._order
        values = (position.epoch, position.position, order.examples, order.seed, int(order.shuffle))
        return dict(zip(_STATE, values, strict=True))

    def position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` returned, or the start of the next epoch if no batch begins after it."""
        return self._order.first(_position_of(state, self._order))

    def within(self, start: Position, examples: int) -> Position:
        """Return the position after this many examples of the batch at `start`."""
        return self._order.first(Position(start.epoch, start.position + examples))

    def batches_per_epoch(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._order.batches_from(0)


class _IndexedRun:
    def __init__(
        self, source: Indexed, order: EpochOrder, sender: Sender, fill: Any, start: Position, epochs: int | None
    ):
        self._source, self._order, self._sender, self._fill = source, order, sender, fill
        self._start, self._epochs = start, epochs

    def positions(self) -> Iterator[Position]:
        position = self._start
        while self._epochs is None or position.epoch < self._epochs:
            yield position
            position = self._order.after(position)

    def __call__(self, position: Position) -> tuple[FeedBatch | None, Position]:
        rows = self._order.rows(position)
        indices, is_real = rows.indices.reshape(-1), rows.is_real.reshape(-1)
        is_whole = self._order.remainder == "wrap" or is_real.all()
        read = self._source.read(indices) if is_whole else self._filled_up(indices, is_real)
        batch = self._sender(read, epoch=position.epoch, examples=rows.examples, is_real=is_real)
        return batch, self._order.after(position)

    def _filled_up(self, indices: npt.NDArray[np.intp], is_real: npt.NDArray[np.bool_]) -> Any:
        whole = jax.tree.map(
            lambda like, fill: np.full((len(indices), *like.shape), fill, like.dtype), self._source.like, self._fill
        )
        if is_real.any():
            read = jax.tree.leaves(self._source.read(indices[is_real]))
            for filled, real in zip(jax.tree.leaves(whole), read, strict=True):
                filled[is_real] = real
        return whole


def _position_of(state: Mapping[str, Any], order: EpochOrder) -> Position:
    try:
        saved = {name: operator.index(value) for name, value in state.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state={state!r} is not one: give what state() returned") from error
    if saved.keys() != set(_STATE) or saved["epoch"] < 0 or not 0 <= saved["position"] <= saved["examples"]:
        raise ValueError(f"state={saved} is not one: give what state() returned")
    own = {"examples": order.examples, "seed": order.seed, "shuffle": int(order.shuffle)}
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"state is of {name}={saved[name]}, but the feed has {name}={value}: its order is another one, and "
                "examples would be lost or read twice"
            )
    return Position(saved["epoch"], saved["position"])
