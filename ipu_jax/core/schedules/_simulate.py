"""Simulate a timetable whose tasks take time: makespan, bubble and peak stash.

Each IPU runs its own tasks in the table's order, each as soon as the IPU is free and its inputs have arrived. The ticks
themselves do not matter, except under `lockstep`. Then all IPUs wait for each other at the end of each tick in which
one IPU sends to another, as in the collectives of the engine. Under the two-phase clock its messages travel while the
next tasks run. Under the one-phase clock the next tick needs them, so such a tick is longer by the time of a message.

The tests check this simulator against published closed forms, for S local stages on S IPUs and M micro-batches. F, B
and W are the times of one IPU's whole share of the model for one micro-batch. B does not include W if there is W:

    sequential     makespan S M (F+B)                        bubble 1 - 1/S                Graphcore "sharded execution"
    grouped        makespan (M+S-1) (F+B)                    bubble (S-1) / (M+S-1)        Graphcore "grouped"
    grouped-zb     makespan M (F+B+W) + (S-1) (F+B-W)        for M >= S; F = B = W         as zb-h1
                   in lockstep M (F+B+W) + (S-1) (F+B)       for any M, F, B and W
    interleaved    makespan (M+S-1) (F+B)                    bubble (S-1) / (M+S-1)        Graphcore "interleaved"
    gpipe          makespan (M+S-1) (F+B)                    bubble (S-1) / (M+S-1)        Huang et al. 2019
    1f1b           makespan (M+S-1) (F+B)                    bubble (S-1) / (M+S-1)        Narayanan et al. 2021, 2.2
    looped         makespan (M+(S-1)/R) (F+B), R rounds      bubble (S-1) / (R M + S-1)    Narayanan et al. 2021, 2.2
    zb-h1          makespan M (F+B+W) + (S-1) (F+B-W)        for M >= S                    Qi et al. 2023, table 2
    zbv            makespan M (F+B+W) + (S-1) F/2, or a little more: F = B = W, M >= S     Qi et al. 2024, section 4
    zb-wave        makespan M (F+B+W) + (S-1) F/R for even R; F = B = W, M >= S            the bound of any order
    looped-zb      the same for any R                                                      the bound of any order
    looped-bfs     as looped, where M >= S                                                 Lamy-Poirier 2022, 4.2
    dualpipev      makespan M (F+B+W) + (S-1) F/2, or a little more: F = B = W, M >= 2S    DeepSeek-AI 2024, 3.2.1

No order can be shorter than M (F+B+W) + (S-1) F/R, with R stages on each of S IPUs: the last IPU waits for S-1 F of a
stage, and then has all its own work to do.

Huang: arXiv:1811.06965. Narayanan: arXiv:2104.04473. Lamy-Poirier: arXiv:2211.05953. Qi: arXiv:2401.10241 and
arXiv:2405.15362. DeepSeek-AI: arXiv:2412.19437. Graphcore: "Multi-IPU Programming Overview", pipelined execution.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipu_jax.base.checks import check_cost
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.schedules._timetable import Kind, Task, Timetable, last_use, segments_of, tables_of, tasks_of
from ipu_jax.core.schedules._validate import sources
from ipu_jax.core.schedules.lifetimes import Lifetimes, Spans

Cost = float | Sequence[float]


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """The result of simulating one weight update.

    Attributes:
        makespan: time from the start of the first task to the end of the last task.
        bubble: the share of the IPUs' time in which they were idle.
        peak_stash: per IPU, the largest number of pairs of stage and micro-batch that it held at once, each from F
            until the last use (W, or B if there is no W). A stage of a looped pipeline is only a fraction of its IPU's
            share, so each of its pairs takes only a fraction of the memory.
        busy: per IPU, the time in which it worked.
        start_times, end_times: per task, when it started and ended.
    """

    makespan: float
    bubble: float
    peak_stash: tuple[int, ...]
    busy: tuple[float, ...]
    start_times: Mapping[Task, float]
    end_times: Mapping[Task, float]

    def _shown(self) -> list[str | Table]:
        rows = [("IPU", "busy", "share", "peak stash")]
        for ipu, (busy, stash) in enumerate(zip(self.busy, self.peak_stash, strict=True)):
            share = f"{busy / self.makespan:.1%}" if self.makespan else "-"
            rows.append((str(ipu), f"{busy:.6g}", share, str(stash)))
        return [f"makespan {self.makespan:.6g}, bubble {self.bubble:.1%}, {len(self.start_times)} tasks", Table(rows)]


class TaskTimes(Mapping[Task, float]):
    """A time per task, in the order of the clock. Kept as an array: (kinds, stages, micro-batches)."""

    def __init__(self, table: Timetable, times: NDArray[np.float64]):
        self._table, self._times = table, times
        self._number = {kind: k for k, (kind, _) in enumerate(tables_of(table))}

    def __getitem__(self, task: Task) -> float:
        _, stages, count = self._times.shape
        number = self._number.get(task.kind) if isinstance(task, Task) else None
        if number is None or not (0 <= task.stage < stages and 0 <= task.microbatch < count):
            raise KeyError(task)
        if task.kind == "W" and self._table.placement[task.stage] is None:
            raise KeyError(task)
        return float(self._times[number, task.stage, task.microbatch])

    def __iter__(self) -> Iterator[Task]:
        return iter(tasks_of(self._table))

    def __len__(self) -> int:
        kinds, _, count = self._times.shape
        joint = self._table.placement.count(None) if "W" in self._number else 0
        return (kinds * len(self._table.placement) - joint) * count

    def __repr__(self) -> str:
        return f"TaskTimes of {len(self)} tasks"


def simulate(
    table: Timetable, forward: Cost, backward: Cost, weight: Cost | None, transfer: float, *, lockstep: bool
) -> Simulation:
    """Simulate a table; `Schedule.simulate` documents the arguments."""
    costs = _costs_of(table, forward, backward, weight)
    lifetimes = Lifetimes(table)
    transfer = check_cost("transfer", transfer)
    tasks = _Tasks(lifetimes, costs, transfer)
    count = len(table.forward[0])
    free, busy = np.zeros(table.ipus), np.zeros(table.ipus)
    # one more row: the source of a task without a second source, or without any
    starts, ends = np.zeros((2, (len(tasks.costs) + 1) * count))
    exchanges = _exchanges(lifetimes) if lockstep else []
    # in the order of the clock a task comes after its inputs, and after the earlier tasks of its IPU
    for phase, together in tasks.groups():
        while exchanges and exchanges[-1] < phase // lifetimes.phases:
            exchanges.pop()
            free[:] = free.max() + (transfer if table.clock == "one-phase" else 0.0)
        row, m = np.divmod(together, count)
        who = tasks.ipus[row]
        is_joint = who[0] < 0
        start = free.max(keepdims=True) if is_joint else free[who]
        for source, delay in zip(tasks.sources, tasks.delays, strict=True):
            sent = ends[source[row] * count + m]
            # in lockstep all IPUs wait for the broadcast, which begins a concurrent stage's task
            start = np.maximum(start, (np.maximum(sent, free.max()) if is_joint and lockstep else sent) + delay[row])
        starts[together] = start
        ends[together] = end = start + tasks.costs[row]
        if is_joint:
            free[:] = end
            busy += tasks.costs[row]
        else:
            free[who] = end
            busy[who] += tasks.costs[row]
    makespan = float(ends.max())
    shape, of = (-1, len(table.placement), count), lifetimes.stages_of
    return Simulation(
        makespan=makespan,
        bubble=1.0 - sum(busy.tolist()) / (table.ipus * makespan) if makespan else 0.0,
        peak_stash=tuple(_peak(lifetimes, [*of.get(ipu, []), *of.get(None, [])]) for ipu in range(table.ipus)),
        busy=tuple(busy.tolist()),
        start_times=TaskTimes(table, starts[:-count].reshape(shape)),
        end_times=TaskTimes(table, ends[:-count].reshape(shape)),
    )


def _exchanges(lifetimes: Lifetimes) -> list[int]:
    """Return the ticks in which a local stage sends to a local stage on another IPU, the last tick first."""
    found = [np.zeros(0, np.int64)]
    for stage, (here, there) in enumerate(itertools.pairwise(lifetimes.table.placement)):
        if None not in (here, there) and here != there:
            found += [lifetimes.ticks(stage, "F"), lifetimes.ticks(stage + 1, "B")]
    return np.unique(np.concatenate(found))[::-1].tolist()


class _Tasks:
    """The tasks of a table by row. The row of F, B or W of a stage is the number of the kind x stages + the stage.

    Attributes:
        ipus: per row, the IPU, or -1 if the stage is concurrent.
        costs: per row, the cost of a task.
        sources: per row, the row of the task that a task waits for, and the row of a second such task; the row after
            the last row if there is none.
        delays: per row and source, the time that the message takes.
    """

    def __init__(self, lifetimes: Lifetimes, costs: dict[str, list[float]], transfer: float):
        table = lifetimes.table
        self._lifetimes = lifetimes
        self._kinds: list[Kind] = [kind for kind, _ in tables_of(table)]
        stages = len(table.placement)
        rows = len(self._kinds) * stages
        self.costs = np.array([cost for kind in self._kinds for cost in costs[kind]])
        self.ipus = np.array([-1 if ipu is None else ipu for ipu in table.placement] * len(self._kinds))
        self.sources = np.full((2, rows), rows)
        self.delays = np.zeros((2, rows))
        for row in range(rows):
            k, stage = divmod(row, stages)
            for nth, (source, kind) in enumerate(sources(table, stage, self._kinds[k])):
                self.sources[nth, row] = self._kinds.index(kind) * stages + source
                there = table.placement[source]
                crosses = there is not None and there != table.placement[stage] and table.ipus > 1
                self.delays[nth, row] = transfer if crosses else 0.0

    def groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield groups of tasks that do not wait for each other, each group with the number of its phase.

        A group has at most one task per IPU, or one task of a concurrent stage, which all IPUs run.
        """
        table, count = self._lifetimes.table, len(self._lifetimes.table.forward[0])
        stages, turns = len(table.placement), self._turns()
        keys = np.empty((len(self._kinds), stages, count), np.int64)
        for k, kind in enumerate(self._kinds):
            for stage in range(stages):
                phase = self._lifetimes.at(stage, kind) // self._lifetimes.turns
                keys[k, stage] = phase * self._lifetimes.turns + turns[k][stage]
        in_order = keys.reshape(-1).argsort(kind="stable")
        if "W" in self._kinds and None in table.placement:
            row = in_order // count
            in_order = in_order[(self.ipus[row] >= 0) | (row < 2 * stages)]  # a concurrent stage has no W
        keys = keys.reshape(-1)[in_order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
        for begin, end in zip(begins, [*begins[1:], len(keys)], strict=True):
            yield int(keys[begin]) // self._lifetimes.turns, in_order[begin:end]

    def _turns(self) -> list[list[int]]:
        """Return, per kind and stage, the turn of its task among the tasks of its IPU in a phase."""
        table = self._lifetimes.table
        if table.clock == "one-phase":  # an IPU runs one segment
            together = [
                list(stages) for stages in segments_of(table.placement) if table.placement[stages[0]] is not None
            ]
        else:
            together = [stages for ipu, stages in self._lifetimes.stages_of.items() if ipu is not None]
        last = len(table.placement) - 1
        # concurrent stages have turns of their own, since each of their tasks takes all IPUs
        forward = list(range(last + 1))
        backward = [2 * last + 1 - stage for stage in forward]
        for stages in together:
            for nth, stage in enumerate(stages):
                forward[stage], backward[stage] = nth, len(stages) - 1 - nth
        return [forward, backward, backward][: len(self._kinds)]


def _costs_of(table: Timetable, forward: Cost, backward: Cost, weight: Cost | None) -> dict[str, list[float]]:
    """Return the cost of each stage's F, B and W to one IPU that runs it."""
    f, whole = _per_stage(table, "forward", forward), _per_stage(table, "backward", backward)
    w = [cost / 2 for cost in whole] if weight is None else _per_stage(table, "weight", weight)
    for stage, (part, total) in enumerate(zip(w, whole, strict=True)):
        if part > total:
            raise ValueError(
                f"weight={weight!r} costs stage {stage} more than backward={backward!r}, of which it is a part: "
                "backward is the whole backward pass"
            )
    b = [
        total - part if last_use(table, stage) == "W" else total
        for stage, (total, part) in enumerate(zip(whole, w, strict=True))
    ]
    return {"F": f, "B": b, "W": w}


def _per_stage(table: Timetable, name: str, cost: Any) -> list[float]:
    stages = len(table.placement)
    if isinstance(cost, Iterable) and not isinstance(cost, (str, Mapping)) and getattr(cost, "shape", None) != ():
        costs = list(cost)
        if len(costs) != stages:
            raise ValueError(f"{name} has {len(costs)} costs for {stages} stages: give a number, or one for each stage")
        of_stages = [check_cost(f"{name}[{stage}]", value) for stage, value in enumerate(costs)]
    else:
        of_share = check_cost(name, cost)
        share = Counter(table.placement)
        # a number is the cost of one IPU's whole share of the model, and of a concurrent stage on all IPUs together
        of_stages = [of_share / (1 if ipu is None else share[ipu]) for ipu in table.placement]
    return [value / (table.ipus if ipu is None else 1) for value, ipu in zip(of_stages, table.placement, strict=True)]


def _peak(lifetimes: Lifetimes, stages: list[int]) -> int:
    """Return the largest number of pairs of stage and micro-batch that are held at once."""
    spans = [lifetimes.stash(stage) for stage in stages]
    return Spans(*map(np.concatenate, zip(*spans, strict=True))).depth() if spans else 0
