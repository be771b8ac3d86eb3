"""Lay a schedule out: which part of which IPU's row each task fills, by ticks or by time.

"grouped" on 2 IPUs with 3 micro-batches, by ticks (a column is one unit wide):

    tick   0    1         2         3         4
    IPU 0  0F0  0F1       0F2  0B0       0B1  0B2
    IPU 1       1F0  1B0  1F1  1B1  1F2  1B2

A phase of a tick is as wide as the IPU that does most in it needs, and a phase in which nobody does anything has no
width. So ramp-up has no empty halves of ticks, and under the two-phase clock the columns are what the IPUs wait for
together. By time, a task fills the time in which a `Simulation` says it ran.
"""

import bisect
import dataclasses
import itertools
from collections import Counter
from functools import cached_property

from ipu_jax.schedules._simulate import Simulation
from ipu_jax.schedules._timetable import PHASES, Kind, Task, Timetable, phase, segments_of, tasks_of, tick_of


@dataclasses.dataclass(frozen=True)
class Box:
    """One F, B or W of one segment and micro-batch in the row of one IPU.

    Attributes:
        ipu: the row. A concurrent segment has a box in each row.
        start, end: in units of the axis.
        stages: the segment's stages.
        kind, microbatch: as in `Task`.
        chunk: the number of the segment among the local ones of its IPU, or None for a concurrent segment.
    """

    ipu: int
    start: float
    end: float
    stages: range
    kind: Kind
    microbatch: int
    chunk: int | None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks of the stages in the order in which they run."""
        stages = self.stages if self.kind == "F" else reversed(self.stages)
        return tuple(Task(stage, self.kind, self.microbatch) for stage in stages)


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of the weight update that has a name: "ramp-up", "main" or "ramp-down"."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Grid:
    """Hold the cells, rows and marks that a picture of a schedule shows.

    Attributes:
        table: the schedule.
        boxes: by start, then by row.
        spans: the parts of the weight update, in their order, without those that are empty.
        ticks: the start of each tick and the end of the last one; empty if the axis is time.
        end: the end of the last task.
        bubble: the idle share that the title states.
        first_tick, first_time: what stands at 0 of the axis, if this is a part of a schedule.
    """

    table: Timetable
    boxes: tuple[Box, ...]
    spans: tuple[Span, ...]
    ticks: tuple[float, ...]
    end: float
    bubble: float
    first_tick: int = 0
    first_time: float = 0.0

    def parts(self, count: int) -> "list[Grid]":
        """Return the schedule in parts of about the same width that follow each other. No tick is cut in two."""
        cuts = [self.end * i / count for i in range(1, count)]
        if self.ticks:
            cuts = sorted({self.ticks[bisect.bisect_left(self.ticks, cut)] for cut in cuts} - {0.0, self.end})
        return [self._part(start, end) for start, end in itertools.pairwise([0.0, *cuts, self.end])]

    def _part(self, start: float, end: float) -> "Grid":
        inside = lambda some: tuple(  # noqa: E731
            dataclasses.replace(one, start=max(start, one.start) - start, end=min(end, one.end) - start)
            for one in some
            if one.start < end and one.end > start
        )
        ticks = tuple(at - start for at in self.ticks if start <= at <= end)
        first_tick = self.ticks.index(start) if ticks else 0
        return Grid(
            self.table, inside(self.boxes), inside(self.spans), ticks, end - start, self.bubble, first_tick, start
        )

    @cached_property
    def chunks(self) -> int:
        """Return the largest number of local segments on one IPU."""
        locals_of = Counter(
            self.table.placement[stages[0]] for stages in segments_of(self.table.placement) if stages not in self.joint
        )
        return max(locals_of.values(), default=1)

    @cached_property
    def joint(self) -> tuple[range, ...]:
        """Return the stages of each concurrent segment."""
        placement = self.table.placement
        return tuple(stages for stages in segments_of(placement) if placement[stages[0]] is None)


_Job = tuple[int, Kind, int]  # segment, kind, micro-batch


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A segment with the rows of its boxes, and its number among those of its IPU as in `Box`."""

    stages: range
    rows: range
    chunk: int | None

    def boxes(self, job: _Job, start: float, end: float) -> list[Box]:
        return [Box(ipu, start, end, self.stages, job[1], job[2], self.chunk) for ipu in self.rows]


