"""Draw a schedule as text, a row per IPU and a column per tick, and parse such a drawing.

    1f1b: 2 stages on 2 IPUs, 2 micro-batches, 6 ticks, bubble 33.3%, one-phase clock
    stash: stage 0 holds 2, stage 1 holds 1
           ramp-up       main       ramp-down
    tick   0        1    2     3    4          5
    IPU 0  0F0      0F1        0B0             0B1
    IPU 1           1F0  1B0   1F1  1B1

A drawing of your own needs the rows only. Its cells are aligned with the numbers of a line "tick". If there is no such
line, they are separated by "|" or by two or more blanks, with "." for a tick in which an IPU is idle.
"""

import re

from ipu_jax.base.showing import Table
from ipu_jax.core.schedules._timetable import Kind, Placement, Rows, Task, Timetable, segments_of, tasks_of, tick_of
from ipu_jax.core.schedules.lifetimes import Lifetimes

_HEADER = re.compile(r"(?P<name>.+): \d+ stages? on (?P<ipus>\d+) IPUs?, .*?(?:, (?P<clock>one-phase) clock)?")
_IDLE = {"", ".", "-"}


# drawing


def draw(table: Timetable, bubble: float) -> str:
    """Return the drawing of a timetable. `parse` reads it back."""
    stages, tasks = len(table.placement), tasks_of(table)
    ticks = 1 + max(tick_of(table, task) for task in tasks)
    rows = [[f"IPU {k}", *([""] * ticks)] for k in range(table.ipus)]
    for task in tasks:
        at, ipu = 1 + tick_of(table, task), table.placement[task.stage]
        for k in range(table.ipus) if ipu is None else (ipu,):
            rows[k][at] += f" {task}" if rows[k][at] else str(task)
    phases = [_phase_of_pipeline(table, tick) for tick in range(ticks)]
    starts = ["", *(name if i == 0 or name != phases[i - 1] else "" for i, name in enumerate(phases))]
    lines = [starts, ["tick", *map(str, range(ticks))], *rows]
    lifetimes = Lifetimes(table)
    depths = [lifetimes.stash(s).depth() for s in range(stages)]
    header = [
        f"{table.name}: {stages} stages on {table.ipus} IPUs, {len(table.forward[0])} micro-batches, "
        f"{ticks} ticks, bubble {bubble:.1%}" + (", one-phase clock" if table.clock == "one-phase" else ""),
        "stash: " + ", ".join(f"stage {s} holds {depth}" for s, depth in enumerate(depths)),
    ]
    if table.ipus == 1 and None in table.placement:  # its rows cannot tell a concurrent stage from a local one
        header.append("placement: " + ", ".join("all IPUs" if ipu is None else f"IPU {ipu}" for ipu in table.placement))
    return "\n".join([*header, str(Table(lines, left=1 + ticks))])


def _phase_of_pipeline(table: Timetable, tick: int) -> str:
    """Return "ramp-up" before the last stage's first B, "ramp-down" after its last F, and "main" otherwise."""
    if tick < min(table.backward[-1]):
        return "ramp-up"
    return "main" if tick <= max(table.forward[-1]) else "ramp-down"


# parsing


