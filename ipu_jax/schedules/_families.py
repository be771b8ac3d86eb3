"""Build the timetables of the named schedules.

Four stages on four IPUs, eight micro-batches, schedule "1f1b" (a cell is stage, F or B, micro-batch):

    tick   0    1    2    3    4    5    6    7    8    9    10   11 ...
    IPU 0  0F0  0F1  0F2  0F3                 0B0  0F4  0B1  0F5  0B2
    IPU 1       1F0  1F1  1F2            1B0  1F3  1B1  1F4  1B2  1F5
    IPU 2            2F0  2F1       2B0  2F2  2B1  2F3  2B2  2F4  2B3
    IPU 3                 3F0  3B0  3F1  3B1  3F2  3B2  3F3  3B3  3F4

"sequential" and "grouped" repeat the ticks of one micro-batch under the two-phase clock, and "interleaved" does so
under the one-phase clock. The other schedules are built in two steps. First, the *rule* of the family chooses which of
the ready tasks an IPU does next, and a simulated run with this rule gives the order of each IPU's tasks; in that run F,
B and W of a stage take 1 each, or F takes 1 and B takes 2 if there is no W. Second, each task gets the earliest tick
that the order and the clock allow. So any number of micro-batches will do, and any placement that the family can serve.

Concurrent stages run in the ticks of a local segment beside them: those before a local stage run their F in the tick of
that stage's F and their B in the tick of its B, and the loss head runs in the tick of the last local F. None of this
delays a local task.

Sources: Huang et al. 2019, arXiv:1811.06965 (gpipe); Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1f1b, and
looped: "interleaved stages" there); Qi et al. 2023, arXiv:2401.10241 (zb-h1); Qi et al. 2024, arXiv:2405.15362 (zbv);
Graphcore, "Multi-IPU Programming Overview" (sequential: "sharded execution"; grouped and interleaved pipelines).
"""

import dataclasses
import heapq
from collections.abc import Callable

from ipu_jax.schedules._timetable import Kind, Placement, Rows, Timetable, segments_of

SCHEDULES = ("sequential", "grouped", "interleaved", "gpipe", "1f1b", "looped", "zb-h1", "zbv")
Local = tuple[int, Kind, int]  # a task of a local segment: the segment's place in the line, kind, micro-batch


def default_placement(name: str, ipus: int, rounds: int) -> Placement:
    """Return the placement that a family uses if none is given.

    >>> default_placement("zbv", 3, 2), default_placement("looped", 2, 2)
    ((0, 1, 2, 2, 1, 0), (0, 1, 0, 1))
    """
    line = tuple(range(ipus))
    return line + line[::-1] if name == "zbv" else line * rounds if name == "looped" else line


def timetable(name: str, placement: Placement, ipus: int, micro_batches: int) -> Timetable:
    """Return the family's timetable for a placement.

    Raises:
        ValueError: the family cannot serve this placement.
    """
    if name in ("sequential", "grouped"):
        forward, backward = _first_micro_batch(placement)
        period = 1 if name == "grouped" else 1 + backward[0]
        repeat = lambda row: tuple(tuple(tick + period * m for m in range(micro_batches)) for tick in row)  # noqa: E731
        return Timetable(name, placement, ipus, repeat(forward), repeat(backward))
    line = _Line(placement, micro_batches, name in ("zb-h1", "zbv"))
    if name == "looped":
        _check_looped(line)
    if name == "zbv":
        _check_folded(line)
    ticks = _interleaved(line) if name == "interleaved" else _earliest_ticks(_run(line, _RULES[name]), line)
    weight = _rows(line, ticks, "W") if "W" in line.kinds else None
    return Timetable(name, placement, ipus, _rows(line, ticks, "F"), _rows(line, ticks, "B"), weight, "one-phase")


