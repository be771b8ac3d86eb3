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

_COMMANDS: Final = re.compile(
    rb"""
    [\x00-\x08\x0b-\x1f\x7f-\x9f\xc2]                                  # how each begins
    (?: (?<=\x1b) (?: \] [^\x07\x1b\n]* (?: \x07 | \x1b\\ )?          # OSC
                    | [PX^_] [^\x1b\n]* (?: \x1b\\ )?                # DCS, SOS, PM, APC
                    | \[ (?! [0-9;:]* m ) [0-?]* [ -/]* [@-~]?        # CSI, but for a colour
                    | (?! \[ ) [ -/]* [0-~]? )
      | (?<= [\x00-\x08\x0b-\x1a\x1c-\x1f\x7f] )
      | (?<=\xc2) [\x80-\x9f]                                        # C1 in UTF-8
      | (?<= [\x80-\x9f] )                                           # C1 in 8 bits: no part of a letter in UTF-8
        (?<! [\xc2-\xf4] . ) (?<! [\xe0-\xf4] [\x80-\xbf] . ) (?<! [\xf0-\xf4] [\x80-\xbf] [\x80-\xbf] . )
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_C1: Final = bytes(range(0x80, 0xA0))
_BEGINNINGS: Final = bytes({*range(0x20), 0x7F, *_C1, 0xC2} - set(b"\t\n"))
_HARMLESS: Final = bytes(set(range(256)) - set(_BEGINNINGS))


def has_commands(text: bytes) -> bool:
    """Return whether `without_commands` would change a text.

    >>> has_commands("10%|█".encode()), has_commands(b"\\x1b[1;31mred\\x1b[0m"), has_commands(b"\\x1bc")
    (False, False, True)
    """
    suspects = text.translate(None, _HARMLESS)  # ten times as fast as a search
    if not suspects or (not suspects.translate(None, _C1) and _is_utf8(text)):
        return False
    return _COMMANDS.search(text) is not None


def without_commands(text: bytes) -> bytes:
    """Return a program's output without terminal commands, but with newlines, tabs and colours.

    >>> without_commands(b"\\x1b]52;c;cm0gLXJm\\x07one \\x1b[31mtwo\\x1b[0m\\x1b[2J\\x1bc \\xc2\\x9b31m\\x9b")
    b'one \\x1b[31mtwo\\x1b[0m 31m'
    """
    return _COMMANDS.sub(b"", text)


def printable(text: str) -> str:
    """Return a name or other foreign text in one line, without terminal commands.

    >>> printable("train\\n\\x1b]0;title\\x07 \\x9b2J naïve")
    'train ?]0;title? ?2J naïve'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
