"""Draw a look as a table: the most important columns that fit, and never a row on two lines.

       pid  command          IPUs  step  steps/s    memory  busy  last step  state
     31939  train.py --fast     2  1204     19.8  273.4 MB   13%     0.01 s  running

Nothing here imports jax.
"""

import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ipu_jax.base.annotations import Json
from ipu_jax.base.showing import counted
from ipu_jax.base.terminal import printable
from ipu_jax.distributed.launcher.topology import ranges
from ipu_jax.run.observe.monitor.records import Ipu
from ipu_jax.run.observe.monitor.rows import Look, ProcessRow

UNKNOWN: Final = "-"
_GAP: Final = 2
_BAR: Final = 8
"""Characters of a bar."""
_STYLES: Final = {"running": "green", "busy": "cyan", "ending": "dim", "failed": "bold red", "stuck": "bold red"}
"""The styles of states, by their first word; else yellow, such as "compiling" and "stopped"."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: its head, how a row's entry is made, and its rank.

    Attributes:
        head: its name.
        entry: makes the text of a row.
        rank: columns of a lower rank are kept longer when the terminal is narrow.
        needed: whether a row needs the column; without such a row, it is left out.
        share: the filled part of a bar beside a row's entry; None for no bar.
        style: the style of a row's entry.
        least, most: the width to which its entries can be cut before the column is left out, and its largest width;
            None for entries that are shown whole and right-aligned, such as numbers.
    """

    head: str
    entry: Callable[[ProcessRow], str]
    rank: int
    least: int | None = None
    most: int | None = None
    needed: Callable[[ProcessRow], bool] = lambda row: True
    share: Callable[[ProcessRow], float | None] = lambda row: None
    style: Callable[[ProcessRow], str] = lambda row: ""

    def cell(self, row: ProcessRow, *, bars: bool) -> Text:
        """Return a row's entry, with its bar if bars are drawn."""
        text, share = _line(self.entry(row), self.style(row)), self.share(row) if bars else None
        if share is None:
            return text
        full = min(_BAR, max(0, int(_BAR * share + 0.5)))
        return Text.assemble(("━" * full, "green"), ("╌" * (_BAR - full), "dim"), " ", text, no_wrap=True)

    def width(self, rows: Sequence[ProcessRow], *, bars: bool) -> int:
        """Return the width in cells that the column needs; with less, it is left out."""
        longest = max(cell_len(self.head), *(self.cell(row, bars=bars).cell_len for row in rows))
        return longest if self.least is None else min(longest, self.least)


def shown_seconds(seconds: float) -> str:
    """Return a duration in a form that people read easily.

    >>> [shown_seconds(s) for s in (0.012, 75, 7384, 200_000)]
    ['0.01 s', '0:01:15', '2:03:04', '2 days, 7:33:20']
    """
    return f"{seconds:.{2 if seconds < 10 else 0}f} s" if seconds < 60 else _clock(seconds)


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds)))


def stages_of(ipus: Sequence[Ipu]) -> str:
    """Return the stages on the IPUs of a process: for each IPU of the replica, then the stages that are on all IPUs.

    >>> first, second = (Ipu(i, "cpu", "cpu", 0, i, (("mlp", "conv")[i], "head")) for i in range(2))
    >>> stages_of([first, second])
    '0 mlp, 1 conv, all head'
    >>> stages_of([first])
    '0 mlp head'
    """
    of_ipu = {ipu.ipu: ipu.stages for ipu in ipus if ipu.ipu is not None}
    everywhere = set.intersection(*map(set, of_ipu.values())) if len(of_ipu) > 1 else set[str]()
    parts = [(str(ipu), [stage for stage in of_ipu[ipu] if stage not in everywhere]) for ipu in sorted(of_ipu)]
    parts += [("all", [stage for stage in stages if stage in everywhere]) for stages in list(of_ipu.values())[:1]]
    return ", ".join(f"{place} {' '.join(stages)}" for place, stages in parts if stages) or UNKNOWN


def count_of(ipus: Sequence[Ipu]) -> int:
    """Return the number of IPUs. With further axes, each of them is several devices.

    >>> count_of([Ipu(i, "cpu", "cpu", 0, i // 2, further=(i % 2,)) for i in range(4)])
    2
    """
    placed = {(ipu.replica, ipu.ipu) for ipu in ipus if ipu.ipu is not None}
    return len(placed) + sum(ipu.ipu is None for ipu in ipus)


def _ipus(row: ProcessRow) -> str:
    count = count_of(row.ipus)
    return str(count) if count == len(row.ipus) else f"{count} ({len(row.ipus)} devices)"


