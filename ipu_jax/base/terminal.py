"""Make text from other programs harmless for a terminal, which may take parts of it for commands.

    ESC ] 0 ; ... BEL     sets the window's title; ESC ] 52 the clipboard
    ESC c                 resets the terminal
    ESC [ 6 n, ENQ        is answered as keyboard input, as if the user had typed it
    ESC [ 2 J, BS, VT     erases text, or moves into the text of others
    U+0080 to U+009F      stand for ESC and a letter (C1): U+009B is ESC [
    ESC [ 31 m            is a colour

Nothing here imports jax.
"""

import re
from typing import Final

# Each of these three begins with one byte, or is one class of bytes, which `re` finds ten times as fast as many.
_ESCAPED: Final = re.compile(
    rb"""
    \x1b (?: \[ (?! [0-9;:]* m ) [0-?]* [ -/]* [@-~]?        # CSI, but for a colour
            | \] [^\x07\x1b\n]* (?: \x07 | \x1b\\ )?         # OSC
            | [PX^_] [^\x1b\n]* (?: \x1b\\ )?               # DCS, SOS, PM, APC
            | (?! \[ ) [ -/]* [0-~]? )
    """,
    re.VERBOSE,
)
_C1_IN_UTF8: Final = re.compile(rb"\xc2[\x80-\x9f]")
_C1_IN_8_BITS: Final = re.compile(  # no part of a letter in UTF-8
    rb"""
    [\x80-\x9f]
    (?<! [\xc2-\xf4] . ) (?<! [\xe0-\xf4] [\x80-\xbf] . ) (?<! [\xf0-\xf4] [\x80-\xbf] [\x80-\xbf] . )
    """,
    re.VERBOSE | re.DOTALL,
)
_C1: Final = bytes(range(0x80, 0xA0))
_CONTROLS: Final = bytes({*range(0x20), 0x7F} - set(b"\t\n\x1b"))
_SUSPECTS: Final = bytes({*_CONTROLS, *b"\x1b\xc2", *_C1})
_HARMLESS: Final = bytes(set(range(256)) - set(_SUSPECTS))
_MARK: Final = b"\0"  # in place of a command until the end: its neighbours must not become one


def without_commands(text: bytes) -> bytes:
    """Return a program's output without terminal commands, but with newlines, tabs and colours.

    >>> without_commands(b"\\x1b]52;c;cm0gLXJm\\x07one \\x1b[31mtwo\\x1b[0m\\x1b[2J\\x1bc \\xc2\\x9b31m\\x9b")
    b'one \\x1b[31mtwo\\x1b[0m 31m'
    """
    suspects = text.translate(None, _HARMLESS)
    if not suspects:
        return text
    text = _ESCAPED.sub(_MARK, text)
    if b"\xc2" in suspects:
        text = _C1_IN_UTF8.sub(_MARK, text)
    if suspects.translate(None, _CONTROLS + b"\x1b\xc2"):
        try:
            text.decode()
        except UnicodeDecodeError:  # else these bytes are parts of letters
            text = _C1_IN_8_BITS.sub(_MARK, text)
    return text.translate(None, _CONTROLS)


def printable(text: str) -> str:
    """Return a name or other foreign text in one line, without terminal commands.

    >>> printable("train\\n\\x1b]0;title\\x07 \\x9b2J naïve")
    'train ?]0;title? ?2J naïve'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
