"""The local segments of a placement as a line, along which micro-batches pass forward, then backward."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ipu_jax.core.schedules._timetable import Kind, Placement, Rows, segments_of

Local = tuple[int, Kind, int]  # a task of a local segment: the segment's place in the line, kind, micro-batch
LineTicks = Mapping[Kind, NDArray[np.integer]]  # per kind of task its ticks: (segments, micro-batches)


class Line:
    """The local segments in order.

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
