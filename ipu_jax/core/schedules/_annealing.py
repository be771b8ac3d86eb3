"""Improve a table of ticks in which all IPUs wait for each other wherever one sends, by simulated annealing.

The ticks from one exchange to the next last as long as the IPU with the most work in them needs, and the step takes the
sum, and for each exchange the time of a message. So what matters is how many exchanges there are, and which tasks run
between the same two of them, not when an IPU is idle. A move takes one task to another tick of its IPU, or swaps it
with the task there, if the inputs of both tasks and the segments' limits of micro-batches allow it. Only the ticks
between the exchanges around these two ticks change, so a move looks at these ticks alone. In a long table of many IPUs
nearly every tick has an exchange. There it is faster to treat every tick as having one, and the makespan is then at
least the true one.

Concurrent stages take the same time in any table, since all IPUs run them together in phases of their own.
"""

import itertools
import math
import random
from collections.abc import Iterable, Sequence

from ipu_jax.core.schedules._costs import Work
from ipu_jax.core.schedules._timetable import Kind, Local

Ticks = dict[Local, int]
Depths = Sequence[int]


def spread(tasks: Iterable[tuple[tuple[int, int], int, Local]], work: Work) -> Ticks:
    """Return ticks with at most one task per IPU, for tasks of which several may share a tick.

    Args:
        tasks: each task with the tick and the phase in which it runs, and its turn within the phase. An IPU does its
            tasks of one phase in consecutive ticks, in the order of their turns.
        work: the segments and their IPUs.
    """
    ticks: Ticks = {}
    begin = 0
    for _, members in itertools.groupby(sorted(tasks), key=lambda member: member[0]):
        used: dict[int, int] = {}
        for _, _, task in members:
            ipu = work.line.places[task[0]]
            ticks[task] = begin + used.get(ipu, 0)
            used[ipu] = used.get(ipu, 0) + 1
        begin += max(used.values())
    return ticks


def lockstep_cost(ticks: Ticks, work: Work, transfer: float) -> float:
    """Return the makespan without concurrent stages; each exchange takes `transfer`."""
    costs = {"F": work.forward, "B": work.backward, "W": work.weight}
    line = work.line
    ipus = {ipu: k for k, ipu in enumerate(line.on)}
    count = 1 + max(ticks.values())
    lengths = [[0.0] * len(ipus) for _ in range(count)]
    sends = [0] * count
    for task, tick in ticks.items():
        i, kind, _ = task
        lengths[tick][ipus[line.places[i]]] += costs[kind][i]
        sends[tick] += _sends(task, work)
    return _cost(lengths, sends, transfer, 0, count - 1)


def _sends(task: Local, work: Work) -> bool:
    """Return whether the result of a task goes to another IPU."""
    i, kind, _ = task
    line = work.line
    if kind == "W":
        return False
    k = i + 1 if kind == "F" else i - 1
    return 0 <= k < len(line) and line.places[k] != line.places[i]


def _cost(lengths: Sequence[Sequence[float]], sends: Sequence[int], transfer: float, first: int, last: int) -> float:
    """Return the time of the ticks from `first` to `last`. Each tick that sends ends with an exchange."""
    total, begin = 0.0, first
    for tick in range(first, last + 1):
        if sends[tick] or tick == last:
            rows = lengths[begin : tick + 1]
            total += max(rows[0]) if len(rows) == 1 else max(map(math.fsum, zip(*rows, strict=True)))
            total += transfer if sends[tick] else 0.0
            begin = tick + 1
    return total


def depths_of(ticks: Ticks, work: Work) -> tuple[list[int], list[int]]:
    """Return, per segment, how many micro-batches it holds from F until its last use, and from B until W (or 0)."""
    return (
        [_depth(ticks, work, i, "F", "W" if work.split else "B") for i in range(len(work.line))],
        [_depth(ticks, work, i, "B", "W") if work.split else 0 for i in range(len(work.line))],
    )


def _depth(ticks: Ticks, work: Work, i: int, first: Kind, last: Kind) -> int:
    count = work.line.micro_batches
    ends = [ticks[i, last, m] for m in range(count)]
    depth = done = 0
    for m in range(count):
        while ends[done] < ticks[i, first, m]:
            done += 1
        depth = max(depth, m + 1 - done)
    return depth


