"""Schedules as plain data: in which tick each stage runs F (forward) and B (backward) of which micro-batch.

Three stages on three IPUs, four micro-batches, schedule "grouped" (a cell is stage, F or B, micro-batch):

           ramp-up       main                                ramp-down
    tick   0        1    2        3        4        5        6        7
    IPU 0  0F0      0F1  0F2      0F3      0B0      0B1      0B2      0B3
    IPU 1           1F0  1F1      1F2 1B0  1F3 1B1  1B2      1B3
    IPU 2                2F0 2B0  2F1 2B1  2F2 2B2  2F3 2B3

The clock. A tick of the engine has five phases, in this order; within a phase each IPU does its own tasks:

    entry  F of concurrent stages that a local stage follows (an embedding), all IPUs together
    F      F of local stages; at its end neighbours exchange activations
    head   F, then B, of concurrent stages that no local stage follows (a loss head), all IPUs together
    B      B of local stages, last stage first; at its end neighbours exchange gradients
    exit   B of the concurrent stages of `entry`

This module knows no jax. A schedule is two tables (the tick of F and of B, per stage and micro-batch), and `validate`
replays any pair of tables against the clock: what the engine runs is what was checked.

Sources: Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1F1B and its bubble); Huang et al. 2019, arXiv:1811.06965
(micro-batches); Graphcore, "Multi-IPU Programming Overview" (ramp-up, main execution, ramp-down; sharded execution).
"""

import dataclasses
import re
from typing import Literal

from ipu_jax.options import check_choice, check_count

Kind = Literal["F", "B"]
Placement = tuple[int | None, ...]
PHASES = ("entry", "F", "head", "B", "exit")
NAMES = ("sequential", "grouped")


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One cell of a schedule. Prints as `2F0` (stage 2, forward, micro-batch 0) and parses back.

    >>> str(Task(stage=2, kind="F", microbatch=0)), Task.parse("2B11")
    ('2F0', Task(stage=2, kind='B', microbatch=11))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """The task that `text` names.

        Raises:
            ValueError: the text is not a stage number, F or B, and a micro-batch number.
        """
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a task: write stage, F or B, micro-batch, as in '2F0'")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who does what when. Immutable; checked when made.

    Attributes:
        name: what it is called.
        placement: per stage, its IPU, or None for a concurrent stage (all IPUs together).
        ipus: IPUs of a replica.
        forward, backward: `forward[stage][microbatch]` is the tick of that F, `backward` likewise of that B.

    Raises:
        ValueError: a dependency, a stash slot or a message is violated; the text names the cell.

    >>> schedule = make("grouped", ipus=2, micro_batches=3)
    >>> print(schedule)
    grouped: 2 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 25.0%
    stash: stage 0 holds 3, stage 1 holds 1
           ramp-up  main                         ramp-down
    tick   0        1        2        3        4
    IPU 0  0F0      0F1      0F2 0B0  0B1      0B2
    IPU 1           1F0 1B0  1F1 1B1  1F2 1B2
    """

    name: str
    placement: Placement
    ipus: int
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        validate(self)

    @property
    def micro_batches(self) -> int:
        return len(self.forward[0])

    @property
    def ticks(self) -> int:
        return 1 + max(max(row) for row in (*self.forward, *self.backward))

    @property
    def forward_ticks(self) -> int:
        """How many ticks a forward-only run of this schedule takes."""
        return 1 + max(max(row) for row in self.forward)

    def stash_depth(self, stage: int) -> int:
        """How many micro-batches stage `stage` holds at once: begun by its F and not yet freed by its B."""
        pairs = list(zip(self.forward[stage], self.backward[stage], strict=True))
        return max(sum(f <= tick <= b for f, b in pairs) for tick, _ in pairs)

    def phase(self, stage: int, kind: Kind) -> str:
        """In which phase of the tick the stage's F or B runs."""
        if self.placement[stage] is not None:
            return kind
        if all(ipu is None for ipu in self.placement[stage:]):
            return "head"
        return "entry" if kind == "F" else "exit"

    @property
    def _tables(self) -> tuple[tuple[Kind, tuple[tuple[int, ...], ...]], ...]:
        return ("F", self.forward), ("B", self.backward)

    def tasks(self, tick: int) -> list[Task]:
        """The tasks of a tick, in the order of the clock."""
        found = [
            Task(stage, kind, microbatch)
            for kind, table in self._tables
            for stage, row in enumerate(table)
            for microbatch, when in enumerate(row)
            if when == tick
        ]
        return sorted(found, key=self._order)

    def _order(self, task: Task) -> tuple[int, int, int]:
        # B runs last stage first: it frees its slot before its neighbour needs the gradient
        turn = task.stage if task.kind == "F" else 2 * len(self.placement) - task.stage
        return PHASES.index(self.phase(task.stage, task.kind)), turn, task.microbatch

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """The idle share of the IPUs' time, every stage costing `forward` for F and `backward` for B.

        A concurrent stage's cost is divided by the IPUs. A phase lasts as long as its busiest IPU. For S local stages
        on S IPUs, "grouped" gives (S-1)/(M+S-1) and "sequential" gives 1-1/S.
        """
        makespan = busy = 0.0
        for tick in range(self.ticks):
            load = {phase: [0.0] * self.ipus for phase in PHASES}
            for task in self.tasks(tick):
                cost = forward if task.kind == "F" else backward
                ipu = self.placement[task.stage]
                for k in range(self.ipus):
                    load[self.phase(task.stage, task.kind)][k] += (
                        cost / self.ipus if ipu is None else cost if ipu == k else 0.0
                    )
            makespan += sum(max(row) for row in load.values())
            busy += sum(sum(row) for row in load.values())
        return 1.0 - busy / (self.ipus * makespan)

    def _phase_name(self, tick: int) -> str:
        """The pipeline's phase: main while the first stage's newest F and the last stage's B are both still running."""
        if tick < self.backward[-1][0]:
            return "ramp-up"
        return "main" if tick <= max(self.forward[-1]) else "ramp-down"

    def __str__(self) -> str:
        grid = [["tick", *map(str, range(self.ticks))]]
        grid += [[f"IPU {k}", *([""] * self.ticks)] for k in range(self.ipus)]
        for tick in range(self.ticks):
            for task in self.tasks(tick):
                ipu = self.placement[task.stage]
                for k in range(self.ipus) if ipu is None else (ipu,):
                    grid[1 + k][1 + tick] += f" {task}" if grid[1 + k][1 + tick] else str(task)
        phases = [self._phase_name(tick) for tick in range(self.ticks)]
        starts = ["", *(name if i == 0 or name != phases[i - 1] else "" for i, name in enumerate(phases))]
        table = [starts, *grid]
        widths = [max(len(row[i]) for row in table) for i in range(1 + self.ticks)]
        lines = [
            f"{self.name}: {len(self.placement)} stages on {self.ipus} IPUs, {self.micro_batches} micro-batches, "
            f"{self.ticks} ticks, bubble {self.bubble():.1%}",
            "stash: " + ", ".join(f"stage {s} holds {self.stash_depth(s)}" for s in range(len(self.placement))),
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table),
        ]
        return "\n".join(lines)