def grid_by_tick(table: Timetable, bubble: float) -> Grid:
    """Return the boxes of a schedule with one unit for each task of an IPU in a phase of a tick."""
    segments, segment_of = _segments(table)
    phases = PHASES[table.clock]
    jobs: dict[tuple[int, int], dict[_Job, None]] = {}  # of a tick and a phase, in the order of the clock
    for task in tasks_of(table):
        at = tick_of(table, task), phases.index(phase(table, task.stage, task.kind))
        jobs.setdefault(at, {})[segment_of[task.stage], task.kind, task.microbatch] = None
    boxes: list[Box] = []
    starts, now = [0.0], 0.0
    for tick in range(1 + max(tick for tick, _ in jobs)):
        for number in range(len(phases)):
            free = [now] * table.ipus
            for job in jobs.get((tick, number), ()):
                for box in segments[job[0]].boxes(job, 0.0, 1.0):
                    boxes.append(dataclasses.replace(box, start=free[box.ipu], end=free[box.ipu] + 1))
                    free[box.ipu] += 1
            now = max(free)
        now = max(now, starts[-1] + 1)  # a tick in which nobody does anything is still a tick
        starts.append(now)
    main = starts[min(table.backward[-1])]
    down = max(main, starts[1 + max(table.forward[-1])])
    return Grid(table, _sorted(boxes), _spans(main, down, now), tuple(starts), now, bubble)


def grid_by_time(table: Timetable, simulation: Simulation) -> Grid:
    """Return the boxes of a schedule at the times of a simulation.

    Raises:
        ValueError: it is no simulation of this schedule, or takes no time.
    """
    _check(table, simulation)
    segments, segment_of = _segments(table)
    begins, ends = simulation.start_times, simulation.end_times
    times: dict[_Job, tuple[float, float]] = {}
    for task in tasks_of(table):
        job = segment_of[task.stage], task.kind, task.microbatch
        # an IPU does the stages of a segment one after the other, so that a job has no gaps
        begin, end = times.get(job, (begins[task], ends[task]))
        times[job] = min(begin, begins[task]), max(end, ends[task])
    boxes = [box for job, span in times.items() for box in segments[job[0]].boxes(job, *span)]
    last, micro_batches = len(table.placement) - 1, range(len(table.forward[0]))
    main = min(begins[Task(last, "B", m)] for m in micro_batches)
    down = max(main, *(ends[Task(last, "F", m)] for m in micro_batches))
    end = max(box.end for box in boxes)
    return Grid(table, _sorted(boxes), _spans(main, down, end), (), end, simulation.bubble)


def _check(table: Timetable, simulation: object) -> None:
    if not isinstance(simulation, Simulation):
        raise ValueError(f"simulation={simulation!r} is no simulation: give what schedule.simulate(...) returns")
    tasks, times = tasks_of(table), simulation.start_times
    if len(times) != len(tasks) or any(task not in times for task in tasks):
        raise ValueError(
            f"simulation has other tasks ({len(times)}) than schedule {table.name!r} ({len(tasks)}): simulate the "
            "schedule that you draw"
        )
    if not simulation.makespan > 0:
        raise ValueError("simulation takes no time, so there is nothing to draw: simulate with costs above 0")


def _segments(table: Timetable) -> tuple[list[_Segment], dict[int, int]]:
    """Return the segments, and for each stage the number of its segment."""
    segments: list[_Segment] = []
    seen = [0] * table.ipus
    for stages in segments_of(table.placement):
        ipu = table.placement[stages[0]]
        if ipu is None:
            segments.append(_Segment(stages, range(table.ipus), None))
        else:
            segments.append(_Segment(stages, range(ipu, ipu + 1), seen[ipu]))
            seen[ipu] += 1
    return segments, {stage: i for i, segment in enumerate(segments) for stage in segment.stages}


def _sorted(boxes: list[Box]) -> tuple[Box, ...]:
    return tuple(sorted(boxes, key=lambda box: (box.start, box.ipu, box.end)))


def _spans(main: float, down: float, end: float) -> tuple[Span, ...]:
    """Return ramp-up, before the last stage's first B, main, and ramp-down, after its last F: as `_text` has them."""
    spans = Span("ramp-up", 0.0, main), Span("main", main, down), Span("ramp-down", down, end)
    return tuple(span for span in spans if span.end > span.start)
