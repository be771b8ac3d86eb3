"""Simulate a run in which a *rule* chooses what each IPU does next, for all IPUs at once.

In the run, F, B and W of a stage take 1 each, or F takes 1 and B takes 2 if there is no W. The run gives the order of
each IPU's tasks. Each task gets the earliest tick that this order and the clock allow.

An IPU's choice depends on its own segments and on ended tasks, not on tasks that others begin at the same time. So a
rule works on arrays of (segments of an IPU, IPUs), and costs the same few operations for 4 IPUs and for 1,024.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ipu_jax.core.schedules._line import Line, LineTicks
from ipu_jax.core.schedules._timetable import Kind

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Choices = Ints  # per IPU, the number of the kind and segment that it begins, as `Progress` gives it, or NONE
NONE = -1  # no task: the IPU waits
_NEVER = np.iinfo(np.int64).max


class StuckError(Exception):
    """A run cannot go on."""


class Progress:
    """The progress of a run. Every segment does its micro-batches in order, so counts describe it fully.

    Arrays are (J, P): the j-th segment of the p-th IPU of the line, where J is the largest number of segments on an
    IPU. An IPU with fewer segments is padded with segments without tasks.

    Attributes:
        line: the segments.
        segment: (J, P), the number of each segment in the line, or -1 if there is none.
        length: (J, P), the number of its stages, or 0.
        begun: per kind (J, P), how many micro-batches have begun it.
        ready: per kind (J, P), whether the inputs of the next micro-batch are available.
    """

    def __init__(self, line: Line):
        self.line = line
        mine = list(line.on.values())
        self.segment = np.full((max(map(len, mine), default=0), len(mine)), -1)
        for p, segments in enumerate(mine):
            self.segment[: len(segments), p] = segments
        self.length = np.where(self.segment < 0, 0, np.array([*line.lengths, 0])[self.segment])
        self.counts = np.zeros((len(line.kinds), *self.segment.shape), np.int64)
        self.readiness = np.zeros(self.counts.shape, np.bool_)
        self.begun: dict[Kind, Ints] = dict(zip(line.kinds, self.counts, strict=True))
        self.ready: dict[Kind, Mask] = dict(zip(line.kinds, self.readiness, strict=True))
        j = np.arange(len(self.segment))[:, None]
        self._turns = j
        self._numbers = {kind: k * len(self.segment) + j for k, kind in enumerate(line.kinds)}

    def between(self, first: Kind, last: Kind) -> Ints:
        """Return how many micro-batches of each segment have begun `first` but not `last`."""
        return self.begun[first] - self.begun[last]

    def furthest(self, kind: Kind, among: Mask) -> Choices:
        """Choose each IPU's last segment in a mask."""
        return np.where(among, self._numbers[kind], NONE).max(axis=0)

    def nearest(self, kind: Kind, among: Mask) -> Choices:
        """Choose each IPU's first segment in a mask."""
        return self._least(kind, self._turns, among)

    def oldest(self, kind: Kind) -> Choices:
        """Choose the oldest ready micro-batch, of the latest segment if there are several, which frees the most."""
        return self._least(kind, self.begun[kind] * len(self._turns) - self._turns, self.ready[kind])

    def in_turn(self, kind: Kind, groups: int) -> Choices:
        """Choose the next task of a kind, if it is ready: group after group, each through all rounds."""
        begun, count = self.begun[kind], self.line.micro_batches
        turns = self._turns if kind == "F" else -self._turns
        left = (begun < count) & (self.segment >= 0)
        turn = self._least(kind, begun * groups // count * len(self._turns) + turns, left)
        return np.where(self.is_ready(turn), turn, NONE)

    def is_ready(self, choices: Choices) -> Mask:
        """Return whether each IPU's choice is a task that is ready."""
        flat = self.readiness.reshape(-1, len(choices))
        return (choices != NONE) & flat[choices, np.arange(len(choices))]

    def _least(self, kind: Kind, keys: Ints, among: Mask) -> Choices:
        number = self._numbers[kind][0] + np.where(among, keys, _NEVER).argmin(axis=0)
        return np.where(among.any(axis=0), number, NONE)


Rule = Callable[[Progress], Choices]
"""Chooses the next task of each IPU among the ready tasks. Its choice for a busy IPU is ignored."""


def first_of(*choices: Choices) -> Choices:
    """Return, per IPU, the first choice that is not NONE."""
    chosen = choices[-1]
    for choice in choices[-2::-1]:
        chosen = np.where(choice == NONE, chosen, choice)
    return chosen


def run(line: Line, rule: Rule) -> tuple[LineTicks, int]:
    """Simulate a run in which each IPU follows the rule.

    Returns:
        Per task, the earliest tick in which its IPU is free and its inputs have arrived, and the time at which the run
        ends.

    Raises:
        StuckError: at some time no IPU does anything, although tasks are left.
    """
    progress = Progress(line)
    cells = _Cells(progress)
    ipus, count = np.arange(len(line.on)), line.micro_batches
    begun, ready = progress.counts.reshape(-1), progress.readiness.reshape(-1)
    # two more rows: the source of the first F, which has ended, and the source of segments that do not exist
    ended = np.zeros(len(begun) + 2, np.int64)
    ended[-2] = count
    ticks = np.full((len(ended), count), -1, np.int32)
    free = np.zeros(len(ipus), np.int32)  # the first tick after an IPU's tasks
    doing, ends = np.zeros_like(ipus), np.full_like(ipus, _NEVER)
    left, now = len(line) * len(line.kinds) * count, 0
    while left:
        np.less(begun, ended[cells.sources], out=ready)
        choices = rule(progress)
        who = ipus[(choices != NONE) & (ends == _NEVER)]
        at = choices[who] * len(ipus) + who
        m = begun[at]
        free[who] = np.maximum(free[who], ticks[cells.sources[at], m] + 1)
        ticks[at, m] = free[who]
        free[who] += 1
        begun[at] = m + 1
        doing[who], ends[who] = at, now + cells.costs[at]
        left -= len(who)
        if (ends == _NEVER).all():
            raise StuckError("no IPU has anything to do: the rule holds back tasks that others wait for")
        if left:
            now = int(ends.min())
            over = ends == now
            ended[doing[over]] += 1
            ends[over] = _NEVER
    last = int(ends[ends != _NEVER].max(initial=0))
    return {kind: ticks[cells.of[kind]] for kind in line.kinds}, last


class _Cells:
    """The segments of all kinds in one row, in the order of `Progress`.

    Attributes:
        of: per kind, the cell of each segment of the line.
        sources: per cell, the cell whose task it waits for; the second to last if none, the last if it has no tasks.
        costs: per cell, the time of a task.
    """

    def __init__(self, progress: Progress):
        line, size = progress.line, progress.segment.size
        where = np.zeros(len(line), np.int64)
        there = progress.segment.reshape(-1) >= 0
        where[progress.segment.reshape(-1)[there]] = np.flatnonzero(there)
        self.of: dict[Kind, Ints] = {kind: k * size + where for k, kind in enumerate(line.kinds)}
        total = len(line.kinds) * size
        self.sources = np.full(total, total + 1)
        self.costs = np.ones(total, np.int64)
        for kind in line.kinds:
            for i in range(len(line)):
                source = line.source(i, kind)
                self.sources[self.of[kind][i]] = total if source is None else self.of[source[1]][source[0]]
                self.costs[self.of[kind][i]] = line.cost(i, kind)


def follow(orders: list[Ints]) -> Rule:
    """Return the rule by which each IPU does its tasks in a given order, and waits while the next task is not ready.

    Args:
        orders: per IPU of the line, the numbers of kinds and segments as in `Choices`.
    """
    padded = np.full((1 + max(map(len, orders), default=0), len(orders)), NONE)
    for p, order in enumerate(orders):
        padded[: len(order), p] = order
    ipus = np.arange(len(orders))

    def rule(progress: Progress) -> Choices:
        following = padded[progress.counts.sum(axis=(0, 1)), ipus]
        return np.where(progress.is_ready(following), following, NONE)

    return rule