def _first_micro_batch(placement: Placement) -> tuple[list[int], list[int]]:
    """Return the earliest two-phase ticks of F and B, per stage, of a micro-batch that meets no other."""
    last_local = max((s for s, ipu in enumerate(placement) if ipu is not None), default=-1)
    forward = [0]
    for s in range(1, len(placement)):
        before, here = placement[s - 1], placement[s]
        # a local stage's result leaves its IPU at the end of phase F: only the head or the same IPU uses it then
        stays = before is None or before == here or s > last_local
        forward.append(forward[-1] + (0 if stays else 1))
    backward = [forward[-1]] * len(placement)
    for s in range(len(placement) - 2, -1, -1):
        here, after = placement[s], placement[s + 1]
        # a gradient leaves its IPU at the end of phase B, in time for `exit`; a result of `exit` is used a tick later
        stays = here is None or here == after or s + 1 > last_local
        backward[s] = backward[s + 1] + (0 if stays else 1)
    return forward, backward


class _Line:
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


# the simulated run, in which rules choose what each IPU does next


@dataclasses.dataclass
class _Progress:
    """The progress of a run. Every segment does its micro-batches in order, so counts describe it fully."""

    line: _Line
    begun: dict[tuple[int, Kind], int]

    def between(self, i: int, first: Kind, last: Kind) -> int:
        """Return how many micro-batches of segment i have begun `first` but not `last`."""
        return self.begun[i, first] - self.begun[i, last]


Rule = Callable[[_Progress, int, list[Local]], Local | None]


def _run(line: _Line, rule: Rule) -> list[Local]:
    """Return all tasks in the order in which they start when each IPU follows the rule."""
    progress = _Progress(line, {(i, kind): 0 for i in range(len(line)) for kind in line.kinds})
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
        assert running or len(order) == total, "no IPU has anything to do: the rule holds back what others wait for"
        now = running[0][0] if running else now
        while running and running[0][0] == now:
            _, task = heapq.heappop(running)
            ended.add(task)
            idle.add(line.places[task[0]])
    return order


def _of_kind(ready: list[Local], kind: Kind) -> list[Local]:
    return [task for task in ready if task[1] == kind]


def _oldest(tasks: list[Local]) -> Local | None:
    """Return the task of the oldest micro-batch, of the latest stage if there are several: it frees the most."""
    return min(tasks, key=lambda task: (task[2], -task[0]), default=None)


