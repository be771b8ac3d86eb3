"""Return who holds what when: the spans of stash, weight residuals and messages, between moments of the clock."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipu_jax.core.schedules._timetable import PHASES, Kind, Timetable, last_use, phase, rows_of_kind, turn

Ints = NDArray[np.int64]


class Spans(NamedTuple):
    """Hold the first and the last moment of a span per micro-batch: (micro-batches,) each."""

    starts: Ints
    ends: Ints

    def depth(self) -> int:
        """Return the largest number of spans that overlap at one point.

        >>> Spans(np.array([0, 2, 4]), np.array([2, 3, 5])).depth()
        2
        """
        if not len(self.starts):
            return 0
        over = np.searchsorted(np.sort(self.ends), np.sort(self.starts))  # ends before each start
        return int((np.arange(1, 1 + len(over)) - over).max())

    def around(self, moment: int) -> tuple[int, ...]:
        """Return the micro-batches whose spans a moment is in.

        >>> Spans(np.array([0, 2, 4]), np.array([2, 3, 5])).around(2)
        (0, 1)
        """
        return tuple(np.flatnonzero((self.starts <= moment) & (moment <= self.ends)).tolist())


class Lifetimes:
    """The spans for which values are held, between the moments at which the tasks of a timetable run.

    A later moment is a greater number: first the tick counts, then phase and turn.
    """

    def __init__(self, table: Timetable):
        self.table = table
        self.phases = len(PHASES[table.clock])
        self.turns = 2 * len(table.placement) + 2
        self.per_tick = self.phases * self.turns
        self._rows: dict[tuple[int, Kind], Ints] = {}

    def ticks(self, stage: int, kind: Kind) -> Ints:
        """Return the ticks of a stage's tasks: (micro-batches,)."""
        if (stage, kind) not in self._rows:
            self._rows[stage, kind] = np.array(rows_of_kind(self.table, kind)[stage], np.int64)
        return self._rows[stage, kind]

    def at(self, stage: int, kind: Kind) -> Ints:
        """Return when a stage's tasks run and use their inputs: (micro-batches,)."""
        return self._begin(stage, kind) + turn(self.table, stage, kind)

    def sent(self, stage: int, kind: Kind) -> Ints:
        """Return when the next segment can first use the results, the ends of the tasks' phases: (micro-batches,)."""
        return self._begin(stage, kind) + self.turns - 1

    def _begin(self, stage: int, kind: Kind) -> Ints:
        number = PHASES[self.table.clock].index(phase(self.table, stage, kind))
        return (self.ticks(stage, kind) * self.phases + number) * self.turns

    def stash(self, stage: int) -> Spans:
        """Return the spans in which the stage holds the stash of its F."""
        return Spans(self.at(stage, "F"), self.at(stage, last_use(self.table, stage)))

    def weight_residuals(self, stage: int) -> Spans:
        """Return the spans in which the stage holds weight residuals, from its B to its W; no spans if it has no W."""
        if last_use(self.table, stage) != "W":
            return _NO_SPANS
        return Spans(self.at(stage, "B"), self.at(stage, "W"))

    def inbox(self, boundary: int, kind: Kind) -> Spans:
        """Return the spans in which a message waits between stage `boundary` and the next one.

        There are no spans if the two stages are in one place, since no message is sent then.
        """
        if self.table.placement[boundary] == self.table.placement[boundary + 1]:
            return _NO_SPANS
        source, target = (boundary, boundary + 1) if kind == "F" else (boundary + 1, boundary)
        return Spans(self.sent(source, kind), self.at(target, kind))

    def most_in_ticks(self, ticks: int, held: Sequence[tuple[Spans, int]]) -> Ints:
        """Return the most that is held at one point of each tick: (ticks,).

        Args:
            ticks: the number of ticks.
            held: spans, each with how much every one of them holds.
        """
        at, sums = self._sums(ticks, held)
        most = np.zeros(ticks, np.int64)
        np.maximum.at(most, at // self.per_tick, sums)
        return most

    def fullest(self, ticks: int, held: Sequence[tuple[Spans, int]]) -> int:
        """Return the first moment at which the most is held."""
        at, sums = self._sums(ticks, held)
        return int(at[sums == sums.max()].min())

    def _sums(self, ticks: int, held: Sequence[tuple[Spans, int]]) -> tuple[Ints, Ints]:
        """Return the moments at which more may be held than before, and how much is held then."""
        at = np.concatenate([np.arange(ticks) * self.per_tick, *(spans.starts for spans, _ in held)])
        sums = np.zeros(len(at), np.int64)
        for spans, size in held:
            begun, ended = np.searchsorted(np.sort(spans.starts), at, "right"), np.searchsorted(np.sort(spans.ends), at)
            sums += size * (begun - ended)
        return at, sums

    @cached_property
    def stages_of(self) -> dict[int | None, list[int]]:
        """Return the stages of each IPU, and under None the concurrent ones."""
        stages: dict[int | None, list[int]] = {}
        for stage, ipu in enumerate(self.table.placement):
            stages.setdefault(ipu, []).append(stage)
        return stages


_NO_SPANS = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))
