"""The clock: what a tick of the engine is made of, and when in it a task uses and makes things.

A tick has phases, in this order; within a phase each IPU does its own tasks:

    two-phase   entry  F of concurrent stages that a local stage follows (an embedding), all IPUs together
                F      F of local stages; at its end neighbours exchange activations
                head   F, then B, of concurrent stages that no local stage follows (a loss head), all IPUs together
                B      B of local stages, last stage first; at its end neighbours exchange gradients
                exit   B of the concurrent stages of `entry`

    one-phase   entry  as above
                work   each IPU does F, B or W of one of its segments, or nothing; at its end neighbours exchange both
                head   as above
                exit   as above

A *segment* is what runs together without a message in between: neighbouring stages of one IPU, or neighbouring
concurrent stages. Its stages share their ticks.

This module knows no jax, nor do those that stand on it: `_validate` (is a table right?), `_simulate` (how long does it
take?), `_text` (its picture), `_families` (the tables that have names) and `_schedule` (all of that, in one class).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

Kind = Literal["F", "B", "W"]
Clock = Literal["two-phase", "one-phase"]
Placement = tuple[int | None, ...]
Rows = tuple[tuple[int, ...], ...]
Moment = tuple[int, int, int]

CLOCKS: tuple[Clock, ...] = ("two-phase", "one-phase")
PHASES = {"two-phase": ("entry", "F", "head", "B", "exit"), "one-phase": ("entry", "work", "head", "exit")}
_END = 1 << 30  # the turn after every task of a phase: when its messages are exchanged


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One cell of a schedule. Prints as `2F0` (stage 2, forward, micro-batch 0) and parses back.

    >>> str(Task(stage=2, kind="F", microbatch=0)), Task.parse("2W11")
    ('2F0', Task(stage=2, kind='W', microbatch=11))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Return the task that `text` names.

        Raises:
            ValueError: the text is not a stage number, F, B or W, and a micro-batch number.
        """
        match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a task: write stage, F, B or W, micro-batch, as in '2F0'")
        kinds: dict[str, Kind] = {"F": "F", "B": "B", "W": "W"}
        return cls(int(match[1]), kinds[match[2]], int(match[3]))


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Who does what when, as it was said: nothing is checked. A `Schedule` is one that was.

    Attributes:
        name: what it is called.
        placement: per stage, its IPU, or None for a concurrent stage (all IPUs together).
        ipus: IPUs of a replica.
        forward, backward: `forward[stage][microbatch]` is the tick of that F, `backward` likewise of that B.
        weight: likewise of W, or None where B does the whole backward pass. A concurrent stage has no W: its row
            repeats its B.
        clock: "two-phase" (a tick has an F and a B for each of an IPU's stages) or "one-phase" (an IPU does one
            segment's F, B or W in a tick; messages may wait).
    """

    name: str
    placement: Placement
    ipus: int
    forward: Rows
    backward: Rows
    weight: Rows | None = None
    clock: Clock = "two-phase"


def segments_of(placement: Placement) -> tuple[range, ...]:
    """Return the stages of each segment.

    >>> segments_of((0, 1, 1, None, None, 0))
    (range(0, 1), range(1, 3), range(3, 5), range(5, 6))
    """
    starts = [s for s in range(len(placement)) if s == 0 or placement[s] != placement[s - 1]]
    return tuple(range(a, b) for a, b in zip(starts, [*starts[1:], len(placement)], strict=True))


def phase(table: Timetable, stage: int, kind: Kind) -> str:
    """Return the phase of the tick in which the stage's F, B or W runs."""
    if table.placement[stage] is not None:
        return "work" if table.clock == "one-phase" else kind
    if all(ipu is None for ipu in table.placement[stage:]):
        return "head"
    return "entry" if kind == "F" else "exit"


def tables_of(table: Timetable) -> Iterator[tuple[Kind, Rows]]:
    """Return the kinds of task that there are, with the table of each."""
    yield "F", table.forward
    yield "B", table.backward
    if table.weight is not None:
        yield "W", table.weight


def tasks_of(table: Timetable) -> list[Task]:
    """Return all tasks, in the order of the clock. A concurrent stage has no W: its B does everything."""
    tasks = [
        Task(stage, kind, microbatch)
        for kind, rows in tables_of(table)
        for stage, row in enumerate(rows)
        if kind != "W" or table.placement[stage] is not None
        for microbatch in range(len(row))
    ]
    return sorted(tasks, key=lambda task: (moment(table, task), task.microbatch))


def tick_of(table: Timetable, task: Task) -> int:
    rows = table.forward if task.kind == "F" else table.backward if task.kind == "B" else table.weight
    assert rows is not None, f"{task} in a table without W"
    return rows[task.stage][task.microbatch]


def moment(table: Timetable, task: Task) -> Moment:
    """Return when a task runs, and uses what it needs: tick, phase, turn within the phase."""
    # B runs last stage first: a gradient stays within its segment as it goes from stage to stage
    turn = task.stage if task.kind == "F" else 2 * len(table.placement) - task.stage
    return tick_of(table, task), PHASES[table.clock].index(phase(table, task.stage, task.kind)), turn


def sent(table: Timetable, task: Task) -> Moment:
    """Return when the next segment can use what a task made: at the end of its phase."""
    tick, at, _ = moment(table, task)
    return tick, at, _END


def last_use(table: Timetable, stage: int) -> Kind:
    """Return which kind of task uses a stage's stash last."""
    return "B" if table.weight is None or table.placement[stage] is None else "W"


def overlap(spans: Iterable[tuple[Any, Any]]) -> int:
    """Return how many of the spans (both ends included) overlap at most.

    >>> overlap([(0, 2), (2, 3), (4, 5)])
    2
    """
    ends = sorted(point for start, end in spans for point in ((start, 0), (end, 1)))
    largest = open_spans = 0
    for _, is_end in ends:
        open_spans += -1 if is_end else 1
        largest = max(largest, open_spans)
    return largest


def stash_spans(table: Timetable, stage: int) -> list[tuple[Moment, Moment]]:
    """Return, per micro-batch, from when until when the stage holds what its F stashed."""
    return _spans(table, stage, "F", last_use(table, stage))


def cut_spans(table: Timetable, stage: int) -> list[tuple[Moment, Moment]]:
    """Return, per micro-batch, from when until when the stage holds what its B left for its W; none without W."""
    return _spans(table, stage, "B", "W") if last_use(table, stage) == "W" else []


def inbox_spans(table: Timetable, boundary: int, kind: Kind) -> list[tuple[Moment, Moment]]:
    """Return, per micro-batch, from when until when a message waits between stage `boundary` and the next one."""
    if table.placement[boundary] == table.placement[boundary + 1]:
        return []
    source, target = (boundary, boundary + 1) if kind == "F" else (boundary + 1, boundary)
    return [
        (sent(table, Task(source, kind, m)), moment(table, Task(target, kind, m)))
        for m in range(len(table.forward[source]))
    ]


def _spans(table: Timetable, stage: int, first: Kind, last: Kind) -> list[tuple[Moment, Moment]]:
    return [
        (moment(table, Task(stage, first, m)), moment(table, Task(stage, last, m)))
        for m in range(len(table.forward[stage]))
    ]
