"""Draw a look as a table: the columns that fit, the most wanted ones first, and never a row on two lines.

       pid  command          IPUs  step  steps/s  memory  busy  last step  state
     31939  train.py --fast  2     1204     19.8  273 MB   13%     0.01 s  running

Nothing here imports jax.
"""

import dataclasses
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ipu_jax._terminal import printable
from ipu_jax.observe.monitor.records import Ipu
from ipu_jax.observe.monitor.rows import Look, Row

UNKNOWN: Final = "-"
_GAP: Final = "  "
_CUT: Final = ".."
_BOLD: Final = "1"
_FAINT: Final = "2"
_COLOURS: Final = {"stuck": "1;31", "stopped": "33", "waiting": "33", "running": ""}
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: its head, how a row's entry is made, and how much it is wanted.

    Attributes:
        head: its name.
        entry: makes the text of a row.
        rank: columns of a lower rank are kept longer when the terminal is narrow.
        right: whether its entries end below each other, as numbers do.
        least: how far its entries may be cut before the column is left out; None for not at all.
        most: how wide it may become; None for no limit.
    """

    head: str
    entry: Callable[[Row], str]
    rank: int
    right: bool = True
    least: int | None = None
    most: int | None = None

    def text(self, row: Row) -> str:
        """Return the entry of a row, of which nothing commands the terminal: records are written by others."""
        return printable(self.entry(row))


def shown_bytes(number: float) -> str:
    """Return a number of bytes with its unit.

    >>> shown_bytes(273_456_789), shown_bytes(12)
    ('273 MB', '12 B')
    """
    for size, unit in _UNITS:
        if number >= 0.9995 * size:
            return f"{_three(number / size)} {unit}"
    return f"{number:.0f} B"


def shown_seconds(seconds: float) -> str:
    """Return a time as people write it.

    >>> [shown_seconds(s) for s in (0.012, 7.5, 75, 7384, 200_000)]
    ['0.01 s', '7.5 s', '1:15', '2:03:04', '2 d 7 h']
    """
    whole = int(seconds)
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 100 * 3600 // 2:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def numbers(values: Iterable[int]) -> str:
    """Return numbers, with ranges in place of neighbours.

    >>> numbers([0, 1, 2, 3, 6, 8, 9])
    '0-3,6,8-9'
    """
    parts: list[list[int]] = []
    for value in sorted(set(values)):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def stages_of(ipus: Sequence[Ipu]) -> str:
    """Return which stages lie on the IPUs of a process: per IPU of the replica, those on all of them last.

    >>> first, second = (Ipu(i, "cpu", "cpu", 0, i, (("mlp", "conv")[i], "head")) for i in range(2))
    >>> stages_of([first, second])
    '0 mlp, 1 conv, all head'
    >>> stages_of([first])
    '0 mlp head'
    """
    of_ipu = {ipu.ipu: ipu.stages for ipu in ipus if ipu.ipu is not None}
    if not any(of_ipu.values()):
        return UNKNOWN
    everywhere = set.intersection(*map(set, of_ipu.values())) if len(of_ipu) > 1 else set[str]()
    parts = [
        f"{ipu} {' '.join(stage for stage in stages if stage not in everywhere)}"
        for ipu, stages in sorted(of_ipu.items())
        if set(stages) - everywhere
    ]
    first = next(iter(of_ipu.values()))
    if everywhere:
        parts.append(f"all {' '.join(stage for stage in first if stage in everywhere)}")
    return ", ".join(parts)


def _three(number: float) -> str:
    """Return a number with three digits, or all those before its point."""
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}"


def _or_unknown(value: Any, shown: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else shown(value)


def _replicas(row: Row) -> str:
    own = [ipu.replica for ipu in row.ipus if ipu.replica is not None]
    return f"{numbers(own)} of {row.replicas}" if own else UNKNOWN


def _state(row: Row) -> str:
    return row.doing or row.state if row.state == "running" and row.doing != "stepping" else row.state


COLUMNS: Final = (
    Column("pid", lambda row: str(row.pid), 0),
    Column("user", lambda row: row.user, 11, right=False, most=12),
    Column("command", lambda row: row.command, 6, right=False, least=14, most=60),
    Column("time", lambda row: shown_seconds(row.running_seconds), 9),
    Column("IPUs", lambda row: str(len(row.ipus)), 4),
    Column("instance", lambda row: f"{row.instance} of {row.instances}", 10),
    Column("replica", _replicas, 12, most=12),
    Column("stage", lambda row: stages_of(row.ipus), 14, right=False, least=12, most=40),
    Column("step", lambda row: _or_unknown(row.step, str), 2),
    Column("steps/s", lambda row: _or_unknown(row.steps_per_second, _three), 3),
    Column("samples/s", lambda row: _or_unknown(row.samples_per_second, _three), 13),
    Column("memory", lambda row: shown_bytes(row.device_bytes or row.rss_bytes), 7),
    Column("busy", lambda row: _or_unknown(row.busy_share, lambda share: f"{share:.0%}"), 8),
    Column("last step", lambda row: _or_unknown(row.last_step_seconds, shown_seconds), 5),
    Column("state", _state, 1, right=False, least=12, most=30),
)


def fitting(rows: Sequence[Row], width: int | None) -> list[tuple[Column, int]]:
    """Return the columns that fit into a width, each with its own width; all columns if `width` is None."""
    wanted: dict[str, int] = {}
    for column in COLUMNS:
        longest = max([cells(column.head), *(cells(column.text(row)) for row in rows)])
        wanted[column.head] = longest if column.most is None else min(longest, column.most)
    if width is None:
        return [(column, wanted[column.head]) for column in COLUMNS]
    least = {
        column.head: wanted[column.head] if column.least is None else min(wanted[column.head], column.least)
        for column in COLUMNS
    }
    kept: set[str] = set()
    left = width + len(_GAP)
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        needed = least[column.head] + len(_GAP)
        if needed > left:
            break  # a column that is wanted less does not take its place
        left -= needed
        kept.add(column.head)
    widths: list[tuple[Column, int]] = []
    for column in COLUMNS:
        if column.head in kept:
            more = min(left, wanted[column.head] - least[column.head])
            left -= more
            widths.append((column, least[column.head] + more))
    return widths


def lines_of(look: Look, width: int | None, *, about: str, coloured: bool = False) -> list[str]:
    """Return a look as lines, none of which is wider than `width`.

    Args:
        look: what was found.
        width: columns of the terminal; None for no limit.
        about: what the first line says of the host.
        coloured: whether to mark the head, and rows that are not running, by a terminal's colours.
    """
    ipus = sum(len(row.ipus) for row in look.rows)
    lines = [(f"{about}: {_counted(len(look.rows), 'process', 'es')} on {_counted(ipus, 'IPU', 's')}", _BOLD)]
    if look.rows:
        columns = fitting(look.rows, width)
        lines.append((_GAP.join(_cell(column.head, column, size) for column, size in columns), _FAINT))
        for row in look.rows:
            text = _GAP.join(_cell(column.text(row), column, size) for column, size in columns)
            lines.append((text, _COLOURS[row.state]))
        lines += [(f"{row.pid} is {row.state}: {printable(row.reason)}", "") for row in look.rows if row.reason]
    if look.ignored:
        are = "files or folders are" if len(look.ignored) > 1 else "file or folder is"
        lines.append((f"{len(look.ignored)} {are} no record: --json names them", _FAINT))
    drawn: list[str] = []
    for text, style in lines:
        text = text.rstrip() if width is None else _cut(text.rstrip(), width)
        drawn.append(f"\x1b[{style}m{text}\x1b[0m" if coloured and style else text)
    return drawn


def cells(text: str) -> int:
    """Return how many cells of a terminal a text fills.

    >>> cells("naïve"), cells("訓練"), cells("e" + chr(0x301))
    (5, 4, 1)
    """
    return sum(map(_cells_of, text))


def _cells_of(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def about_host(name: str) -> str:
    """Return what is said of this host: its name, its cores and its load."""
    cores = os.cpu_count() or 1
    return f"{name}, {_counted(cores, 'core', 's')}, load {os.getloadavg()[0]:.2f}"


def _counted(count: int, what: str, plural: str) -> str:
    return f"{count} {what}{'' if count == 1 else plural}"


def _cell(text: str, column: Column, size: int) -> str:
    text = _cut(text, size)
    room = " " * (size - cells(text))
    return room + text if column.right else text + room


def _cut(text: str, size: int) -> str:
    """Return a text, or its beginning if it does not fit in so many cells."""
    if cells(text) <= size:
        return text
    kept, left = "", size - len(_CUT)
    for letter in text:
        left -= _cells_of(letter)
        if left < 0:
            break
        kept += letter
    return kept + _CUT[: max(0, size)]
