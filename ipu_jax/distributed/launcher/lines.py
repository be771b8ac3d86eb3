"""Split the output of programs into lines and passing states of progress bars, and draw them on one terminal or file.

**Lines.** A line ends at a newline. Text that ends with a bare carriage return, or follows one, is *passing*: it is
meant to be overwritten, like the states of a progress bar.

    "\\r 10%\\r 20%"  "\\r100%\\n"  "loading..."          ->  State(10%)  State(20%)  Line(100%)  Part(loading...)

Text without an end is passed on after a while, so that a program's last words before it waits are seen: as a part of a
line, or as a state if the stream has drawn a bar.

**Screen.** On a terminal, the passing state of a bar stays on the last row, and lines are put above it. Elsewhere a
state is an ordinary line: one is printed every few seconds, and always the last.

    [1,1]<stdout>:a line
    [1,0]<stderr>: 40%|####      | 4/10        <- the last row: overwritten

The returned bytes are written at once. They are whole lines, except for parts of unfinished lines.

Nothing here imports jax.
"""

import dataclasses
import itertools
import re
import unicodedata
from typing import Final, Literal

STATE_AFTER: Final = 0.1
"""Seconds after which a passing text without an end is shown."""
PART_AFTER: Final = 1.0
"""Seconds after which a text without an end that follows a newline is passed on."""
LONGEST: Final = 1048576
"""Bytes of a line after which it is passed on in parts."""
EVERY: Final = 3.0
"""Seconds between two passing states where they cannot be overwritten."""

# The beginning of a UTF-8 character, or of a terminal command, which a cut must not separate from its end.
_BEGUN: Final = re.compile(
    rb"(?:[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2}|\x1b(?:\[[0-9;:]{0,30})?)\Z"
)
_CLEAR: Final = b"\r\x1b[K"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A snippet of a program's output, without its end.

    Attributes:
        kind: "line" is a whole line, the rest of a line, or several whole lines with newlines between them. "part" is
            the beginning of a line, or more of it. "state" is a passing text, or several with newlines between them.
        text: its content.
        goes_on: whether a part of the same line came before.
        was_state: whether a line was a passing text until its newline came.
    """

    kind: Literal["line", "part", "state"]
    text: bytes
    goes_on: bool = False
    was_state: bool = False


class Splitter:
    """Splits one stream into snippets.

    >>> splitter = Splitter()
    >>> [(one.kind, one.text) for one in splitter.feed(b"one\\r\\ntwo\\r 10%\\r 20%\\r100%\\nthree", now=0.0)]
    [('line', b'one'), ('state', b'two'), ('state', b' 10%\\n 20%'), ('line', b'100%')]
    >>> [(one.kind, one.text) for one in splitter.tick(now=2.0)]
    [('state', b'three')]
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # text without an end; each byte is copied here once, however long it becomes
        self._returned = False  # whether a carriage return follows it, which may belong to a newline
        self._since = 0.0  # when it began, or was last passed on
        self._passing = False  # whether it follows a bare carriage return
        self._bars = False  # whether the stream has had one: what follows a newline may be a bar, as rich draws it
        self._shown = True  # whether it was passed on as a state
        self._open = False  # whether parts of its line were passed on
        self._state = b""  # the last state

    def feed(self, data: bytes, now: float) -> list[Snippet]:
        """Return the snippets that `data` completes."""
        if not self._rest and not self._returned:
            self._since = now
        text, snippets, begin = (b"\r" + data if self._returned else data), list[Snippet](), 0
        self._returned = text.endswith(b"\r")
        if self._returned:
            text = text[:-1]
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        line, state = text.find(b"\n"), text.find(b"\r")
        while line >= 0 or state >= 0:
            passing = line < 0 or 0 <= state < line
            first, other, end = (state, line, b"\r") if passing else (line, state, b"\n")
            snippets += self._ended(self._with_rest(text[begin:first]), passing=passing)
            begin = 1 + text.rindex(end, first, other if other >= 0 else len(text))
            if begin > first + 1:  # passing on each of them on its own would take most of the time
                snippets += self._more(text[first + 1 : begin - 1], passing=passing)
            line, state = (line, text.find(b"\r", begin)) if passing else (text.find(b"\n", begin), state)
        if begin:
            self._since = now
        self._rest += text[begin:]
        self._shown = self._shown and not data
        if len(self._rest) > LONGEST:
            begun = _BEGUN.search(self._rest, len(self._rest) - 40)
            kept = bytes(self._rest[begun.start() :]) if begun else b""
            del self._rest[len(self._rest) - len(kept) :]
            snippets.append(self._part(now))
            self._rest += kept
        return snippets

    def tick(self, now: float) -> list[Snippet]:
        """Return the snippets that have waited too long for their end."""
        waited = now - self._since
        if self._returned:
            if waited < STATE_AFTER:
                return []
            self._returned = False
            return self._ended(self._with_rest(), passing=True)
        if not self._rest:
            return []
        if self._passing or self._bars:
            if self._shown or waited < STATE_AFTER:
                return []
            self._shown, self._state, self._since = True, bytes(self._rest), now
            return [Snippet("state", self._state)]
        return [self._part(now)] if waited >= PART_AFTER else []

    def wait(self, now: float) -> None:
        """Restart the wait for the end of unfinished text, since nobody has read the stream for a while."""
        self._since = now

    def finish(self) -> list[Snippet]:
        """Return the rest at the end of the stream; the last line need not have an end."""
        text, returned, self._returned = self._with_rest(), self._returned, False
        return self._ended(text, passing=returned) if text or returned else []

    def _with_rest(self, text: bytes = b"") -> bytes:
        """Return the text that had no end, followed by `text`."""
        if self._rest:
            self._rest += text
            text = bytes(self._rest)
            self._rest.clear()
        return text

    def _ended(self, text: bytes, *, passing: bool) -> list[Snippet]:
        goes_on, self._open = self._open, False
        followed, self._passing = self._passing, passing
        self._shown = True
        if passing:
            self._bars = True
            if text == self._state and not goes_on:
                return []  # it is already shown, or a bar begins with its carriage return
            self._state = text
            return [Snippet("line", text, goes_on) if goes_on else Snippet("state", text)]
        if not text and followed and not goes_on:
            text = self._state  # a newline leaves the last state in place
        was_state = followed or (self._state != b"" and text.startswith(self._state))
        self._state = b""
        return [Snippet("line", text, goes_on, was_state)]

    def _more(self, text: bytes, *, passing: bool) -> list[Snippet]:
        """Return the snippet of the lines, or passing texts, that follow one with the same end."""
        if not passing:
            return [Snippet("line", text)]
        before = self._state
        states = [state for state, _ in itertools.groupby([before, *text.split(b"\r")])][1:]
        if not states:
            return []
        self._state = states[-1]
        return [Snippet("state", b"\n".join(states))]

    def _part(self, now: float) -> Snippet:
        snippet = Snippet("part", self._with_rest(), self._open)
        self._open, self._passing, self._since = True, False, now
        return snippet