def _speed(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _or_unknown(value: Json, shown: Callable[[Any], str]) -> str:
    return UNKNOWN if value is None else shown(value)


def _replicas(row: ProcessRow) -> str:
    own = {ipu.replica for ipu in row.ipus if ipu.replica is not None}
    return f"{ranges(sorted(own))} of {row.replicas}" if own else UNKNOWN


def _state(row: ProcessRow) -> str:
    return row.doing or row.state if row.state == "running" and row.doing != "stepping" else row.state


def _style(row: ProcessRow) -> str:
    return _STYLES.get(_state(row).partition(":")[0], "yellow")


def _percent(share: float | None) -> str:
    return _or_unknown(share, lambda share: f"{max(0.0, share):.0%}")


def _left(row: ProcessRow) -> str:
    return _or_unknown(row.seconds_left, _clock)


def _step(row: ProcessRow) -> str:
    return f"{row.step or 0}/{row.planned_updates}" if _done(row) is not None else _or_unknown(row.step, str)


def _done(row: ProcessRow) -> float | None:
    """Return the share of the planned updates that have been made; None if it is unknown."""
    if row.planned_after is None or row.planned_updates is None or row.planned_updates <= row.planned_after:
        return None
    share = ((row.step or 0) - row.planned_after) / (row.planned_updates - row.planned_after)
    return share if share <= 1 else None  # it goes on in a loop of its own


def _held(row: ProcessRow) -> float | None:
    """Return the share of the devices' memory that is in use; None if it is unknown."""
    return row.device_bytes / row.device_limit_bytes if row.device_bytes and row.device_limit_bytes else None


COLUMNS: Final = (
    Column("pid", lambda row: str(row.pid), 0),
    Column("user", lambda row: row.user, 13, least=4, most=12),
    Column("command", lambda row: row.command, 6, least=14, most=60),
    Column("time", lambda row: shown_seconds(row.running_seconds), 11),
    Column("IPUs", _ipus, 4),
    Column("instance", lambda row: f"{row.instance} of {row.instances}", 12, needed=lambda row: row.instances > 1),
    Column("replica", _replicas, 14, needed=lambda row: (row.replicas or 1) > 1),
    Column("stage", lambda row: stages_of(row.ipus), 16, least=12, most=40),
    Column("step", _step, 2),
    Column("done", lambda row: _percent(_done(row)), 7, needed=lambda row: _done(row) is not None, share=_done),
    Column("left", _left, 5, needed=lambda row: row.seconds_left is not None),
    Column("steps/s", lambda row: _speed(row.steps_per_second), 3),
    Column("samples/s", lambda row: _speed(row.samples_per_second), 15),
    Column("memory", lambda row: decimal(row.device_bytes or row.rss_bytes), 9, share=_held),
    Column("busy", lambda row: _percent(row.busy_share), 10),
    Column("last step", lambda row: _or_unknown(row.last_step_seconds, shown_seconds), 8),
    Column("state", _state, 1, least=12, most=30, style=_style),
)


def fitting(rows: Sequence[ProcessRow], width: int, *, bars: bool = False) -> tuple[Column, ...]:
    """Return the columns that fit into a width. A column is kept only if all columns of a lower rank are kept."""
    needed = [column for column in COLUMNS if any(map(column.needed, rows))]
    ranked = sorted(needed, key=lambda column: column.rank)
    left, kept = width + _GAP, 0
    for column in ranked:
        left -= column.width(rows, bars=bars) + _GAP
        kept += left >= 0
    return tuple(column for column in needed if column in ranked[:kept])


def picture_of(look: Look, width: int, about: str, notes: Sequence[str] = (), *, bars: bool = False) -> Group:
    """Return a look as lines, none of which is wider than `width`.

    The lines contain no escape sequences: other processes write the records, and rich lets escapes pass.

    Args:
        look: the processes to show.
        width: columns of the terminal.
        about: what the first line says about the host.
        notes: more lines.
        bars: whether to draw bars beside shares.
    """
    ipus = sum(count_of(row.ipus) for row in look.rows)
    about = f"{about}: {counted(len(look.rows), 'process')} on {counted(ipus, 'IPU')}"
    below = [_line(f"{row.pid} is {row.state}: {row.reason}") for row in look.rows if row.reason]
    if look.ignored:
        are = "files or folders are not records" if len(look.ignored) > 1 else "file or folder is not a record"
        below.append(_line(f"{len(look.ignored)} {are}: --json names them", "dim"))
    table = [_table(look.rows, width, bars=bars)] if look.rows else []
    return Group(_line(about, "bold"), *table, *below, *map(_line, notes))


def _table(rows: Sequence[ProcessRow], width: int, *, bars: bool) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    columns = fitting(rows, width, bars=bars)
    for column in columns:
        # rich narrows only the columns that it may wrap; `_line` cuts their texts instead of wrapping them
        fixed = column.least is None
        justify = "right" if fixed else "left"
        table.add_column(_line(column.head), justify=justify, no_wrap=fixed, max_width=column.most)
    for row in rows:
        style = "" if row.state == "running" else _style(row)
        table.add_row(*(column.cell(row, bars=bars) for column in columns), style=style)
    return table


def about_host(name: str) -> str:
    """Return a description of this host: its name, cores and load."""
    return f"{name}, {counted(os.cpu_count() or 1, 'core')}, load {os.getloadavg()[0]:.2f}"


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")
