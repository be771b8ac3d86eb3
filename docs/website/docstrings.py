"""Prepare docstrings for Markdown: examples become code blocks, and one entry for several names becomes several.

Markdown takes `[2 1] [3 4]` for a link, and `2 * 3 * 4` for emphasis: such characters are escaped outside of code.
"""

import re
from typing import Any

import griffe

_SPECIAL = re.compile(r"(`[^`]*`)|(?<=\])(?=$| ?\[)|(?<=\d)\*(?=\d)|(?<=\w) \*(?= \w)")
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$")


class Markdown(griffe.Extension):
    """Rewrite each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(with_single_entries(obj.docstring.value))


def with_blocks(text: str) -> str:
    """Return a docstring with its `>>>` examples in code fences.

    >>> with_blocks("Add.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Add.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines: list[str] = []
    is_example = False
    for line in text.splitlines():
        if not is_example and line.startswith(">>>"):
            is_example = True
            lines.append("```pycon")
        elif is_example and not line.strip():
            is_example = False
            lines.append("```")
        lines.append(line if is_example else _SPECIAL.sub(_escaped, line))
    return "\n".join([*lines, *(["```"] if is_example else [])])


def _escaped(found: re.Match[str]) -> str:
    return found[1] or (found[0].replace("*", "\\*") or "\u2060")


def with_single_entries(text: str) -> str:
    """Return a docstring in which an entry for several names is there for each of them.

    >>> print(with_single_entries("Args:\\n    a, b: numbers\\n        to add.\\n    c: the rest"))
    Args:
        a: numbers
            to add.
        b: numbers
            to add.
        c: the rest
    """
    lines, result = text.splitlines(), list[str]()
    while lines:
        several = _SEVERAL.match(lines[0])
        if several is None:
            result.append(lines.pop(0))
            continue
        end = 1
        while end < len(lines) and lines[end].startswith(f"{several[1]} "):
            end += 1
        for name in several[2].split(", "):
            result += [f"{several[1]}{name}: {several[3]}", *lines[1:end]]
        lines = lines[end:]
    return "\n".join(result)
