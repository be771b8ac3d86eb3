"""Schedule the tasks of a line one by one, as time passes: each idle IPU chooses its next task by a policy.

This is the heuristic of Qi et al. 2023, arXiv:2401.10241, section 5, for stages of different costs, several stages per
IPU, concurrent stages, and a limit of bytes: no segment holds more micro-batches than the policy allows.

Concurrent stages make all IPUs wait for each other. Two kinds of local tasks need them: tasks that *end* with them (the
last segment's F with the loss head after it; B of a segment with concurrent stages before it), and tasks that *enter*
through them (F of such a segment). An IPU that is idle while such a task waits does not begin anything else. Once all
IPUs are idle, the concurrent stages of all waiting tasks run, one after the other.
"""

import dataclasses
import heapq
import math
from typing import Literal

from ipu_jax.core.schedules._costs import Work
from ipu_jax.core.schedules._timetable import Kind, Local

First = Literal["B", "F", "half", "room"]

FIRSTS: tuple[First, ...] = ("B", "F", "half", "room")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rules by which IPUs choose tasks. An IPU chooses W only if it can do neither F nor B, except under "room".

    Attributes:
        first: per segment, the preference of its IPU (the same for all its segments): "B"; "F"; "half": F while less
            than half of the IPU's capacity is between F and B, else B; "room": B, but W before it if that makes room
            for an F.
        depths: per segment, the most micro-batches that it holds between F and its last use.
        residual_depths: per segment, the most micro-batches that it holds between B and W.
        patience: an IPU waits for an F or B, instead of doing a W, if the F or B arrives within this share of W's cost.
        eager: with concurrent stages, an IPU begins a task that makes the other IPUs wait if they wait for at most this
            share of the task's cost.
    """

    first: tuple[First, ...]
    depths: tuple[int, ...]
    residual_depths: tuple[int, ...]
    patience: float = 0.0
    eager: float = 1.0


@dataclasses.dataclass(frozen=True)
class Joint:
    """A point in the order of tasks at which all IPUs run concurrent stages, after the tasks that `ends` names."""

    ends: tuple[Local, ...]


Order = list[Local | Joint]


def list_schedule(work: Work, policy: Policy, transfer: float) -> tuple[Order, float]:
    """Return all tasks in the order in which they start, and the time at which the last one ends."""
    return _Run(work, policy, transfer).result()


class _Run:
    """One run. Every segment does its micro-batches in order, so counts per segment describe it fully."""

    def __init__(self, work: Work, policy: Policy, transfer: float):
        line = work.line
        self.work, self.policy, self.transfer = work, policy, transfer
        self.count, self.places = line.micro_batches, line.places
        self.ipus = list(line.on)
        self.mine = {ipu: sorted(line.on[ipu], reverse=True) for ipu in self.ipus}
        n = len(line)
        self.costs = {"F": work.forward, "B": work.backward, "W": work.weight}
        self.f, self.b, self.w = [0] * n, [0] * n, [0] * n  # how many have begun
        self.can_f, self.can_b, self.can_w = [self.count] + [0] * (n - 1), [0] * n, [0] * n  # have their inputs
        self.freed = self.w if work.split else self.b
        self.running: dict[int, tuple[float, int, Kind] | None] = dict.fromkeys(self.ipus)
        self.events: list[tuple[float, int, int, Kind, bool]] = []  # time, number, segment, kind, task or message
        self.now = 0.0
        self.busy = 0  # IPUs that run a task
        self.number = 0
        self.order: Order = []
        self.ends: list[tuple[Local, float]] = []  # local tasks that wait for concurrent stages to end them, since when
        self.entries: list[int] = []  # segments whose next F waits for concurrent stages
        self.joint = work.has_head or any(work.joint)
        self.half = {
            ipu: math.fsum(policy.depths[i] * self._size(i) for i in mine) / 2 for ipu, mine in self.mine.items()
        }

    def result(self) -> tuple[Order, float]:
        end, total = 0.0, self.work.tasks
        begun, awake = 0, sorted(self.ipus)
        while True:
            for ipu in awake:
                if self.running[ipu] is None and not self.ends and not self.entries:
                    begun += self._begin(ipu)
            if (self.ends or self.entries) and not self.busy:
                begun += self._run_concurrent_stages()
                end = max(end, self.now)
                awake = sorted(self.ipus)
                continue
            if not self.events:
                break
            awake = self._next_events()
            end = max(end, self.now)
        assert begun == total, "a policy lets the oldest micro-batch go on, whose segments have room for one"
        return self.order, end

    def _size(self, i: int) -> float:
        return self.work.stash[i] + self.work.residuals[i] or 1.0

    def _begin(self, ipu: int) -> bool:
        """Begin the task that the policy chooses, if there is one. Return whether it begins now."""
        for i, kind in self._choices(ipu):
            if self.joint and not self._may_begin(i, kind):
                continue
            if kind == "F" and self.work.joint[i]:
                self.entries.append(i)
                return False
            self._start(i, kind)
            return True
        return False

    def _choices(self, ipu: int) -> list[tuple[int, Kind]]:
        """Return the tasks that the IPU can begin, the best first: the furthest F, and the oldest B or W."""
        f = b = w = -1
        makes_room = False
        policy, work = self.policy, self.work
        for i in self.mine[ipu]:
            if self.can_f[i] > self.f[i]:
                if self.f[i] - self.freed[i] < policy.depths[i]:
                    f = i if f < 0 else f
                elif self.f[i] - self.b[i] < policy.depths[i]:
                    makes_room = True
            if (
                self.can_b[i] > self.b[i]
                and (not work.split or self.b[i] - self.w[i] < policy.residual_depths[i])
                and (b < 0 or self.b[i] < self.b[b])
            ):
                b = i
            if self.can_w[i] > self.w[i] and (w < 0 or self.w[i] < self.w[w]):
                w = i
        if f < 0 and b < 0:
            return [(w, "W")] if w >= 0 and not self._waits(ipu, work.weight[w]) else []
        first = policy.first[self.mine[ipu][0]]
        if first == "half":
            between = math.fsum((self.f[i] - self.b[i]) * self._size(i) for i in self.mine[ipu])
            first = "F" if between < self.half[ipu] else "B"
        both: list[tuple[int, Kind]] = [(b, "B"), (f, "F")]
        found = [choice for choice in (reversed(both) if first == "F" else both) if choice[0] >= 0]
        if w >= 0:
            found.insert(0 if first == "room" and makes_room and f < 0 else len(found), (w, "W"))
        return found

    def _waits(self, ipu: int, cost: float) -> bool:
        """Return whether an F or B arrives so soon that the IPU should wait for it."""
        if self.policy.patience <= 0.0:
            return False
        limit = self.now + self.policy.patience * cost
        for i in self.mine[ipu]:
            for other, kind in ((i - 1, "F"), (i + 1, "B")):
                if 0 <= other < len(self.places):
                    task = self.running[self.places[other]]
                    if task is not None and task[1:] == (other, kind) and task[0] + self.transfer < limit:
                        return True
        return False

    def _may_begin(self, i: int, kind: Kind) -> bool:
        """Return whether a task ends before the IPUs meet in concurrent stages, or shortly after."""
        if self.policy.eager >= 1.0:
            return True
        cost = self.costs[kind][i]
        meets = [task[0] for task in self.running.values() if task is not None and self._ends_jointly(*task[1:])]
        return not meets or self.now + cost - min(meets) <= self.policy.eager * cost

    def _ends_jointly(self, i: int, kind: Kind) -> bool:
        return self.work.joint[i] if kind == "B" else kind == "F" and i + 1 == len(self.places) and self.work.has_head

    def _start(self, i: int, kind: Kind) -> None:
        begun = self.f if kind == "F" else self.b if kind == "B" else self.w
        self.order.append((i, kind, begun[i]))
        begun[i] += 1
        end = self.now + self.costs[kind][i]
        self.running[self.places[i]] = end, i, kind
        self.busy += 1
        self._post(end, i, kind, True)

    def _post(self, time: float, i: int, kind: Kind, is_task: bool) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, i, kind, is_task))

    def _next_events(self) -> list[int]:
        """Go to the time of the next events, and return the IPUs that may have something to do after them."""
        self.now = max(self.now, self.events[0][0])  # messages may arrive while concurrent stages run
        awake: set[int] = set()
        while self.events and self.events[0][0] <= self.now:
            _, _, i, kind, is_task = heapq.heappop(self.events)
            if not is_task:
                (self.can_f if kind == "F" else self.can_b)[i] += 1
                awake.add(self.places[i])
                continue
            self.running[self.places[i]] = None
            self.busy -= 1
            awake.add(self.places[i])
            if kind == "B":
                self.can_w[i] += self.work.split
            if kind != "W":
                if self._ends_jointly(i, kind):
                    self.ends.append(((i, kind, (self.f if kind == "F" else self.b)[i] - 1), self.now + self.transfer))
                else:
                    awake.update(self._hand_on(i, kind, self.transfer))
        return sorted(awake)

    def _hand_on(self, i: int, kind: Kind, transfer: float) -> list[int]:
        """Pass the result of F or B to the task that needs it. Return that task's IPU if the result arrives at once."""
        if kind == "F":
            j, needs = (i + 1, "F") if i + 1 < len(self.places) else (i, "B")
        else:
            j, needs = i - 1, "B"
        if j < 0:
            return []
        if transfer and self.places[j] != self.places[i]:
            self._post(self.now + transfer, j, needs, False)
            return []
        (self.can_f if needs == "F" else self.can_b)[j] += 1
        return [self.places[j]]

    def _run_concurrent_stages(self) -> int:
        """Run the concurrent stages that tasks wait for, and return the number of tasks that begin then."""
        work = self.work
        self.now = max([self.now, *(since for _, since in self.ends)])
        for (i, kind, _), _ in self.ends:
            self.now += work.head if kind == "F" else work.joint_backward[i]
        self.order.append(Joint(tuple(task for task, _ in self.ends)))
        for (i, kind, _), _ in self.ends:
            # the result comes from concurrent stages, so it is on every IPU already
            self._hand_on(i, kind, 0.0)
        for i in self.entries:
            self.now += work.joint_forward[i]
        entries, self.ends, self.entries = self.entries, [], []
        for i in entries:
            self._start(i, "F")
        return len(entries)


def earliest_ticks(order: Order, work: Work) -> dict[Local, int]:
    """Return, per task, the earliest tick in which its IPU is free and its inputs have arrived.

    A tick in which concurrent stages run separates the tasks that began before them from those that began after them.
    """
    line = work.line
    ticks: dict[Local, int] = {}
    free = dict.fromkeys(line.on, 0)
    for task in order:
        if isinstance(task, Joint):
            last = max(free.values()) - 1
            for end in task.ends:
                ticks[end] = last
            free = dict.fromkeys(line.on, last + 1)
            continue
        ipu = line.places[task[0]]
        ticks[task] = max([free[ipu], *(ticks[source] + 1 for source in line.inputs(task))])
        free[ipu] = ticks[task] + 1
    return ticks
