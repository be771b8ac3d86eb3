"""Read and write schedules in the CSV format of torch.distributed.pipelining ("compute_only").

Each row contains the actions of one rank (here an IPU) in order: `0F1` is the forward of stage 0 for micro-batch 1, `B`
a whole backward, `I` a backward by input and `W` a backward by weight. An empty cell is an idle step. Actions that move
data or sharded parameters (`0SEND_F1`, `2UNSHARD`, ...) do not affect who computes what when, and are left out.
`(1F2;2B0)OVERLAP_F_B` is read as its two actions.

torch runs neighbouring stages of one rank as separate tasks. Here they are one segment. Its F and B run when torch runs
the first of its stages, and its W runs when torch runs the last.
"""

import csv
import io
import re

from ipu_jax.core.schedules._timetable import Kind, Line, Local, Placement, Timetable, by_kind, rows_of, tasks_of
from ipu_jax.core.schedules.lifetimes import Lifetimes

_ACTION = re.compile(r"(\d+)(F|I|B|W|UNSHARD|RESHARD|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD)(\d*)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_torch_csv(table: Timetable) -> str:
    """Return the CSV of a timetable.

    Raises:
        ValueError: the timetable has a concurrent stage, which torch does not know.
    """
    if None in table.placement:
        raise ValueError(
            f"schedule {table.name!r} has concurrent stages {[s for s, p in enumerate(table.placement) if p is None]}, "
            "which torch's CSV cannot hold: use to_text()"
        )
    stages_of = Lifetimes(table).stages_of
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    words = {"F": "F", "B": "B" if table.weight is None else "I", "W": "W"}
    for ipu in range(table.ipus):
        tasks = tasks_of(table, stages_of.get(ipu, []))
        writer.writerow([f"{task.stage}{words[task.kind]}{task.microbatch}" for task in tasks])
    return text.getvalue()


def from_torch_csv(text: str, name: str) -> Timetable:
    """Return the timetable that a CSV describes, with each task in its earliest tick.

    Raises:
        ValueError: a cell is not an action, a stage is missing or in two rows, a task is missing or occurs twice, or
            the order can never run.
    """
    rows = [_actions(row, number) for number, row in enumerate(csv.reader(io.StringIO(text.strip())))]
    placement, micro_batches = _placement(rows), 1 + max((m for row in rows for _, _, m in row), default=0)
    split = any(kind in ("I", "W") for row in rows for _, kind, _ in row)
    line = Line(placement, micro_batches, split)
    orders = {ipu: _order(rows[ipu], line, split) for ipu in line.on}
    _check_complete(rows, placement, micro_batches, split)
    ticks = _earliest_ticks(orders, line, name)
    return Timetable(name, placement, 1 + max(line.on), *rows_of(line, by_kind(line, ticks)), "one-phase")


def _earliest_ticks(orders: dict[int, list[Local]], line: Line, name: str) -> dict[Local, int]:
    """Return, per task, the earliest tick after its inputs and after the previous task of its row."""
    ticks, free = dict[Local, int](), dict.fromkeys(line.on, 0)
    waiting = {ipu: list(reversed(order)) for ipu, order in orders.items()}
    while any(waiting.values()):
        before = len(ticks)
        for ipu, tasks in waiting.items():
            while tasks and ticks.keys() >= set(line.inputs(tasks[-1])):
                task = tasks.pop()
                ticks[task] = max([free[ipu], *(ticks[source] + 1 for source in line.inputs(task))])
                free[ipu] = ticks[task] + 1
        if len(ticks) == before:
            raise ValueError(
                f"schedule {name!r}: the rows can never run to their end, since some IPUs wait for each other: "
                "put each task behind those that it needs"
            )
    return ticks


def _actions(row: list[str], number: int) -> list[tuple[int, str, int]]:
    found: list[tuple[int, str, int]] = []
    for cell in map(str.strip, row):
        overlap = _OVERLAP.fullmatch(cell)
        for part in overlap[1].split(";") if overlap else [cell]:
            match = _ACTION.fullmatch(part.strip())
            if match is None and part.strip():
                raise ValueError(
                    f"row {number} has {cell!r}, which is not an action: write stage, F, B, I or W, micro-batch"
                )
            if match is not None and match[2] in ("F", "I", "B", "W"):
                if not match[3]:
                    raise ValueError(f"row {number} has {cell!r} without a micro-batch: write it as in '2F0'")
                found.append((int(match[1]), match[2], int(match[3])))
    return found


def _placement(rows: list[list[tuple[int, str, int]]]) -> Placement:
    places: dict[int, int] = {}
    for ipu, row in enumerate(rows):
        for stage, _, _ in row:
            if places.setdefault(stage, ipu) != ipu:
                raise ValueError(f"stage {stage} is in rows {places[stage]} and {ipu}: a stage runs on one IPU")
    missing = sorted(set(range(max(places, default=-1) + 1)) - places.keys())
    if missing or not places:
        raise ValueError(f"stage {missing[0] if missing else 0} is in no row: give each stage's tasks")
    return tuple(places[stage] for stage in range(len(places)))


def _order(row: list[tuple[int, str, int]], line: Line, split: bool) -> list[Local]:
    """Return the tasks of an IPU's segments, in order."""
    number = {stage: i for i, stages in enumerate(line.segments) for stage in stages}
    tasks: list[Local] = []
    for stage, kind, m in row:
        own: Kind = "F" if kind == "F" else "W" if kind == "W" else "B"
        tasks.append((number[stage], own, m))
        if split and kind == "B":
            tasks.append((number[stage], "W", m))
    last = {task: k for k, task in enumerate(tasks)}
    first = dict(zip(reversed(tasks), range(len(tasks) - 1, -1, -1), strict=True))
    chosen = {task: last[task] if task[1] == "W" else first[task] for task in tasks}
    return sorted(chosen, key=chosen.__getitem__)


def _check_complete(
    rows: list[list[tuple[int, str, int]]], placement: Placement, micro_batches: int, split: bool
) -> None:
    """Raise unless every stage does F, and B or I and W, of every micro-batch once."""
    done: dict[tuple[int, str, int], int] = {}
    for row in rows:
        for stage, kind, m in row:
            for part in ("I", "W") if split and kind == "B" else (kind,):
                done[stage, part, m] = done.get((stage, part, m), 0) + 1
    for stage in range(len(placement)):
        for kind in ("F", "I", "W") if split else ("F", "B"):
            for m in range(micro_batches):
                count = done.get((stage, kind, m), 0)
                if count != 1:
                    raise ValueError(
                        f"{stage}{kind}{m} is {'missing' if count == 0 else f'there {count} times'}: "
                        "every stage does each of its tasks once per micro-batch"
                    )
