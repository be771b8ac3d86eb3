"""Rules that choose what each IPU does next, and the simulated run in which they choose.

In the run F, B and W of a stage take 1 each, or F takes 1 and B takes 2 if there is no W. It gives the order of each
IPU's tasks. Then each task gets the earliest tick that the order and the clock allow.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator

from ipu_jax.schedules._timetable import Kind, Placement, segments_of

Local = tuple[int, Kind, int]  # a task of a local segment: the segment's place in the line, kind, micro-batch


class Line:
    """The local segments in order: micro-batches pass along them forward, then backward.

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
        self.on = {
            ipu: [i for i, place in enumerate(self.places) if place == ipu] for ipu in dict.fromkeys(self.places)
        }
        self.kinds: tuple[Kind, ...] = ("F", "B", "W") if split and local else ("F", "B")

    def __len__(self) -> int:
        return len(self.places)

    def cost(self, i: int, kind: Kind) -> int:
        return self.lengths[i] * (2 if kind == "B" and "W" not in self.kinds else 1)

    def inputs(self, task: Local) -> list[Local]:
        i, kind, m = task
        if kind == "F":
            return [(i - 1, "F", m)] if i > 0 else []
        return [(i, "B", m)] if kind == "W" else [(i + 1, "B", m) if i + 1 < len(self) else (i, "F", m)]


class StuckError(Exception):
    """A run cannot go on."""


@dataclasses.dataclass
class Progress:
    """The progress of a run. Every segment does its micro-batches in order, so counts describe it fully."""

    line: Line
    begun: dict[tuple[int, Kind], int]

    def between(self, i: int, first: Kind, last: Kind) -> int:
        """Return how many micro-batches of segment i have begun `first` but not `last`."""
        return self.begun[i, first] - self.begun[i, last]


Rule = Callable[[Progress, int, list[Local]], Local | None]
"""Chooses the next task of an IPU: `rule(progress, ipu, tasks that are ready)`, None to wait."""


def run(line: Line, rule: Rule) -> tuple[list[Local], int]:
    """Simulate a run in which each IPU follows the rule.

    Returns:
        All tasks in the order in which they start, and the time at which the last one ends.

    Raises:
        StuckError: at some time no IPU does anything, although tasks are left.
    """
    progress = Progress(line, {(i, kind): 0 for i in range(len(line)) for kind in line.kinds})
    ended: set[Local] = set()
    running: list[tuple[int, Local]] = []
    idle, now, order = set(line.on), 0, []
    total = len(progress.begun) * line.micro_batches
    while len(order) < total:
        for ipu in sorted(idle):
            waiting: list[Local] = [(i, kind, progress.begun[i, kind]) for i in line.on[ipu] for kind in line.kinds]
            ready = [task for task in waiting if task[2] < line.micro_batches and ended.issuperset(line.inputs(task))]
            task = rule(progress, ipu, ready)
            if task is not None:
                i, kind, _ = task
                progress.begun[i, kind] += 1
                heapq.heappush(running, (now + line.cost(i, kind), task))
                idle.discard(ipu)
                order.append(task)
        if not running:
            raise StuckError("no IPU has anything to do: the rule holds back tasks that others wait for")
        if len(order) == total:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, task = heapq.heappop(running)
            ended.add(task)
            idle.add(line.places[task[0]])
    return order, max((end for end, _ in running), default=0)