def parse(text: str) -> Timetable:
    """Return the timetable that a text draws.

    Raises:
        ValueError: there are no rows, a cell is not a task, a task is missing or occurs twice, or a stage is on several
            IPUs but not on all.
    """
    name, clock, placement = "custom", None, None
    starts: list[int] | None = None
    rows: dict[int, list[list[Task]]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if header := _HEADER.fullmatch(line):
            name, clock = header["name"], header["clock"] or "two-phase"
        elif line.startswith("placement:"):
            placement = [None if at == "all IPUs" else int(at[4:]) for at in re.split(r",\s*", line[10:].strip())]
        elif re.fullmatch(r"tick(\s+\d+)+", line):
            starts = [number.start() for number in re.finditer(r"\d+", line)]
        elif row := re.match(r"IPU +(\d+)(?=\s|\||$)", line):
            ipu = int(row[1])
            if ipu in rows:
                raise ValueError(f"IPU {ipu} has two rows: give each IPU one")
            rows[ipu] = [_cell(ipu, tick, cell) for tick, cell in enumerate(_cells(line, row.end(), starts))]
        elif not re.fullmatch(r"stash: .*|(ramp-up|main|ramp-down|\s)+", line):
            raise ValueError(f"{line!r} is not a line of a schedule: rows begin with 'IPU' and a number")
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise ValueError(f"the rows are of IPUs {sorted(rows)}: give a row for each IPU, 'IPU 0', 'IPU 1' and so on")
    return _timetable(name, clock, placement, [rows[ipu] for ipu in range(len(rows))])


def _cells(line: str, label: int, starts: list[int] | None) -> list[str]:
    """Return the cells of a row, split at the columns of the line "tick", or at the separators if `starts` is None."""
    if starts is None:
        body = line[label:].strip()
        return [cell.strip() for cell in (body.strip("|").split("|") if "|" in body else re.split(r"\s{2,}", body))]
    cells = [""] * len(starts)
    for word in re.finditer(r"\S+", line[label:]):
        # a word belongs to the last column that begins no later than it does
        column = sum(start <= label + word.start() for start in starts) - 1
        cells[max(0, column)] += f" {word[0]}"
    return [cell.strip() for cell in cells]


def _cell(ipu: int, tick: int, cell: str) -> list[Task]:
    try:
        return [Task.parse(word) for word in cell.split() if word not in _IDLE]
    except ValueError as error:
        raise ValueError(f"IPU {ipu}, tick {tick}: {error}") from None


def _timetable(
    name: str, clock: str | None, given_placement: list[int | None] | None, rows: list[list[list[Task]]]
) -> Timetable:
    ticks: dict[Task, int] = {}
    seen: dict[Task, list[int]] = {}
    for ipu, row in enumerate(rows):
        for tick, cell in enumerate(row):
            for task in cell:
                if ipu in seen.setdefault(task, []) or ticks.setdefault(task, tick) != tick:
                    raise ValueError(
                        f"IPU {ipu}, tick {tick}: {task} is there already in tick {ticks[task]}: do each task once"
                    )
                seen[task].append(ipu)
    if not ticks:
        raise ValueError("the rows have no tasks: write stage, F, B or W, micro-batch, as in '2F0'")
    stages, count = 1 + max(task.stage for task in ticks), 1 + max(task.microbatch for task in ticks)
    placement = tuple(given_placement) if given_placement else _placement(stages, seen, len(rows))
    if len(placement) != stages:
        raise ValueError(f"the line 'placement:' has {len(placement)} stages, the rows have {stages}: place each")
    split = any(task.kind == "W" for task in ticks)

    def rows_of(kind: Kind) -> Rows:
        def tick_of(stage: int, m: int) -> int:
            task = Task(stage, "B" if kind == "W" and placement[stage] is None else kind, m)
            if task not in ticks:
                where = "all IPUs" if placement[stage] is None else f"IPU {placement[stage]}"
                raise ValueError(f"schedule {name!r}: {task} is missing: {where} must do it in some tick")
            return ticks[task]

        return tuple(tuple(tick_of(stage, m) for m in range(count)) for stage in range(stages))

    one_phase = clock == "one-phase" or (clock is None and not _two_phase(rows, placement))
    weight = rows_of("W") if split else None
    return Timetable(
        name, placement, len(rows), rows_of("F"), rows_of("B"), weight, "one-phase" if one_phase else "two-phase"
    )


def _placement(stages: int, seen: dict[Task, list[int]], ipus: int) -> Placement:
    """Return, per stage, the IPU of its row, or None if it is in all rows."""
    placement: list[int | None] = []
    for stage in range(stages):
        where = {tuple(rows): task for task, rows in seen.items() if task.stage == stage}
        union = sorted({ipu for rows in where for ipu in rows})
        for rows, task in where.items():
            if list(rows) != union or len(rows) not in (1, ipus):
                raise ValueError(
                    f"{task} stands in the rows of IPUs {list(rows)}, stage {stage} in those of {union}: a stage "
                    "stands on one IPU, or on all of them"
                )
        if not union:
            raise ValueError(f"stage {stage} is missing: number the stages from 0 without a gap")
        placement.append(union[0] if len(union) == 1 else None)
    return tuple(placement)


def _two_phase(rows: list[list[list[Task]]], placement: Placement) -> bool:
    """Return whether an IPU does more than one segment's task in a tick, which only the two-phase clock allows."""
    firsts = {stage: stages[0] for stages in segments_of(placement) for stage in stages}
    cells = [[task for task in cell if placement[task.stage] is not None] for row in rows for cell in row]
    return any(len({(firsts[task.stage], task.kind, task.microbatch) for task in cell}) > 1 for cell in cells)
