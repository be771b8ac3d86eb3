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
does it take?), `_text` (its drawing), `_families` (the named schedules, from the rules of `_rules` in the runs of
`_run`), `_schedule` (all of this in one class) and `_auto` (the best schedule at given costs).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Literal

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