def follow(orders: dict[int, list[Local]]) -> Rule:
    """Return the rule by which each IPU does its tasks in a given order."""

    def rule(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
        done = sum(progress.begun[i, kind] for i in progress.line.on[ipu] for kind in progress.line.kinds)
        return next((task for task in orders[ipu][done : done + 1] if task in ready), None)

    return rule


def earliest_end(line: Line) -> int:
    """Return a time before which no run can end: every IPU first waits for an F, and then has its own work to do."""
    return max(
        sum(line.cost(i, "F") for i in range(mine[0]))
        + line.micro_batches * sum(line.cost(i, kind) for i in mine for kind in line.kinds)
        for mine in line.on.values()
    )


def _of_kind(ready: list[Local], kind: Kind) -> list[Local]:
    return [task for task in ready if task[1] == kind]


def _oldest(tasks: list[Local]) -> Local | None:
    """Return the task of the oldest micro-batch, of the latest stage if there are several: it frees the most."""
    return min(tasks, key=lambda task: (task[2], -task[0]), default=None)


def _gpipe(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F until all are done, then B."""
    line = progress.line
    if any(progress.begun[i, "F"] < line.micro_batches for i in line.on[ipu]):
        return min(_of_kind(ready, "F"), default=None)
    return _oldest(_of_kind(ready, "B"))


def _one_f_one_b(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose B if one is ready, else F while fewer micro-batches are between F and B than segments are left to pass."""
    go = [t for t in _of_kind(ready, "F") if progress.between(t[0], "F", "B") < len(progress.line) - t[0]]
    return _oldest(_of_kind(ready, "B")) or max(go, default=None)


def _looped(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose as 1F1B does, over rounds: a group of micro-batches goes through all rounds before a newer group.

    Narayanan et al. take groups of S micro-batches and need M to be a multiple of S. Here the groups are as even as
    possible, and not smaller than S unless M is. Then no IPU ever waits for a round to come back, whatever M is.
    """
    groups = _groups(progress.line)
    more = _in_flight(progress, ipu, "B") < _looped_depth(progress.line, ipu)
    return (_in_turn(progress, ipu, ready, "F", groups) if more else None) or _in_turn(
        progress, ipu, ready, "B", groups
    )


def _looped_zb(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F and B as "looped" does, and W if neither is ready or if W makes room for F.

    An IPU keeps at most as many micro-batches from F until W as "looped" keeps on its fullest IPU.
    """
    line, groups = progress.line, _groups(progress.line)
    more = _in_flight(progress, ipu, "B") < _looped_depth(line, ipu)
    forward = _in_turn(progress, ipu, ready, "F", groups) if more else None
    weight = _oldest(_of_kind(ready, "W"))
    if forward and _in_flight(progress, ipu, "W") < max(_looped_depth(line, other) for other in line.on):
        return forward
    return (weight if forward else None) or _in_turn(progress, ipu, ready, "B", groups) or weight


def _looped_bfs(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F of all micro-batches, round after round, then B likewise."""
    forward_left = any(progress.begun[i, "F"] < progress.line.micro_batches for i in progress.line.on[ipu])
    return _in_turn(progress, ipu, ready, "F" if forward_left else "B", 1)


def _groups(line: Line) -> int:
    """Return into how many groups "looped" divides the micro-batches."""
    return max(1, line.micro_batches // len(line.on))


def _looped_depth(line: Line, ipu: int) -> int:
    """Return how many (segment, micro-batch) an IPU keeps between F and B under "looped"."""
    ipus, group = list(line.on), -(-line.micro_batches // _groups(line))
    return 2 * (len(ipus) - ipus.index(ipu) - 1) + (len(line.on[ipu]) - 1) * group + 1


def _in_flight(progress: Progress, ipu: int, last: Kind) -> int:
    return sum(progress.between(i, "F", last) for i in progress.line.on[ipu])


def _in_turn(progress: Progress, ipu: int, ready: list[Local], kind: Kind, groups: int) -> Local | None:
    """Return the IPU's next task of a kind, if it is ready: group after group, each through all rounds."""
    count = progress.line.micro_batches
    left: list[Local] = [(i, kind, m) for i in progress.line.on[ipu] if (m := progress.begun[i, kind]) < count]
    turn = min(left, key=lambda t: (t[2] * groups // count, t[0] if kind == "F" else -t[0]), default=None)
    return turn if turn in ready else None


def _zb_h1(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F and B as 1F1B does, and W if neither is ready or if W makes room for F.

    Each stage keeps at most S micro-batches from F until W, as many as 1F1B keeps on its fullest IPU.
    """
    line = progress.line
    due = [t for t in _of_kind(ready, "F") if progress.between(t[0], "F", "B") < len(line) - t[0]]
    fits = [t for t in due if progress.between(t[0], "F", "W") < len(line)]
    make_room = _oldest(_of_kind(ready, "W")) if due else None
    return max(fits, default=None) or make_room or _oldest(_of_kind(ready, "B")) or _oldest(_of_kind(ready, "W"))


def _zbv(progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose B, else F on the way back, else F on the way there, else W.

    An IPU holds at most S micro-batches of its share of the model.
    """
    return _folded(None, "B", progress, ipu, ready)


def wave_rules() -> Iterator[Rule]:
    """Yield the rules that "zb-wave" tries. The first one never gets stuck."""
    for reserved, first in itertools.product((None, 1, 2), ("B", "F", "half")):
        yield functools.partial(_folded, reserved, first)


def _folded(reserved: int | None, first: str, progress: Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose B or F, of the F the one furthest on its way, else W.

    An IPU holds at most S micro-batches of its share of the model.

    Args:
        reserved: how many segments of its IPU an F leaves room for, its own and following ones; None for all of them,
            so that the oldest micro-batch can always go on.
        first: "B", "F", or "half": F while less than half of the room is between F and B, else B.
        progress, ipu, ready: as for every rule.
    """
    line = progress.line
    mine = line.on[ipu]
    limit = len(line.on) * sum(line.lengths[i] for i in mine)
    room = limit - sum(line.lengths[i] * progress.between(i, "F", "W") for i in mine)
    needs = lambda i: sum(line.lengths[j] for j in [j for j in mine if j >= i][:reserved])  # noqa: E731
    forward = max((t for t in _of_kind(ready, "F") if needs(t[0]) <= room), default=None)
    backward = _oldest(_of_kind(ready, "B"))
    if first == "half":
        first = "F" if 2 * sum(line.lengths[i] * progress.between(i, "F", "B") for i in mine) < limit else "B"
    choice = (forward or backward) if first == "F" else (backward or forward)
    return choice or _oldest(_of_kind(ready, "W"))


RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "looped": _looped,
    "looped-bfs": _looped_bfs,
    "looped-zb": _looped_zb,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
}


def earliest_ticks(order: list[Local], line: Line) -> dict[Local, int]:
    """Return, per task, the earliest tick in which its IPU is free and its inputs have arrived."""
    ticks: dict[Local, int] = {}
    free = dict.fromkeys(line.on, 0)
    for task in order:
        ipu = line.places[task[0]]
        ticks[task] = max([free[ipu], *(ticks[source] + 1 for source in line.inputs(task))])
        free[ipu] = ticks[task] + 1
    return ticks
