"""Draw lines and progress bars of many instances on one terminal, or into one file or pipe.

On a terminal, the passing state of a bar stays on the last row, and lines are put above it. Elsewhere a state is an
ordinary line: one is printed every few seconds, and always the last.

    [1,1]<stdout>:a line
    [1,0]<stderr>: 40%|####      | 4/10        <- the last row: overwritten

The returned bytes are written at once. They are whole lines, except for parts of unfinished lines.

Nothing here imports jax.
"""

import dataclasses
import re
import unicodedata
from typing import Final

EVERY: Final = 3.0
"""Seconds between two passing states where they cannot be overwritten."""

_CLEAR: Final = b"\r\x1b[K"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass
class _Bar:
    tag: bytes
    text: bytes = b""
    printed_at: float = float("-inf")
    printed: bool = True


class Screen:
    """Draw the content of one terminal, or the end of one file or pipe.

    Args:
        columns: the width of the terminal; None if there is no terminal.
    """

    def __init__(self, columns: int | None):
        self.columns = columns
        self._open: str | None = None  # the stream of the unfinished last line
        self._bars: dict[str, _Bar] = {}
        self._drawn = False

    def line(self, key: str, tag: bytes, text: bytes, *, goes_on: bool = False) -> bytes:
        """Return the bytes that draw a line of stream `key`, the rest of a line, or several lines."""
        self._bars.pop(key, None)
        return self._above_bar(self._begin(key, tag, goes_on) + text.replace(b"\n", b"\n" + tag) + b"\n", None)

    def part(self, key: str, tag: bytes, text: bytes, *, goes_on: bool = False) -> bytes:
        """Return the bytes that draw the beginning of an unfinished line, or more of it."""
        self._bars.pop(key, None)
        return self._above_bar(self._begin(key, tag, goes_on) + text, key)

    def state(self, key: str, tag: bytes, text: bytes, now: float) -> bytes:
        """Return the bytes that draw a passing text; nothing if it is too early to draw it."""
        if not text.strip():  # it wipes the bar
            bar = self._bars.pop(key, None)
            return self._above_bar(b"", self._open) if bar and self.columns else b""
        bar = self._bars.pop(key, None) or _Bar(tag)
        self._bars[key] = bar  # now the last one, so that it is drawn
        bar.tag, bar.text, bar.printed = tag, text, False
        return self._above_bar(b"", self._open) if self.columns else self.tick(now)

    def tick(self, now: float) -> bytes:
        """Return the bytes that draw the passing texts that have waited long enough."""
        if self.columns:
            return b""
        out = b""
        for key, bar in self._bars.items():
            if not bar.printed and now - bar.printed_at >= EVERY:
                out += self._begin(key, bar.tag, goes_on=False) + bar.text + b"\n"
                self._open, bar.printed, bar.printed_at = None, True, now
        return out

    def finish(self, key: str) -> bytes:
        """Return the bytes that turn the last state of an ended stream into a line."""
        bar = self._bars.get(key)
        if bar is None or (bar.printed and not self.columns):
            self._bars.pop(key, None)
            return b""
        return self.line(key, bar.tag, bar.text)

    def close(self) -> bytes:
        """Return the bytes that end the last line."""
        out = b"".join(self.finish(key) for key in list(self._bars))
        if self._open is not None:
            out, self._open = out + b"\n", None
        return out

    def _begin(self, key: str, tag: bytes, goes_on: bool) -> bytes:
        if self._open is None:
            return tag
        return b"" if goes_on and self._open == key else b"\n" + tag

    def _above_bar(self, text: bytes, now_open: str | None) -> bytes:
        """Return a text with the bar below it; there is no bar below an unfinished line."""
        out = (_CLEAR if self._drawn else b"") + text
        self._open = now_open
        bar = next(reversed(self._bars.values()), None)
        self._drawn = bool(self.columns and bar and now_open is None)
        if self._drawn and bar and self.columns:
            out += b"\r" + fitting(bar.tag + bar.text, self.columns - 1)
        return out


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
