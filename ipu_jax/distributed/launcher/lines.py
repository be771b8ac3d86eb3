"""Cut what a program writes into lines, and tell a progress bar's passing states from them.

A line ends at a newline. Text that a bare carriage return ends, or that follows one, is *passing*: it is there to be
overwritten, as the states of a progress bar are.

    "\\r 10%\\r 20%"  "\\r100%\\n"  "loading..."          ->  State(10%)  State(20%)  Line(100%)  Part(loading...)

A text without an end is handed on after a while, so that what a program says before it waits is seen.

Nothing here imports jax.
"""

import dataclasses
import re
from typing import Final, Literal

STATE_AFTER: Final = 0.1
"""Seconds after which a passing text without an end is shown."""
PART_AFTER: Final = 1.0
"""Seconds after which a text without an end that follows a newline is handed on."""
LONGEST: Final = 1 << 20
"""Bytes of a line after which it is handed on in parts."""

_END: Final = re.compile(rb"\r\n|\n|\r")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of what a program writes, without its end.

    Attributes:
        kind: "line" is a whole line, or the rest of one; "part" the beginning of a line, or more of it; "state" a
            passing text.
        text: what it says.
        goes_on: whether a part of the same line came before.
    """

    kind: Literal["line", "part", "state"]
    text: bytes
    goes_on: bool = False


class Splitter:
    """Cuts one stream into pieces.

    >>> splitter = Splitter()
    >>> [(piece.kind, piece.text) for piece in splitter.feed(b"one\\r\\ntwo\\r 10%\\r 20%\\r100%\\nthree", now=0.0)]
    [('line', b'one'), ('state', b'two'), ('state', b' 10%'), ('state', b' 20%'), ('line', b'100%')]
    >>> [(piece.kind, piece.text) for piece in splitter.tick(now=2.0)]
    [('part', b'three')]
    """

    def __init__(self) -> None:
        self._rest = b""  # what has no end yet
        self._since = 0.0  # when it began, or was last handed on
        self._passing = False  # whether it follows a bare carriage return
        self._shown = True  # whether it was handed on as a state
        self._open = False  # whether parts of its line were handed on
        self._state = b""  # the last state

    def feed(self, data: bytes, now: float) -> list[Piece]:
        """Return the pieces that end with `data`."""
        if not self._rest:
            self._since = now
        text, pieces, begin = self._rest + data, list[Piece](), 0
        for found in _END.finditer(text):
            if found.end() == len(text) and found[0] == b"\r":
                break  # the newline that belongs to it may come with the next data
            pieces += self._ended(text[begin : found.start()], passing=found[0] == b"\r")
            begin, self._since = found.end(), now
        self._rest = text[begin:]
        self._shown = self._shown and not data
        if len(self._rest) > LONGEST:
            pieces.append(self._part(now))
        return pieces

    def tick(self, now: float) -> list[Piece]:
        """Return what has waited for its end for too long."""
        waited = now - self._since
        if self._rest.endswith(b"\r"):
            if waited < STATE_AFTER:
                return []
            text, self._rest = self._rest[:-1], b""
            return self._ended(text, passing=True)
        if not self._rest:
            return []
        if self._passing:
            if self._shown or waited < STATE_AFTER:
                return []
            self._shown, self._state, self._since = True, self._rest, now
            return [Piece("state", self._rest)]
        return [self._part(now)] if waited >= PART_AFTER else []

    def wait(self, now: float) -> None:
        """Begin to wait anew for the end of what has none, since nobody has read the stream for a while."""
        self._since = now

    def finish(self) -> list[Piece]:
        """Return what is left at the end of the stream: a last line need not have an end."""
        text, self._rest = self._rest, b""
        if text.endswith(b"\r"):
            return self._ended(text[:-1], passing=True)
        return self._ended(text, passing=False) if text else []

    def _ended(self, text: bytes, *, passing: bool) -> list[Piece]:
        goes_on, self._open = self._open, False
        followed, self._passing = self._passing, passing
        self._shown = True
        if passing:
            if text == self._state and not goes_on:
                return []  # it stands there, or a bar begins with its carriage return
            self._state = text
            return [Piece("line", text, goes_on) if goes_on else Piece("state", text)]
        if not text and followed and not goes_on:
            text = self._state  # a newline leaves the last state standing
        self._state = b""
        return [Piece("line", text, goes_on)]

    def _part(self, now: float) -> Piece:
        piece = Piece("part", self._rest, self._open)
        self._rest, self._open, self._passing, self._since = b"", True, False, now
        return piece