class AnnealedTable:
    """A table with numbered tasks and IPUs. `cells[tick][ipu]` is a task's number or -1, and `lengths` its cost.

    `sends[tick]` is the number of tasks in a tick whose results go to another IPU.

    Args:
        ticks: the tick of each task. Every segment does its micro-batches in order.
        work: the costs of the tasks.
        depths, residual_depths: per segment, the most micro-batches that it may hold, at least as many as it holds now.
        transfer: the time of an exchange.
        exact: whether to look up the exchanges. Otherwise every tick counts as having one.
    """

    def __init__(self, ticks: Ticks, work: Work, depths: Depths, residual_depths: Depths, transfer: float, exact: bool):
        line = work.line
        self.tasks = sorted(ticks)
        number = {task: x for x, task in enumerate(self.tasks)}
        ipus = {ipu: k for k, ipu in enumerate(line.on)}
        costs = {"F": work.forward, "B": work.backward, "W": work.weight}
        self.ipu = [ipus[line.places[i]] for i, _, _ in self.tasks]
        self.cost = [costs[kind][i] for i, kind, _ in self.tasks]
        # every other tick is empty, so that moves can form new groups of tasks
        self.at = [2 * ticks[task] for task in self.tasks]
        self.count = 2 + max(self.at)
        self.cells = [[-1] * len(ipus) for _ in range(self.count)]
        self.lengths = [[0.0] * len(ipus) for _ in range(self.count)]
        self.transfer, self.exact = transfer, exact
        self.is_sent = [int(_sends(task, work)) for task in self.tasks]
        self.sends = [0] * self.count
        for x, tick in enumerate(self.at):
            assert self.cells[tick][self.ipu[x]] < 0, f"{self.tasks[x]} has a tick of its own on its IPU"
            self.cells[tick][self.ipu[x]] = x
            self.lengths[tick][self.ipu[x]] = self.cost[x]
            self.sends[tick] += self.is_sent[x]
        self.before: list[list[int]] = [[] for _ in self.tasks]
        self.after: list[list[int]] = [[] for _ in self.tasks]
        last: Kind = "W" if work.split else "B"
        for x, (i, kind, m) in enumerate(self.tasks):
            needs = line.inputs((i, kind, m))
            if m > 0:
                needs.append((i, kind, m - 1))
            if kind == "F" and m >= depths[i]:
                needs.append((i, last, m - depths[i]))
            if kind == "B" and work.split and m >= residual_depths[i]:
                needs.append((i, "W", m - residual_depths[i]))
            for need in needs:
                self.before[x].append(number[need])
                self.after[number[need]].append(x)
                assert self.at[number[need]] < self.at[x], f"{need} is before {self.tasks[x]}"

    def anneal(self, steps: int, heat: float, rng: random.Random) -> Ticks:
        """Return the table after `steps` moves, which is not always better than the initial table.

        Args:
            steps: the number of moves to try.
            heat: how much worse a move may make the table at first, as a share of a task's mean cost. It falls to 0.
            rng: the only source of randomness. Only `random` is called, which gives the same numbers in every Python.
        """
        at, ipu, cost, cells, lengths, sends = self.at, self.ipu, self.cost, self.cells, self.lengths, self.sends
        is_sent, time_around = self.is_sent, self._around if self.exact else self._alone
        mean = math.fsum(cost) / len(cost)
        reach = 4 * len(cells[0]) + 4  # the most ticks that a move can cross; a few are as good as many
        dice = rng.random
        for step in range(steps):
            # the threshold is the remaining heat times a random number: no exp, whose last digit may differ
            left = 1.0 - step / steps
            x = int(dice() * len(at))
            t, k = at[x], ipu[x]
            low, high = self._bounds(x, reach)
            if low >= high:
                continue
            u = low + int(dice() * (high - low + 1))
            if u == t:
                continue
            other = cells[u][k]
            if other >= 0 and not self._may_move(other, t, x):
                continue
            old = time_around(t, u)
            mine, its = cost[x], cost[other] if other >= 0 else 0.0
            change = is_sent[x] - (is_sent[other] if other >= 0 else 0)
            lengths[t][k], lengths[u][k] = its, mine
            sends[t] -= change
            sends[u] += change
            longer = time_around(t, u) - old
            if longer > 1e-12 and longer > heat * mean * left * left * dice():
                lengths[t][k], lengths[u][k] = mine, its
                sends[t] += change
                sends[u] -= change
                continue
            cells[t][k], cells[u][k] = other, x
            at[x] = u
            if other >= 0:
                at[other] = t
        return self._ticks(at)

    def _bounds(self, x: int, reach: int) -> tuple[int, int]:
        """Return the first and the last tick to which a task can move: after its inputs, before its outputs' tasks."""
        at = self.at
        low, high = max(at[x] - reach, 0), min(at[x] + reach, self.count - 1)
        for y in self.before[x]:
            if at[y] >= low:
                low = at[y] + 1
        for y in self.after[x]:
            if at[y] <= high:
                high = at[y] - 1
        return low, high

    def _around(self, t: int, u: int) -> float:
        """Return the time of the ticks that a move between two ticks can change, from exchange to exchange."""
        total, done, sends = 0.0, -1, self.sends
        for tick in (t, u) if t < u else (u, t):
            if tick <= done:
                continue
            first = last = tick
            while first > 0 and (not sends[first - 1] or first - 1 in (t, u)):
                first -= 1
            while last < self.count - 1 and (last in (t, u) or not sends[last]):
                last += 1
            total, done = total + _cost(self.lengths, sends, self.transfer, first, last), last
        return total

    def _alone(self, t: int, u: int) -> float:
        """Return the time of two ticks, each from one exchange to the next."""
        exchanges = self.transfer * ((self.sends[t] > 0) + (self.sends[u] > 0))
        return max(self.lengths[t]) + max(self.lengths[u]) + exchanges

    def _may_move(self, x: int, tick: int, partner: int) -> bool:
        """Return whether a task can move to the tick that its partner leaves, and does not depend on the partner."""
        at = self.at
        return all(y != partner and at[y] < tick for y in self.before[x]) and all(
            y != partner and at[y] > tick for y in self.after[x]
        )

    def _ticks(self, at: Sequence[int]) -> Ticks:
        """Return the tick of each task, numbered without the empty ticks."""
        kept = {tick: n for n, tick in enumerate(sorted(set(at)))}
        return {task: kept[tick] for task, tick in zip(self.tasks, at, strict=True)}
