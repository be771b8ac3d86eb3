"""Define timetables of tasks, and the clock: the phases of a tick, and when a task uses inputs and sends results.

A tick has phases, in this order; within a phase each IPU does its own tasks:

    two-phase   entry  F of concurrent stages that a local stage follows (an embedding), all IPUs together
                F      F of local stages; at its end neighbours exchange activations
                head   F, then B, of concurrent stages that no local stage follows (a loss head), all IPUs together
                B      B of local stages, last stage first; at its end neighbours exchange gradients
                W      W of local stages, last stage first, if the backward pass is split
                exit   B of the concurrent stages of `entry`

    one-phase   entry  as above
                work   each IPU does F, B or W of one of its segments, or nothing; at its end neighbours exchange both
                head   as above
                exit   as above

A *segment* is a run of neighbouring stages on one IPU, or of neighbouring concurrent stages. No message is sent between
its stages, and they share their ticks.

Neither this module nor the modules built on it import jax: `_validate` (is a timetable correct?), `_simulate` (how long
does it take?), `_text` (its drawing), `_families` (the named schedules, from the rules of `_rules`),
`_schedule` (all of this in one class) and `_auto` (the best schedule at given costs).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["F", "B", "W"]
Clock = Literal["two-phase", "one-phase"]
Placement = tuple[int | None, ...]
Rows = tuple[tuple[int, ...], ...]

CLOCKS: tuple[Clock, ...] = ("two-phase", "one-phase")
PHASES = {"two-phase": ("entry", "F", "head", "B", "W", "exit"), "one-phase": ("entry", "work", "head", "exit")}


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
    """The tick of each task of a weight update, not validated. A `Schedule` is a validated one.

    Attributes:
        name: the schedule's name.
        placement: per stage, its IPU, or None for a concurrent stage (all IPUs together).
        ipus: IPUs of a replica.
        forward, backward: `forward[stage][microbatch]` is the tick in which F runs; `backward` is the same for B.
        weight: the same for W, or None if B is the whole backward pass. A concurrent stage has no W: its row
            repeats its B.
        clock: "two-phase" (a tick has an F, a B and a W for each of an IPU's stages) or "one-phase" (an IPU does one
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
    """Yield each kind of task that the timetable has, with its table."""
    yield "F", table.forward
    yield "B", table.backward
    if table.weight is not None:
        yield "W", table.weight


def tasks_of(table: Timetable, stages: Iterable[int] | None = None) -> list[Task]:
    """Return the tasks of all stages, or of some, in the order of the clock.

    A concurrent stage has no W: its B is the whole backward pass.
    """
    chosen = range(len(table.placement)) if stages is None else sorted(stages)
    tasks = [
        Task(stage, kind, microbatch)
        for kind, rows in tables_of(table)
        for stage in chosen
        if kind != "W" or table.placement[stage] is not None
        for microbatch in range(len(rows[stage]))
    ]
    return sorted(tasks, key=lambda task: (moment(table, task), task.microbatch))


def rows_of_kind(table: Timetable, kind: Kind) -> Rows:
    rows = table.forward if kind == "F" else table.backward if kind == "B" else table.weight
    assert rows is not None, "W in a table without W"
    return rows


def tick_of(table: Timetable, task: Task) -> int:
    return rows_of_kind(table, task.kind)[task.stage][task.microbatch]


def turn(table: Timetable, stage: int, kind: Kind) -> int:
    """Return the turn of a stage's task within its phase."""
    # B runs the last stage first: within a segment the gradient passes from stage to stage in one phase
    return stage if kind == "F" else 2 * len(table.placement) - stage


def moment(table: Timetable, task: Task) -> tuple[int, int, int]:
    """Return when a task runs and uses its inputs: tick, number of the phase, turn within the phase."""
    phase_number = PHASES[table.clock].index(phase(table, task.stage, task.kind))
    return tick_of(table, task), phase_number, turn(table, task.stage, task.kind)


def last_use(table: Timetable, stage: int) -> Kind:
    """Return the kind of task that uses a stage's stash last."""
    return "B" if table.weight is None or table.placement[stage] is None else "W"


Local = tuple[int, Kind, int]  # a task of a local segment: the segment's place in the line, kind, micro-batch
LineTicks = Mapping[Kind, NDArray[np.integer]]  # per kind of task its ticks: (segments, micro-batches)


class Line:
    """The local segments of a placement in order, as a line along which micro-batches pass forward, then backward.

    Attributes:
        places: per local segment, its IPU.
        lengths: per local segment, the number of its stages.
        on: per IPU, the numbers of its local segments.
        kinds: F and B, and W if the schedule has it.
    """

    def __init__(self, placement: Placement, micro_batches: int, split: bool):
        self.placement, self.micro_batches = placement, micro_batches
        self.segments = segments_of(placement)
        local = [stages for stages in self.segments if placement[stages[0]] is not None]
        self.places = [ipu for stages in local if (ipu := placement[stages[0]]) is not None]
        self.lengths = [len(stages) for stages in local]
        self.on: dict[int, list[int]] = {}
        for i, place in enumerate(self.places):
            self.on.setdefault(place, []).append(i)
        self.kinds: tuple[Kind, ...] = ("F", "B", "W") if split and local else ("F", "B")

    def __len__(self) -> int:
        return len(self.places)

    def cost(self, i: int, kind: Kind) -> int:
        return self.lengths[i] * (2 if kind == "B" and "W" not in self.kinds else 1)

    def source(self, i: int, kind: Kind) -> tuple[int, Kind] | None:
        """Return the segment and the kind of the task that a task of the same micro-batch waits for."""
        if kind == "F":
            return (i - 1, "F") if i > 0 else None
        return (i, "B") if kind == "W" else (i + 1, "B") if i + 1 < len(self) else (i, "F")

    def inputs(self, task: Local) -> list[Local]:
        source = self.source(task[0], task[1])
        return [] if source is None else [(*source, task[2])]

    def earliest_end(self) -> int:
        """Return a time before which no run can end: every IPU waits for its first F, and then has all its own work."""
        waits = np.cumsum([0, *(self.cost(i, "F") for i in range(len(self)))]).tolist()
        return max(
            waits[mine[0]] + self.micro_batches * sum(self.cost(i, kind) for i in mine for kind in self.kinds)
            for mine in self.on.values()
        )


def by_kind(line: Line, ticks: Mapping[Local, int]) -> LineTicks:
    """Return the ticks of all tasks, kind by kind."""
    shape = len(line), line.micro_batches
    table: dict[Kind, NDArray[np.integer]] = {kind: np.zeros(shape, np.int64) for kind in line.kinds}
    for (i, kind, m), tick in ticks.items():
        table[kind][i, m] = tick
    return table


def rows_of(line: Line, ticks: LineTicks) -> tuple[Rows, Rows, Rows | None]:
    """Return the tables of F, of B, and of W if the line has it.

    Concurrent segments get the ticks of a local segment beside them.
    """
    return _rows(line, ticks, "F"), _rows(line, ticks, "B"), _rows(line, ticks, "W") if "W" in line.kinds else None


def _rows(line: Line, ticks: LineTicks, kind: Kind) -> Rows:
    rows: list[tuple[int, ...]] = []
    known: dict[int, int] = {}
    done = 0  # local segments met so far
    for stages in line.segments:
        if line.placement[stages[0]] is not None:
            row = ticks[kind][done]
            done += 1
        elif done < len(line):
            row = ticks["F" if kind == "F" else "B"][done]  # a concurrent stage has no W: its row repeats B
        else:  # the head
            row = ticks["F"][done - 1] if done else np.arange(line.micro_batches)
        cells = row.tolist()
        # equal ticks become one object: a quarter of the memory
        rows += [tuple(map(known.setdefault, cells, cells))] * len(stages)
    return tuple(rows)
