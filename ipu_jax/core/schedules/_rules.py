"""Rules that choose what each IPU does next, and the run in which they choose, simulated for all IPUs at once.

In the run, F, B and W of a stage take 1 each, or F takes 1 and B takes 2 if there is no W. The run gives the order of
each IPU's tasks. Each task gets the earliest tick that this order and the clock allow.

An IPU's choice depends on its own segments and on ended tasks, not on tasks that others begin at the same time. So a
rule works on arrays of (segments of an IPU, IPUs), and costs the same few operations for 4 IPUs and for 1,024.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ipu_jax.core.schedules._timetable import Kind, Line, LineTicks

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


def _gpipe(progress: Progress) -> Choices:
    """Choose F until all are done, then B."""
    return np.where(_forward_left(progress), progress.nearest("F", progress.ready["F"]), progress.oldest("B"))


def _forward_left(progress: Progress) -> Mask:
    """Return, per IPU, whether it has an F left to begin."""
    left = (progress.begun["F"] < progress.line.micro_batches) & (progress.segment >= 0)
    return np.any(left, axis=0)


def _one_f_one_b(progress: Progress) -> Choices:
    """Choose B if one is ready, else F while fewer micro-batches are between F and B than segments are left to pass."""
    go = progress.ready["F"] & (progress.between("F", "B") < len(progress.line) - progress.segment)
    return first_of(progress.oldest("B"), progress.furthest("F", go))


def _looped(progress: Progress) -> Choices:
    """Choose as in 1F1B, over rounds: a group of micro-batches goes through all rounds before a newer group.

    Narayanan et al. take groups of S micro-batches and need M to be a multiple of S. Here the groups are as even as
    possible, and not smaller than S unless M is. Then no IPU ever waits for a round to come back, for any M.
    """
    groups = _groups(progress.line)
    more = _in_flight(progress, "B") < _looped_depths(progress)
    return first_of(_if(more, progress.in_turn("F", groups)), progress.in_turn("B", groups))


def _looped_zb(progress: Progress) -> Choices:
    """Choose F and B as in "looped", and W if neither is ready or if W makes room for F.

    An IPU keeps at most as many micro-batches from F until W as "looped" keeps on its fullest IPU.
    """
    groups, depths = _groups(progress.line), _looped_depths(progress)
    forward = _if(_in_flight(progress, "B") < depths, progress.in_turn("F", groups))
    weight = progress.oldest("W")
    fits = _in_flight(progress, "W") < depths.max(initial=0)
    make_room = _if(forward != NONE, weight)
    return first_of(_if(fits, forward), make_room, progress.in_turn("B", groups), weight)


def _looped_bfs(progress: Progress) -> Choices:
    """Choose F of all micro-batches, round after round, then B in the same way."""
    return np.where(_forward_left(progress), progress.in_turn("F", 1), progress.in_turn("B", 1))


def _if(mask: Mask, choices: Choices) -> Choices:
    return np.where(mask, choices, NONE)


def _groups(line: Line) -> int:
    """Return the number of groups into which "looped" divides the micro-batches."""
    return max(1, line.micro_batches // len(line.on))


def _looped_depths(progress: Progress) -> Ints:
    """Return how many pairs of segment and micro-batch each IPU keeps between F and B under "looped"."""
    rounds, ipus = progress.segment.shape
    group = -(-progress.line.micro_batches // _groups(progress.line))
    return 2 * np.arange(ipus)[::-1] + (rounds - 1) * group + 1


def _in_flight(progress: Progress, last: Kind) -> Ints:
    return progress.between("F", last).sum(axis=0)


def _zb_h1(progress: Progress) -> Choices:
    """Choose F and B as in 1F1B, and W if neither is ready or if W makes room for F.

    Each stage keeps at most S micro-batches from F until W, as many as 1F1B keeps on its fullest IPU.
    """
    due = progress.ready["F"] & (progress.between("F", "B") < len(progress.line) - progress.segment)
    fits = due & (progress.between("F", "W") < len(progress.line))
    weight = progress.oldest("W")
    make_room = _if(np.any(due, axis=0), weight)
    return first_of(progress.furthest("F", fits), make_room, progress.oldest("B"), weight)


def _zbv(progress: Progress) -> Choices:
    """Choose B, else F on the way back, else F on the way there, else W.

    An IPU holds at most S micro-batches of its share of the model.
    """
    return _folded(None, "B", progress)


def wave_rules() -> Iterator[Rule]:
    """Yield the rules that "zb-wave" tries. The first one never gets stuck."""
    for firsts in (("B", "F", "half"), ("room",)):
        for reserved, first in itertools.product((None, 1, 2), firsts):
            yield functools.partial(_folded, reserved, first)


def _folded(reserved: int | None, first: str, progress: Progress) -> Choices:
    """Choose B or F, else W. Of several F, choose the F that is furthest on its way.

    An IPU holds at most S micro-batches of its share of the model.

    Args:
        reserved: the number of segments of its IPU for which an F leaves room, from its own on; None for all of them,
            so that the oldest micro-batch can always go on.
        first: "B", "F", "half": F while less than half of the room is between F and B, else B, or "room": W if that
            makes room for an F that is ready, else B.
        progress: as for every rule.
    """
    length = progress.length
    limit = len(progress.line.on) * length.sum(axis=0)
    room = limit - (length * progress.between("F", "W")).sum(axis=0)
    rounds = len(length)
    needs = np.stack([length[j : rounds if reserved is None else j + reserved].sum(axis=0) for j in range(rounds)])
    forward = progress.furthest("F", progress.ready["F"] & (needs <= room))
    backward, weight = progress.oldest("B"), progress.oldest("W")
    if first == "B":
        return first_of(backward, forward, weight)
    if first == "F":
        return first_of(forward, backward, weight)
    if first == "room":
        make_room = _if(np.any(progress.ready["F"], axis=0) & (forward == NONE), weight)
        return first_of(make_room, backward, forward, weight)
    early = np.less(2 * (length * progress.between("F", "B")).sum(axis=0), limit)
    return first_of(_if(early, forward), backward, forward, weight)


RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "looped": _looped,
    "looped-bfs": _looped_bfs,
    "looped-zb": _looped_zb,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
}


# DualPipeV: two stages per IPU, folded, and F of one paired with B of the other

# numbers of kind and chunk (0 on the way there, 1 on the way back), as `Progress` numbers two segments of an IPU
_F0, _F1, _B0, _B1, _W0, _W1 = range(6)
_Z0, _Z1, _W = range(6, 9)  # B whose W is postponed, and the oldest postponed W


def dualpipev_rule(line: Line) -> Rule:
    """Return the rule that follows DualPipeV's order on a folded line.

    IPU r of S does these tasks: F0 and B0 of its stage on the way there, F1 and B1 of its stage on the way back. W
    follows its B at once. Z is a B whose W is postponed, and a W alone is the oldest postponed W.

        2 (S-r-1)       x  F0
        r+1             x  F0 F1
        S-r-1           x  Z1 W F1
        M - 2S + r+1    x  F0 B1 F1 B0      the pairs F0 B1 and F1 B0 are what DeepSeek overlaps
        S-r-1           x  B1 F1 B0
        r+1             x  B1 B0            Z instead of B in the second half
        S-r-1           x  W Z0
        r+1             x  W

    With fewer than 2S micro-batches, the order is the order for 2S without the surplus tasks.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, and `dualpipev.py` of its DualPipe repository.
    """
    rounds = max(map(len, line.on.values()), default=0)
    orders = [
        _segments(_order(len(line.on), rank, line.micro_batches), len(mine), rounds)
        for rank, mine in enumerate(line.on.values())
    ]
    return follow(orders)


def _segments(order: Ints, count: int, rounds: int) -> Ints:
    """Return an IPU's order in numbers of its `rounds` segments. Where a line turns, both chunks can be one segment."""
    kinds, chunks = order // 2, order % 2
    if count == 2:
        return order
    # the one segment runs a micro-batch when the first of its two chunks would
    first = np.zeros(len(order), np.bool_)
    for kind in range(3):
        there, back = (np.flatnonzero((kinds == kind) & (chunks == chunk)) for chunk in (0, 1))
        first[np.minimum(there, back)] = True
    return kinds[first] * rounds


