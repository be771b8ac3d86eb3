"""Make batches from examples that have numbers, or from a stream with batches of any size.

feed --run(start)--> positions --position--> make(position) --> the batch there, and the next position
                     `------------ on workers, ahead of the feed ------------'

    items of the stream     0 1 2 3 4 | 5 6 7 8 9 | 10 11 12          a loader's batches of 5
    batches of the feed     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 . . .  of 4; the last one is filled up, or left out

A stream is read in its own order, by one worker. Every instance reads all of it and keeps the rows of its replicas. So
all instances have the same number of batches, and a position means the same on each of them.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ipu_jax.base.annotations import Json, Tree, Value
from ipu_jax.training.data._order import BatchDims, EpochOrder, Position
from ipu_jax.training.data.batch import FeedBatch, Sender
from ipu_jax.training.data.leaves import filling
from ipu_jax.training.data.source import ArraySource, ExampleSource
from ipu_jax.training.data.stream import Items, Stream, StreamPosition


class Batches(NamedTuple):
    """The batches from one position on. It has no reference to the feed, which workers must not keep alive.

    Attributes:
        positions: the start of each batch, without end if the number of epochs is not limited.
        make: returns the batch at a position, or None if its epoch ends there, and the start of the next batch.
    """

    positions: Iterator[Position]
    make: Callable[[Position], tuple[FeedBatch | None, Position]]


class IndexedReader:
    """Reads examples by their numbers, in an order that depends on seed and epoch.

    Args:
        source: the source of the examples.
        order: the order of the examples.
        mesh: the mesh to which batches are sent.
        fill: the values that fill up batches.
        epochs: the number of epochs after which positions end; None for never.
        state: a result of `state`, or None for the very first batch.

    Attributes:
        like: the pytree of a batch's `data`, with leaves `jax.ShapeDtypeStruct` with sharding.
        order: the argument of this name.
        start: where the feed begins.

    Raises:
        ValueError: the state belongs to another order, or `fill` does not fit the source.
    """

    def __init__(
        self,
        source: ArraySource | ExampleSource,
        order: EpochOrder,
        mesh: Mesh,
        *,
        fill: Tree,
        epochs: int | None,
        state: Mapping[str, Json] | None,
    ):
        self._sender = Sender(mesh, order.dims, source.like, source.padding)
        self.like, self.order, self._source, self._epochs = self._sender.like, order, source, epochs
        self._fill = filling(fill, source.like)
        self.start = Position(0, 0) if state is None else self.position_of(state)

    def batches(self, start: Position) -> Batches:
        """Return the batches from this position on."""
        return Batches(self._positions(start), self._batch)

    def at_epoch(self, epoch: int) -> Position:
        """Return the start of an epoch."""
        return Position(epoch, 0)

    def state(self, position: Position) -> dict[str, Json]:
        """Return the position as plain ints, the same on every instance."""
        return {"epoch": position.epoch, "position": position.position, **self.order.facts, **self.order.grouping}

    def shared(self, position: Position) -> dict[str, Json]:
        """Return what all instances have in common at a position."""
        return self.state(position)

    def position_of(self, state: Mapping[str, Json]) -> Position:
        """Return the position that `state` returned, or the start of the next epoch if no batch begins after it.

        Raises:
            ValueError: the state is not a state of this order.
        """
        ungrouped = {"examples_per_batch": 0, "bucket_checksum": 0}
        saved, own = ungrouped | _ints(state, "feed"), self.order.facts | ungrouped | self.order.grouping
        is_state = saved.keys() == {"epoch", "position", *own}
        if not is_state or saved["epoch"] < 0 or not 0 <= saved["position"] <= saved["examples"]:
            raise _no_state(state, "feed")
        for name, value in own.items():
            if saved[name] != value and (name not in ungrouped or saved["position"]):
                mend = "; only at the start of an epoch may buckets and batches be others" * (name in ungrouped)
                raise ValueError(
                    f"state is of {name}={saved[name]}, but the feed has {name}={value}: its order is another one, and "
                    f"examples would be lost or read twice{mend}"
                )
        return self.order.first(Position(saved["epoch"], saved["position"]))

    def within(self, start: Position, examples: int) -> Position:
        """Return the position after this many examples of the batch at `start`."""
        return self.order.first(Position(start.epoch, start.position + examples))

    def _positions(self, position: Position) -> Iterator[Position]:
        while self._epochs is None or position.epoch < self._epochs:
            yield position
            position = self.order.after(position)

    def _batch(self, position: Position) -> tuple[FeedBatch, Position]:
        indices, is_real, examples = self.order.rows(position)
        is_whole = self.order.dims.remainder == "wrap" or is_real.all()
        read = self._source.read(indices) if is_whole else self._filled_up(indices, is_real)
        size = self.order.size(position)
        batch = self._sender(read, epoch=position.epoch, examples=examples, is_real=is_real, size=size)
        return batch, self.order.after(position)

    def _filled_up(self, indices: npt.NDArray[np.intp], is_real: npt.NDArray[np.bool_]) -> Tree:
        whole = jax.tree.map(
            lambda like, fill: np.full((len(indices), *like.shape), fill, like.dtype), self._source.like, self._fill
        )
        if is_real.any():
            read = jax.tree.leaves(self._source.read(indices[is_real]))
            for filled, real in zip(jax.tree.leaves(whole), read, strict=True):
                filled[is_real] = real
        return whole


class StreamReader:
    """Reads a stream from a position on. The first item is drawn at once, since it shows the form of the examples.

    Args:
        stream: the stream of examples.
        dims: the dims of a batch.
        warns: whether an epoch that leaves out whole updates ends with a warning.
        mesh, fill, epochs, state: as of `IndexedReader`.

    Attributes:
        like, start: as of `IndexedReader`.
        order: None, since a stream has its own.
        form: the form of the examples.

    Raises:
        ValueError: there are no examples, `fill` does not fit them, or the stream cannot return to the state.
    """

    order = None

    def __init__(
        self,
        stream: Stream,
        dims: BatchDims,
        mesh: Mesh,
        *,
        warns: bool,
        fill: Tree,
        epochs: int | None,
        state: Mapping[str, Json] | None,
    ):
        start = StreamPosition(0, 0) if state is None else _position_in_stream(state)
        # After the last epoch, an example of that epoch shows the form of all examples.
        is_over = epochs is not None and start.epoch >= epochs
        first = StreamPosition(epochs - 1, 0) if is_over and epochs else start
        items = stream.open(first, None)
        if not items.fetch() and first.position:  # the state is at the end of its epoch
            first = start = StreamPosition(first.epoch + 1, 0)
            items = stream.open(first, None)
        if not items.fetch() or items.form is None:
            raise ValueError(f"epoch {first.epoch} of the source has no examples: give at least one")
        self.start: Position = start
        self._first: Items | None = None if is_over else items
        self.stream, self.dims, self.epochs, self.warns = stream, dims, epochs, warns
        self.form = items.form
        self.padding = self.form.padding
        self.fill = [*jax.tree.leaves(filling(fill, self.form.like)), *[0] * (self.padding is not None)]
        self.sender = Sender(mesh, dims, self.form.like, self.padding)
        self.like = self.sender.like

    def batches(self, start: Position) -> Batches:
        """Return the batches from this position on."""
        assert isinstance(start, StreamPosition)
        items, self._first = self._first if start == self.start else None, None
        reading = _StreamReading(self, start, items)
        return Batches(reading.positions(), reading.batch)

    def at_epoch(self, epoch: int) -> Position:
        """Return the start of an epoch.

        Raises:
            ValueError: the stream cannot return to it.
        """
        self.stream.check_seek(epoch)
        return StreamPosition(epoch, 0)

    def state(self, position: Position) -> dict[str, Json]:
        """Return the position as plain data, the same on every instance if the source's own state is."""
        assert isinstance(position, StreamPosition)
        checksum = -1 if position.checksum is None else position.checksum
        state: dict[str, Json] = {"epoch": position.epoch, "position": position.position, "checksum": checksum}
        if position.beyond:
            state["beyond"] = position.beyond
        return state if position.source is None else state | {"source": position.source, "offset": position.offset}

    def shared(self, position: Position) -> dict[str, Json]:
        """Return what all instances have in common at a position: the source's own state may be another on each."""
        return {"epoch": position.epoch, "position": position.position}

    def position_of(self, state: Mapping[str, Json]) -> Position:
        """Return the position that `state` returned.

        Raises:
            ValueError: the state is not a state of a stream, or the stream cannot return to the position.
        """
        position = _position_in_stream(state)
        self.stream.check_seek(position.epoch)
        return position

    def within(self, start: Position, examples: int) -> Position:
        """Return the position after this many examples of the batch at `start`."""
        assert isinstance(start, StreamPosition)
        moved = {"position": start.position + examples, "offset": start.offset + examples}
        return dataclasses.replace(start, beyond=start.beyond + examples, **moved)


