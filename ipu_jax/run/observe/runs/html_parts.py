"""Hold the parts that pages about runs share: tables, verdicts, and the way from a template to a file."""

import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.opening import replacing

MOST_POINTS: Final = 1000
"""The most points of a curve on a page."""
MARKS: Final = {"good": "✓", "fair": "!", "bad": "✗"}


def write_page(
    path: str | os.PathLike[str], body: str, scripts: Sequence[str], data: Json, parts: Mapping[str, str]
) -> Path:
    """Write a page from a frame that all share and a body: one file with its style, its scripts and their data.

    Args:
        path: the file. An existing one is replaced once the new one is complete.
        body: the name of the file with a comment for each part, such as `<!--ADVICE-->`.
        scripts: the names of the scripts' files, in their order.
        data: for the scripts.
        parts: HTML by the name of the part.

    Raises:
        OSError: the file cannot be written; an existing file is kept.
    """
    # no text of the data can end the script
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    text = _file("frame.html")
    shared = {"BODY": _file(body), "CSS": _file("page.css"), "JS": "".join(map(_file, scripts)), "DATA": encoded}
    for name, part in (shared | {**parts}).items():
        text = text.replace(f"<!--{name}-->", part)
    with replacing(path) as file:
        file.write(text.encode(errors="replace"))  # such as half a surrogate pair in a command line
    return Path(path)


def check_page(path: Json, checks: Sequence[tuple[str, Json, bool, str]]) -> None:
    """Check what a page is made of: its path, and arguments with their name, value, whether it is right, and the mend.

    Raises:
        ValueError: one of them is wrong.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else type(path).__name__
    if not name.lower().endswith(".html"):
        raise ValueError(f"path={name!r} is not an HTML file: give a name that ends in .html")
    for name, given, is_right, mend in checks:
        if not is_right:
            raise ValueError(f"{name}={type(given).__name__} is of the wrong type: give {mend}")


def table(rows: Mapping[str, str]) -> str:
    """Return a table of names and texts."""
    if not rows:
        return "<p>None are known.</p>"
    cells = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<div class='scroll'><table>{cells}</table></div>"


def folded(summary: str, rows: Mapping[str, str]) -> str:
    """Return a table under a line that opens it; nothing without rows."""
    return f"<details><summary>{summary}</summary>{table(rows)}</details>" if rows else ""


def _file(name: str) -> str:
    return (resources.files("ipu_jax.run.observe.runs") / name).read_text(encoding="utf-8")
