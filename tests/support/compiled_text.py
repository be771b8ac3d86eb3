"""Read the text of compiled programs."""

import re


def computations(hlo: str) -> dict[str, list[str]]:
    """Return the instructions of each computation in a compiled program's text."""
    found: dict[str, list[str]] = {}
    inside: list[str] = []
    for line in hlo.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside = found.setdefault(opened[1], [])
        elif " = " in line:
            inside.append(line.strip())
    return found
