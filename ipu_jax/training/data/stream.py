"""Open a source of one item after the other at a position, and cut its items into examples.

    what is given                          opened for epoch e by                       repeatable
    a function of the epoch                iter(function(e))                           yes
    an iterable, such as a DataLoader      iter(iterable), after its `set_epoch(e)`    yes
    an iterator, such as a generator       itself                                      no: one epoch, from its start

A position is the number of examples before it. The source's own `load_state_dict` restores it, if the source has one.
Otherwise the examples before it are read again. The last of these examples is then compared with the checksum in the
position, since a source that shuffles differently each time would lose examples unnoticed.
"""

import copy
import dataclasses
import inspect
import zlib
from typing import Any

import numpy as np

from ipu_jax.base.annotations import Json, Tree
from ipu_jax.training.data._order import Position
from ipu_jax.training.data.leaves import Form

_AGAIN = "give a function of the epoch that returns a fresh iterator, such as lambda epoch: read(files)"


@dataclasses.dataclass(frozen=True)
class StreamPosition(Position):
    """A position in a stream.

    Attributes:
        checksum: the checksum of the example before the position; None at the start of an epoch.
        source: the result of the source's `state_dict()` before the item that contains the position; None if the source
            lacks it or `load_state_dict`, or at the start of an epoch.
        offset: the number of examples from the start of that item to the position.
        beyond: the number of examples from the example of the checksum, or from the start of the epoch, to the
            position, if the position is inside a batch.
    """

    checksum: int | None = None
    source: Json = dataclasses.field(default=None, compare=False)
    offset: int = 0
    beyond: int = 0

    __str__ = Position.__str__


class Stream:
    """Opens a source at any position to which it can return.

    Args:
        source: a function of the epoch, an iterable, or an iterator.
        batched: whether an item contains several examples, one per row of its arrays, rather than one.
        of_form: the other arguments of a `Form`.

    Raises:
        ValueError: the source is none of these.
    """

    def __init__(self, source: Any, *, batched: bool, **of_form: Tree):
        self._source, self._of_form = source, {"batched": batched, **of_form}
        is_function = callable(source) and not hasattr(source, "__iter__")
        if is_function and not _takes_an_epoch(source):
            raise ValueError(f"the source {_named(source)} does not take the number of an epoch: {_AGAIN}")
        if not is_function and (not hasattr(source, "__iter__") or isinstance(source, dict | str | bytes)):
            mend = "leave items out" if isinstance(source, dict) else "give an iterable"
            raise ValueError(f"the source is of type {type(source).__name__}, not one item after the other: {mend}")
        if of_form.get("buckets") is not None and of_form["buckets"].lengths is not None:
            raise ValueError("lengths= is given, but a stream's examples have no numbers: leave it out")
        self._is_function = is_function
        # The state at the start of an iterator, if it has `state_dict`: every epoch returns to it.
        self._start = _state_of(source) if hasattr(source, "__next__") else None
        self._is_once = hasattr(source, "__next__") and self._start is None
        self._is_opened = False

    def check_seek(self, epoch: int) -> None:
        """Raise if the source cannot return to the start of an epoch.

        Raises:
            ValueError: the source is an iterator without a state.
        """
        if self._is_once and (self._is_opened or epoch):
            raise self._once(StreamPosition(epoch, 0))

    def open(self, position: StreamPosition, form: Form | None) -> "Items":
        """Return the items from a position on.

        Args:
            position: where to begin.
            form: the form of the examples, or None to take it from the first item.

        Raises:
            ValueError: the source cannot return to the position, or did not give the same examples as before.
        """
        if position.position == position.beyond:
            position = dataclasses.replace(position, source=self._start, offset=position.beyond)
        if self._is_once and (self._is_opened or position.epoch or position.position):
            raise self._once(position)
        opened: Any = self._source(position.epoch) if self._is_function else self._source
        if not hasattr(opened, "__iter__"):
            raise ValueError(f"the source's function returned a value of type {type(opened).__name__}: {_AGAIN}")
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(position.epoch)
        if position.source is not None:
            if not hasattr(opened, "load_state_dict"):
                raise ValueError(
                    f"the state has the source's own state, but {_named(opened)} has no load_state_dict: give a source "
                    "like the one that was saved"
                )
            opened.load_state_dict(copy.deepcopy(position.source))
        self._is_opened = True
        items = Items(opened, position, form, **self._of_form)
        if position.position and position.source is None:
            items.skip(position)
        return items

    def _once(self, position: StreamPosition) -> ValueError:
        return ValueError(f"{_named(self._source)} cannot be repeated, so there is no way to {position}: {_AGAIN}")