def _gpipe(progress: _Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F until all are done, then B."""
    line = progress.line
    if any(progress.begun[i, "F"] < line.micro_batches for i in line.on[ipu]):
        return min(_of_kind(ready, "F"), default=None)
    return _oldest(_of_kind(ready, "B"))


def _one_f_one_b(progress: _Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose B if one is ready, else F while fewer micro-batches are between F and B than segments are left to pass."""
    go = [t for t in _of_kind(ready, "F") if progress.between(t[0], "F", "B") < len(progress.line) - t[0]]
    return _oldest(_of_kind(ready, "B")) or max(go, default=None)


def _looped(progress: _Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose as 1F1B does, over rounds: a group of micro-batches goes through all rounds before a newer group.

    Narayanan et al. take groups of S micro-batches and need M to be a multiple of S. Here the groups are as even as
    possible, and not smaller than S unless M is. Then no IPU ever waits for a round to come back, whatever M is.
    """
    line = progress.line
    mine, ipus, rank = line.on[ipu], len(line.on), list(line.on).index(ipu)
    groups = max(1, line.micro_batches // ipus)
    group = -(-line.micro_batches // groups)

    def in_turn(kind: Kind) -> Local | None:
        left: list[Local] = [(i, kind, m) for i in mine if (m := progress.begun[i, kind]) < line.micro_batches]
        turn = min(
            left, key=lambda t: (t[2] * groups // line.micro_batches, t[0] if kind == "F" else -t[0]), default=None
        )
        return turn if turn in ready else None

    in_flight = sum(progress.between(i, "F", "B") for i in mine)
    more = in_flight < 2 * (ipus - rank - 1) + (len(mine) - 1) * group + 1
    return (in_turn("F") if more else None) or in_turn("B")


def _zb_h1(progress: _Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose F and B as 1F1B does, and W if neither is ready or if W makes room for F.

    Each stage keeps at most S micro-batches from F until W, as many as 1F1B keeps on its fullest IPU.
    """
    line = progress.line
    due = [t for t in _of_kind(ready, "F") if progress.between(t[0], "F", "B") < len(line) - t[0]]
    fits = [t for t in due if progress.between(t[0], "F", "W") < len(line)]
    make_room = _oldest(_of_kind(ready, "W")) if due else None
    return max(fits, default=None) or make_room or _oldest(_of_kind(ready, "B")) or _oldest(_of_kind(ready, "W"))


def _zbv(progress: _Progress, ipu: int, ready: list[Local]) -> Local | None:
    """Choose B, else F on the way back, else F on the way there, else W.

    An IPU holds at most S micro-batches of its share of the model.
    """
    line = progress.line
    mine = line.on[ipu]
    share = sum(line.lengths[i] for i in mine)
    room = len(line.on) * share - sum(line.lengths[i] * progress.between(i, "F", "W") for i in mine)

    def needs(i: int) -> int:
        # an F on the way there leaves room for the way back, so that the oldest micro-batch can always go on
        return sum(line.lengths[j] for j in mine if j >= i)

    fits = [t for t in _of_kind(ready, "F") if needs(t[0]) <= room]
    return _oldest(_of_kind(ready, "B")) or max(fits, default=None) or _oldest(_of_kind(ready, "W"))


_RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "looped": _looped,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
}


# the placements that a family can serve


def _check_looped(line: _Line) -> None:
    ipus = list(line.on)
    if line.places != ipus * (len(line) // max(1, len(ipus))):
        raise ValueError(
            f"schedule 'looped' cannot serve the local stages on {line.places}: it needs them on the same IPUs in the "
            "same order round after round, as in [0, 1, 0, 1]; '1f1b' serves any placement"
        )


def _check_folded(line: _Line) -> None:
    there = list(line.on)
    if line.places not in (there + there[::-1], there + there[-2::-1]):
        raise ValueError(
            f"schedule 'zbv' cannot serve the local stages on {line.places}: it needs them folded, there and back over "
            "the same IPUs, as in [0, 1, 1, 0]; 'zb-h1' serves any placement"
        )


# ticks


def _earliest_ticks(order: list[Local], line: _Line) -> dict[Local, int]:
    """Return, per task, the earliest tick in which its IPU is free and its inputs have arrived."""
    ticks: dict[Local, int] = {}
    free = dict.fromkeys(line.on, 0)
    for task in order:
        ipu = line.places[task[0]]
        ticks[task] = max([free[ipu], *(ticks[source] + 1 for source in line.inputs(task))])
        free[ipu] = ticks[task] + 1
    return ticks


def _interleaved(line: _Line) -> dict[Local, int]:
    """Return the ticks of one micro-batch, repeated for all micro-batches.

    With one stage on each of S IPUs, F(s, m) = s + 2m and B(s, m) = 2S-1-s + 2m. An IPU with k segments has 2k tasks
    per micro-batch, each in a different tick modulo the period.
    """
    period = 2 * max(map(len, line.on.values()), default=1)
    taken: set[tuple[int, int]] = set()
    first: dict[tuple[int, Kind], int] = {}
    tick = 0
    there: list[tuple[int, Kind]] = [(i, "F") for i in range(len(line))]
    back: list[tuple[int, Kind]] = [(i, "B") for i in reversed(range(len(line)))]
    for i, kind in there + back:
        while (line.places[i], tick % period) in taken:
            tick += 1
        taken.add((line.places[i], tick % period))
        first[i, kind] = tick
        tick += 1
    return {(i, kind, m): tick + period * m for (i, kind), tick in first.items() for m in range(line.micro_batches)}


def _rows(line: _Line, ticks: dict[Local, int], kind: Kind) -> Rows:
    """Return the table of one kind of task; concurrent segments get the ticks of a local one beside them."""
    rows: list[tuple[int, ...]] = []
    done = 0  # local segments met so far
    for stages in line.segments:
        if line.placement[stages[0]] is not None:
            row = tuple(ticks[done, kind, m] for m in range(line.micro_batches))
            done += 1
        elif done < len(line):
            own_kind: Kind = "F" if kind == "F" else "B"  # a concurrent stage has no W: its row repeats B
            row = tuple(ticks[done, own_kind, m] for m in range(line.micro_batches))
        else:  # the head
            row = tuple(ticks[done - 1, "F", m] if done else m for m in range(line.micro_batches))
        rows += [row] * len(stages)
    return tuple(rows)