def make(name: str, *, micro_batches: int, ipus: int | None = None, placement: Placement | None = None) -> Schedule:
    """The schedule called `name`.

    Args:
        name: "sequential" (model sharding: one stage at a time, the others idle) or "grouped" (all IPUs do F, then all
            do B; stage s of S holds at most 2(S-1-s)+1 micro-batches whatever M is, and the whole takes
            (M+S-1)(F+B), the bubble of 1F1B).
        micro_batches: M, at least 1.
        ipus: IPUs of a replica. Without `placement`: one local stage on each.
        placement: per stage its IPU, or None for a concurrent stage.

    Returns:
        A checked `Schedule`.

    Raises:
        ValueError: unknown name (with the nearest), a count below 1, no stages, a stage on an IPU that isn't there.

    >>> make("sequential", ipus=4, micro_batches=8).bubble()
    0.75
    >>> round(make("grouped", ipus=4, micro_batches=8).bubble(), 4)
    0.2727
    """
    check_choice("schedule", name, NAMES)
    check_count("micro_batches", micro_batches)
    if placement is None:
        if ipus is None:
            raise ValueError("give ipus=, placement=, or both")
        placement = tuple(range(check_count("ipus", ipus)))
    if not placement:
        raise ValueError("placement=() has no stages: give at least one")
    if ipus is None:
        ipus = 1 + max((ipu for ipu in placement if ipu is not None), default=0)
    forward, backward = _first_micro_batch(placement)
    apart = 1 if name == "grouped" else 1 + backward[0]
    return Schedule(
        name=name,
        placement=placement,
        ipus=ipus,
        forward=tuple(tuple(f + apart * m for m in range(micro_batches)) for f in forward),
        backward=tuple(tuple(b + apart * m for m in range(micro_batches)) for b in backward),
    )


