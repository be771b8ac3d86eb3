"""Make batches from a stream, for any size of the stream's own batches.

    items of the stream     0 1 2 3 4 | 5 6 7 8 9 | 10 11 12          a loader's batches of 5
    batches of the feed     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 . . .  of 4; the last one is filled up, or left out

A stream is read in its own order, by one worker. Every instance reads all of it and keeps the rows of its replicas. So
all instances have the same number of batches, and a position means the same on each of them.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ipu_jax.training.data.batch import FeedBatch, Sender
from ipu_jax.training.data.dims import BatchDims
from ipu_jax.training.data.leaves import Form, filling
from ipu_jax.training.data.order import Position
from ipu_jax.training.data.reader import Run
from ipu_jax.training.data.stream import Items, Stream, StreamPosition


class StreamReader:
    """Reads a stream from a position on. The first item is drawn at once, since it shows the form of the examples.

    Args:
        stream: the stream of examples.
        dims: the dims of a batch.
        mesh: the mesh to which batches are sent.
        remainder: "drop", "updates" or "pad".
        warns: whether an epoch that leaves out whole updates ends with a warning.
        fill: the values that fill up batches.
        epochs: the number of epochs after which positions end; None for never.
        state: a result of `state`, or None for the very first batch.

    Raises:
        ValueError: there are no examples, `fill` does not fit them, or the stream cannot return to the state.
    """

    def __init__(
        self,
        stream: Stream,
        dims: BatchDims,
        mesh: Mesh,
        *,
        remainder: str,
        warns: bool,
        fill: Any,
        epochs: int | None,
        state: Mapping[str, Any] | None,
    ):
        start = StreamPosition(0, 0) if state is None else _position_of(state)
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
        self._stream, self._dims, self._remainder, self._epochs = stream, dims, remainder, epochs
        self._warns = warns
        self._form = items.form
        self._fill = jax.tree.leaves(filling(fill, self._form.like))
        self._sender = Sender(mesh, dims, self._form.like, remainder)
        self.like = self._sender.like

    def run(self, position: Position) -> Run:
        """Return the run that makes the batches from this position on."""
        assert isinstance(position, StreamPosition)
        items, self._first = self._first if position == self.start else None, None
        return _StreamRun(
            self._stream,
            self._dims,
            self._sender,
            self._form,
            position,
            items,
            self._remainder,
            self._warns,
            self._fill,
            self._epochs,
        )

    def at_epoch(self, epoch: int) -> Position:
        """Return the start of an epoch.

        Raises:
            ValueError: the stream cannot return to it.
        """
        self._stream.check_seek(epoch)
        return StreamPosition(epoch, 0)

    def state(self, position: Position) -> dict[str, Any]:
        """Return the position as plain data, the same on every instance if the source's own state is."""
        assert isinstance(position, StreamPosition)
        checksum = -1 if position.checksum is None else position.checksum
        state: dict[str, Any] = {"epoch": position.epoch, "position": position.position, "checksum": checksum}
        if position.beyond:
            state["beyond"] = position.beyond
        return state if position.source is None else state | {"source": position.source, "offset": position.offset}

    def position_of(self, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` returned.

        Raises:
            ValueError: the state is not a state of a stream, or the stream cannot return to the position.
        """
        position = _position_of(state)
        self._stream.check_seek(position.epoch)
        return position

    def within(self, start: Position, examples: int) -> Position:
        """Return the position after this many examples of the batch at `start`."""
        assert isinstance(start, StreamPosition)
        moved = {"position": start.position + examples, "offset": start.offset + examples}
        return dataclasses.replace(start, beyond=start.beyond + examples, **moved)

    def batches_per_epoch(self) -> int:
        """Raise, since the number is unknown before the epoch is over."""
        raise TypeError("a stream does not say how many batches an epoch has: count those that feed.epoch() yields")


class _StreamRun:
    def __init__(
        self,
        stream: Stream,
        dims: BatchDims,
        sender: Sender,
        form: Form,
        start: StreamPosition,
        items: Items | None,
        remainder: str,
        warns: bool,
        fill: list[Any],
        epochs: int | None,
    ):
        self._stream, self._dims, self._sender, self._form = stream, dims, sender, form
        self._at, self._items = start, items
        self._remainder, self._warns, self._fill, self._epochs = remainder, warns, fill, epochs
        self._row_of = np.full(dims.per_batch, -1)  # the row of each example of a batch; -1 if not on this instance
        self._row_of[dims.own] = np.arange(len(dims.own))

    def positions(self) -> Iterator[Position]:
        while self._epochs is None or self._at.epoch < self._epochs:
            yield self._at

    def __call__(self, position: Position) -> tuple[FeedBatch | None, Position]:
        assert position is self._at, "batches of a stream are made in turn"
        if self._items is None:
            self._items = self._stream.open(self._at, self._form)
        leaves, have = self._form.empty(len(self._dims.own)), 0
        while have < self._dims.per_batch:
            rows = self._items.take(self._dims.per_batch - have)
            if rows is None:
                break
            self._copy(rows, leaves, have)
            have += len(rows[0])
        kept = self._dims.kept(have, self._remainder)
        if have == self._dims.per_batch:
            self._at = self._items.position()
        elif kept or position.position:
            self._items, self._at = None, StreamPosition(position.epoch + 1, 0)
        else:
            raise self._dims.too_few(have, self._remainder, "remainder='pad'")
        if self._warns and have < self._dims.per_batch:
            self._dims.warn_of_updates_left_out(have, position.position + have, stacklevel=1)
        if not kept:
            return None, self._at
        is_real = self._dims.own < kept
        for leaf, fill in zip(leaves, self._fill, strict=True):
            leaf[~is_real] = fill
        tree = self._form.tree(leaves)
        return self._sender(tree, epoch=position.epoch, examples=kept, is_real=is_real), self._at

    def _copy(self, rows: list[Any], leaves: list[Any], first: int) -> None:
        """Copy examples of the batch, from number `first` on, into this instance's rows."""
        to = self._row_of[first : first + len(rows[0])]
        is_own = to >= 0
        if is_own.any():
            for leaf, read in zip(leaves, rows, strict=True):
                leaf[to[is_own]] = read[is_own]


def _position_of(state: Mapping[str, Any]) -> StreamPosition:
    own = ("source", "offset", "beyond")
    try:
        saved = {name: operator.index(value) for name, value in state.items() if name != "source"}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state={state!r} is not one of a stream: give what state() returned") from error
    names, offset, beyond = set(state) - set(own), saved.pop("offset", 0), saved.pop("beyond", 0)
    is_position = names == {"epoch", "position", "checksum"} and min(saved["epoch"], offset, beyond) >= 0
    if not is_position or saved["position"] < beyond:
        raise ValueError(f"state={dict(state)} is not one of a stream: give what state() returned")
    checksum = None if saved["checksum"] == -1 else saved["checksum"]
    return StreamPosition(saved["epoch"], saved["position"], checksum, state.get("source"), offset, beyond)