class Screen:
    """Draws the content of one terminal, or the end of one file or pipe. Only one passing text is drawn: the newest.

    Args:
        columns: the width of the terminal; None if there is no terminal.
    """

    def __init__(self, columns: int | None):
        self.columns = columns
        self._open: str | None = None  # the stream of the unfinished last line
        self._of, self._tag, self._text = "", b"", b""  # the passing text, and its stream; none if that is ""
        self._printed_at, self._printed, self._drawn = float("-inf"), True, False

    def line(self, key: str, tag: bytes, text: bytes, *, goes_on: bool = False) -> bytes:
        """Return the bytes that draw a line of stream `key`, the rest of a line, or several lines."""
        tagged = text.replace(b"\n", b"\n" + tag) if b"\n" in text else text
        return self._above_bar(key, None, self._begin(key, tag, goes_on), tagged, b"\n")

    def part(self, key: str, tag: bytes, text: bytes, *, goes_on: bool = False) -> bytes:
        """Return the bytes that draw the beginning of an unfinished line, or more of it."""
        return self._above_bar(key, key, self._begin(key, tag, goes_on), text)

    def state(self, key: str, tag: bytes, text: bytes, now: float) -> bytes:
        """Return the bytes that draw a passing text; nothing if it is too early to draw it."""
        if not text.strip():  # it wipes the bar
            return self._above_bar(key, self._open) if self._of == key and self.columns else b""
        if self._of != key:
            self._printed_at = float("-inf")
        self._of, self._tag, self._text, self._printed = key, tag, text, False
        return self._above_bar("", self._open) if self.columns else self.tick(now)

    def tick(self, now: float) -> bytes:
        """Return the bytes that draw the passing text where it cannot be overwritten, if it has waited long enough."""
        if self.columns or self._printed or now - self._printed_at < EVERY:
            return b""
        self._printed, self._printed_at = True, now
        out, self._open = self._begin(self._of, self._tag, goes_on=False) + self._text + b"\n", None
        return out

    def finish(self, key: str) -> bytes:
        """Return the bytes that turn the last state of an ended stream into a line."""
        if self._of != key or self._printed:
            return b""
        return self.line(key, self._tag, self._text)

    def close(self) -> bytes:
        """Return the bytes that end the last line."""
        out = self.finish(self._of)
        if self._open is not None:
            out, self._open = out + b"\n", None
        return out

    def _begin(self, key: str, tag: bytes, goes_on: bool) -> bytes:
        if self._open is None:
            return tag
        return b"" if goes_on and self._open == key else b"\n" + tag

    def _above_bar(self, key: str, now_open: str | None, *text: bytes) -> bytes:
        """Return a text of stream `key`, whose bar is over, with another bar below; none below an unfinished line."""
        if key and self._of == key:
            self._of, self._printed = "", True
        cleared, self._open = _CLEAR if self._drawn else b"", now_open
        self._drawn = bool(self.columns and self._of and now_open is None)
        bar = b"\r" + fitting(self._tag + self._text, self.columns - 1) if self._drawn and self.columns else b""
        return b"".join((cleared, *text, bar))  # a flood is copied once


def fitting(text: bytes, columns: int) -> bytes:
    """Return as much of a text as fits in a row of a terminal, since a longer text could not be overwritten.

    >>> fitting("100%|██████████| 24/24".encode(), 10).decode()
    '100%|█████'
    """
    shown = text.decode(errors="surrogateescape")
    without = _COLOURS.sub("", shown)
    if sum(map(_width, without)) <= columns:
        return text
    taken, width = "", 0
    for letter in without:
        width += _width(letter)
        if width > columns:
            break
        taken += letter
    return taken.encode(errors="surrogateescape")


def _width(letter: str) -> int:
    if unicodedata.combining(letter) or letter < " ":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