def _first_micro_batch(placement: Placement) -> tuple[list[int], list[int]]:
    """The ticks of F and of B, per stage, of a micro-batch that meets no other: every task as early as can be."""
    last_local = max((s for s, ipu in enumerate(placement) if ipu is not None), default=-1)
    forward, backward = [0], [0]
    for s in range(1, len(placement)):
        before, here = placement[s - 1], placement[s]
        # a local stage's result leaves its IPU at the end of phase F: only the head, or the same IPU, sees it that tick
        stays = before is None or before == here or s > last_local
        forward.append(forward[-1] + (0 if stays else 1))
    backward = [forward[-1]] * len(placement)
    for s in range(len(placement) - 2, -1, -1):
        here, after = placement[s], placement[s + 1]
        # a gradient leaves its IPU at the end of phase B, in time for `exit`; what `exit` yields waits a tick
        stays = here is None or here == after or s + 1 > last_local
        backward[s] = backward[s + 1] + (0 if stays else 1)
    return forward, backward


def validate(schedule: Schedule) -> None:
    """Replays a schedule against the clock.

    Checked: the tables' shapes and the placement; each stage's F and B at most once a tick; every dependency in the
    order of the clock, a message to another IPU being there one tick later; each message consumed before the next one
    of its boundary arrives; stash slots (micro-batch modulo depth) freed before they are written again.

    Raises:
        ValueError: the first violation, naming the cell.
    """
    s_count, m_count = len(schedule.placement), len(schedule.forward[0]) if schedule.forward else 0
    if s_count == 0 or m_count == 0:
        raise ValueError(f"schedule {schedule.name!r} is empty: give at least one stage and one micro-batch")
    for kind, table in (("forward", schedule.forward), ("backward", schedule.backward)):
        if len(table) != s_count or any(len(row) != m_count for row in table):
            raise ValueError(f"schedule {schedule.name!r}: the {kind} table must be {s_count} stages x {m_count} ticks")
        for stage, row in enumerate(table):
            if min(row) < 0 or len(set(row)) != m_count:
                raise ValueError(
                    f"schedule {schedule.name!r}: stage {stage} has ticks {row} for {kind}: "
                    "they must be at least 0, and a stage does one micro-batch a tick"
                )
    for stage, ipu in enumerate(schedule.placement):
        if ipu is not None and not 0 <= ipu < schedule.ipus:
            raise ValueError(
                f"stage {stage} is on IPU {ipu}, outside the replica: it has IPUs 0 to {schedule.ipus - 1}"
            )
    for stage in range(s_count):
        for microbatch in range(m_count):
            _check_dependencies(schedule, stage, microbatch)
        _check_slots(schedule, stage)


def _clock(schedule: Schedule, task: Task) -> tuple[int, int, int]:
    table = schedule.forward if task.kind == "F" else schedule.backward
    phase, turn, _ = schedule._order(task)
    return table[task.stage][task.microbatch], phase, turn


def _check_dependencies(schedule: Schedule, stage: int, microbatch: int) -> None:
    last = len(schedule.placement) - 1
    f, b = Task(stage, "F", microbatch), Task(stage, "B", microbatch)
    edges = [(f, b)]
    if stage < last:
        edges += [(f, Task(stage + 1, "F", microbatch)), (Task(stage + 1, "B", microbatch), b)]
    for source, target in edges:
        sent, due = _clock(schedule, source), _clock(schedule, target)
        here, there = schedule.placement[source.stage], schedule.placement[target.stage]
        crosses = here is not None and there is not None and here != there
        if due <= sent or (crosses and due[0] <= sent[0]):
            why = ": a message between IPUs takes until the next tick" if crosses else ""
            raise ValueError(
                f"schedule {schedule.name!r}: {target} in tick {due[0]} needs {source}, "
                f"which runs in tick {sent[0]}{why}"
            )
        following = Task(source.stage, source.kind, microbatch + 1)
        if source.stage != target.stage and microbatch + 1 < schedule.micro_batches:
            overwritten = _clock(schedule, following)
            # a register holds one message: the next F or B of the sender may run only once this one has been used
            if overwritten <= due and overwritten[0] < due[0]:
                raise ValueError(
                    f"schedule {schedule.name!r}: {following} in tick {overwritten[0]} overwrites the message "
                    f"of {source} before {target} in tick {due[0]} has used it"
                )


def _check_slots(schedule: Schedule, stage: int) -> None:
    depth = schedule.stash_depth(stage)
    for microbatch in range(depth, schedule.micro_batches):
        old = Task(stage, "B", microbatch - depth)
        new = Task(stage, "F", microbatch)
        if _clock(schedule, new) <= _clock(schedule, old):
            raise ValueError(
                f"schedule {schedule.name!r}: {new} in tick {_clock(schedule, new)[0]} writes stash slot "
                f"{microbatch % depth} of {depth} before {old} in tick {_clock(schedule, old)[0]} has freed it"
            )