class Items:
    """Examples of an opened stream, in the order of its items.

    Args:
        opened: the iterable.
        position: the position of the next example. If it contains no state of the source, `skip` must go there.
        form: the form of the examples, or None to take it from the first item.
        batched: whether an item contains several examples.
        of_form: the other arguments of a `Form`.

    Attributes:
        form: the form of the examples; None until an example is read.
    """

    def __init__(self, opened: Any, position: StreamPosition, form: Form | None, *, batched: bool, **of_form: Tree):
        self.form, self._batched, self._of_form = form, batched, of_form
        self._opened, self._iterator = opened, iter(opened)
        self._epoch, self._next = position.epoch, position.position
        # the last drawn item: its rows, the number of its next row, and the source's state before it
        self._rows: list[np.ndarray] = []
        self._count, self._at = 0, 0
        self._before, self._is_drawn = position.source, False
        self._first = position.offset
        self._taken: list[np.ndarray] = []

    def skip(self, to: StreamPosition) -> None:
        """Read the examples before a position again.

        Raises:
            ValueError: there are fewer of them, or the example of the checksum differs from before.
        """
        self._next = self._first = 0
        self._read_to(to.position - to.beyond, to)
        if to.checksum not in (None, _checksum(self._taken)):
            raise ValueError(
                f"the source gave other examples before {to} than when the state was saved: give one that repeats the "
                "order of each epoch, or that has state_dict and load_state_dict"
            )
        self._read_to(to.position, to)

    def _read_to(self, example: int, to: StreamPosition) -> None:
        while self._next < example - 1 and not self._batched:
            next(self._iterator, None)  # these examples need no conversion
            self._next, self._is_drawn = self._next + 1, True
        while self._next < example:
            if self.take(example - self._next) is None:
                raise ValueError(
                    f"the source ended at example {self._next}, before {to}: give the source whose state was saved"
                )

    def fetch(self) -> bool:
        """Draw the next item unless examples of the last item are left. Return whether there is another example.

        Raises:
            ValueError: an item is not like the first one.
        """
        while self._at == self._count:
            if self._batched and self._is_drawn:
                self._before = _state_of(self._opened)
            item = next(self._iterator, _END)
            if item is _END:
                return False
            self._is_drawn = True
            if self.form is None:
                self.form = Form(item, batched=self._batched, what=self._named_next(), **self._of_form)
            self._rows = self.form.rows(item, self._named_next)
            self._count = len(self._rows[0])
            self._at = min(self._first, self._count)
            self._first -= self._at
        return True

    def take(self, most: int) -> list[np.ndarray] | None:
        """Return the next examples, (n, ...) per leaf with n from 1 to `most`; None if there are no more.

        They may share memory with the source: copy them before the next call.

        Raises:
            ValueError: an item is not like the first one.
        """
        if not self.fetch():
            return None
        end = min(self._at + most, self._count)
        rows = [leaf[self._at : end] for leaf in self._rows]
        self._next, self._at = self._next + end - self._at, end
        self._taken = rows
        return rows

    def position(self) -> StreamPosition:
        """Return the position of the next example, after `take` has returned some."""
        is_between = self._at == self._count
        before, offset = (_state_of(self._opened), 0) if is_between else (self._before, self._at)
        return StreamPosition(self._epoch, self._next, _checksum(self._taken), before, offset)

    def _named_next(self) -> str:
        number = f"example {self._next} of epoch {self._epoch}"
        return f"the batch from {number} on" if self._batched else number


_END = object()


def _checksum(rows: list[np.ndarray]) -> int:
    """Return a checksum of the last example."""
    checksum = 0
    for leaf in rows:
        checksum = zlib.crc32(np.ascontiguousarray(leaf[-1]).tobytes(), checksum)
    return checksum


def _state_of(source: Any) -> Json:
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return copy.deepcopy(source.state_dict())
    return None


def _takes_an_epoch(function: Any) -> bool:
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # a builtin that has no signature
        return True
    return True


def _named(source: Any) -> str:
    return f"{source.__name__}()" if inspect.isroutine(source) else f"a {type(source).__name__}"