def _order(ipus: int, rank: int, micro_batches: int) -> Ints:
    before, upto = ipus - rank - 1, rank + 1
    pairs = max(micro_batches, 2 * ipus) - 2 * ipus + upto
    last = np.tile([_B1, _B0], upto)
    last[upto:] += _Z0 - _B0
    steps = np.concatenate(
        [
            np.tile([_F0, _F0], before),
            np.tile([_F0, _F1], upto),
            np.tile([_Z1, _W, _F1], before),
            np.tile([_F0, _B1, _F1, _B0], pairs),
            np.tile([_B1, _F1, _B0], before),
            last,
            np.tile([_W, _Z0], before),
            np.tile([_W], upto),
        ]
    )
    postponed = steps[(steps == _Z0) | (steps == _Z1)]
    steps[steps == _W] = postponed - _Z0 + _W0  # first in, first out
    whole = (steps == _B0) | (steps == _B1)
    steps = np.repeat(steps, 1 + whole)
    places = np.flatnonzero(whole) + np.arange(1, 1 + whole.sum())
    steps[places] += _W0 - _B0
    steps[(steps == _Z0) | (steps == _Z1)] -= _Z0 - _B0
    kept = np.ones(len(steps), np.bool_)
    for number in range(_Z0):
        kept[np.flatnonzero(steps == number)[micro_batches:]] = False
    return steps[kept]