class _StreamReading:
    """Reads the stream from a position on, one batch after the other; `items` are the items there, if it is open."""

    def __init__(self, reader: StreamReader, start: StreamPosition, items: Items | None):
        self._reader, self._at, self._items = reader, start, items
        dims = reader.dims
        self._row_of = np.full(dims.per_batch, -1)  # the row of each example of a batch; -1 if not on this instance
        self._row_of[dims.own] = np.arange(len(dims.own))

    def positions(self) -> Iterator[Position]:
        epochs = self._reader.epochs
        while epochs is None or self._at.epoch < epochs:
            yield self._at

    def batch(self, position: Position) -> tuple[FeedBatch | None, Position]:
        assert position is self._at, "batches of a stream are made in turn"
        reader, dims = self._reader, self._reader.dims
        if self._items is None:
            self._items = reader.stream.open(self._at, reader.form)
        leaves, have, size = reader.form.empty(len(dims.own)), 0, None
        while have < dims.per_batch:
            rows = self._items.take(dims.per_batch - have)
            if rows is None:
                break
            if reader.padding is not None:
                size = max(size or 0, int(reader.padding.size(rows[-1].max())))
            self._copy(rows, leaves, have)
            have += len(rows[0])
        kept = dims.kept(have)
        if have == dims.per_batch:
            self._at = self._items.position()
        elif kept or position.position:
            self._items, self._at = None, StreamPosition(position.epoch + 1, 0)
        else:
            raise dims.too_few(have, "remainder='pad'")
        if reader.warns and have < dims.per_batch:
            dims.warn_of_updates_left_out(have, position.position + have, stacklevel=1)
        if not kept:
            return None, self._at
        is_real = dims.own < kept
        for leaf, fill in zip(leaves, reader.fill, strict=True):
            leaf[~is_real] = fill
        tree = reader.form.tree(leaves)
        return reader.sender(tree, epoch=position.epoch, examples=kept, is_real=is_real, size=size), self._at

    def _copy(self, rows: list[Value], leaves: list[Value], first: int) -> None:
        """Copy examples of the batch, from number `first` on, into this instance's rows."""
        to = self._row_of[first : first + len(rows[0])]
        is_own = to >= 0
        if is_own.any():
            for leaf, read in zip(leaves, rows, strict=True):
                leaf[to[is_own]] = read[is_own]


def _position_in_stream(state: Mapping[str, Json]) -> StreamPosition:
    saved = {"offset": 0, "beyond": 0, **_ints(state, "stream")}
    if saved.keys() == {"epoch", "position", "checksum", "offset", "beyond"}:
        checksum = None if saved["checksum"] == -1 else saved["checksum"]
        found = StreamPosition(**saved | {"checksum": checksum, "source": state.get("source")})
        if min(found.epoch, found.offset, found.beyond, found.position - found.beyond) >= 0:
            return found
    raise _no_state(dict(state), "stream")


def _ints(state: Mapping[str, Json], what: str) -> dict[str, int]:
    """Return the numbers of a state as plain ints, without the own state of a stream's source."""
    try:
        return {name: operator.index(value) for name, value in state.items() if name != "source" or what == "feed"}
    except (AttributeError, TypeError) as error:
        raise _no_state(state, what) from error


def _no_state(state: Any, what: str) -> ValueError:
    return ValueError(f"state={state!r} is not a state of a {what}: give what state() returned")
