"""Prepare docstrings and signatures for the site: examples become code blocks, private names become readable.

One entry of a docstring for several names becomes several. Markdown takes `[2 1] [3 4]` for a link, and `2 * 3 * 4` for
emphasis: such characters are escaped outside of code.
"""

import re
from typing import Any

import griffe

_SPECIAL = re.compile(r"(`[^`]*`)|(?<=\])(?=$| ?\[)|(?<=\d)\*(?=\d)|(?<=\w) \*(?= \w)")
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*)$")


class Markdown(griffe.Extension):
    """Rewrite each docstring before it is parsed, and each signature before it is shown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(with_single_entries(obj.docstring.value))
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                parameter.default = _value_of(parameter.default, obj.module)
                _show(parameter.annotation)
            _show(obj.returns)
        elif isinstance(obj, griffe.Attribute) and isinstance(obj.parent, griffe.Class):
            obj.value = _value_of(obj.value, obj.module)  # the default of a dataclass's field
        elif isinstance(obj, griffe.Attribute) and "lambda" in str(obj.value):
            obj.value = None


def _value_of(default: str | griffe.Expr | None, module: griffe.Module) -> str | griffe.Expr | None:
    """Return the value of a private constant of the module, or what a factory makes; any other default as it is."""
    name = str(default)
    if factory := re.fullmatch(r"\(lambda: (.*)\)\(\)", name):
        return factory[1]
    if name.startswith("_") and isinstance(constant := module.members.get(name), griffe.Attribute):
        return constant.value
    return default


def _show(annotation: str | griffe.Expr | None) -> None:
    """Let the private type variables of an annotation have names without an underscore."""
    for part in annotation.iterate(flat=True) if isinstance(annotation, griffe.Expr) else ():
        if isinstance(part, griffe.ExprName):
            part.name = part.name.removeprefix("_")


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
