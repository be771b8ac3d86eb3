"""Simulate a timetable whose tasks take time: makespan, bubble and peak stash.

Each IPU runs its own tasks in the table's order, each as soon as the IPU is free and its inputs have arrived. The ticks
themselves do not matter, except under `lockstep`: then all IPUs wait for each other at the end of each tick in which
one IPU sends to another, as they do in the collectives of the engine.

The tests hold this simulator to published closed forms, for S local stages on S IPUs and M micro-batches. F, B and W
are the times of one IPU's whole share of the model for one micro-batch; if a schedule has W, B does not include it:

    sequential     makespan S M (F+B)                        bubble 1 - 1/S                Graphcore "sharded execution"
    grouped        makespan (M+S-1) (F+B)                    bubble (S-1) / (M+S-1)        Graphcore "grouped"
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
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ipu_jax._checks import check_cost
from ipu_jax.schedules._timetable import Task, Timetable, last_use, moment, tasks_of
from ipu_jax.schedules._validate import sources

Cost = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of simulating one weight update.

    Attributes:
        makespan: time from the first task's start to the last one's end.
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


def simulate(
    table: Timetable, forward: Cost, backward: Cost, weight: Cost | None, transfer: float, *, lockstep: bool
) -> Simulation:
    """Simulate a table; `Schedule.simulate` documents the arguments."""
    costs = _costs_of(table, forward, backward, weight)
    transfer = check_cost("transfer", transfer)
    free = [0.0] * table.ipus
    busy = [0.0] * table.ipus
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    exchanges = sorted(_exchanges(table), reverse=True) if lockstep else []
    # in the order of the clock a task comes after its inputs, and after the earlier tasks of its IPU
    for task in tasks_of(table):
        while exchanges and exchanges[-1] < moment(table, task)[0]:
            exchanges.pop()
            free = [max(free)] * table.ipus
        here = table.placement[task.stage]
        who = range(table.ipus) if here is None else (here,)
        start = max(free[k] for k in who)
        for source in sources(table, task):
            there = table.placement[source.stage]
            crosses = there is not None and there != here and table.ipus > 1
            start = max(start, ends[source] + (transfer if crosses else 0.0))
        cost = costs[task.kind][task.stage]
        starts[task], ends[task] = start, start + cost
        for k in who:
            free[k] = start + cost
            busy[k] += cost
    makespan = max(ends.values())
    return Simulation(
        makespan=makespan,
        bubble=1.0 - sum(busy) / (table.ipus * makespan) if makespan else 0.0,
        peak_stash=_peak_stash(table),
        busy=tuple(busy),
        start_times=MappingProxyType(starts),
        end_times=MappingProxyType(ends),
    )


def _exchanges(table: Timetable) -> set[int]:
    """Return the ticks in which an IPU sends to another: a local stage, to a local stage elsewhere."""
    found: set[int] = set()
    for stage, (here, there) in enumerate(itertools.pairwise(table.placement)):
        if None not in (here, there) and here != there:
            found.update(table.forward[stage], table.backward[stage + 1])
    return found


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
        # a number is the cost of one IPU's whole share of the model, and of a concurrent stage on all IPUs together
        of_stages = [of_share / (1 if ipu is None else table.placement.count(ipu)) for ipu in table.placement]
    return [value / (table.ipus if ipu is None else 1) for value, ipu in zip(of_stages, table.placement, strict=True)]


def _peak_stash(table: Timetable) -> tuple[int, ...]:
    stashed, peak = [0] * table.ipus, [0] * table.ipus
    for task in tasks_of(table):
        here = table.placement[task.stage]
        for k in range(table.ipus) if here is None else (here,):
            stashed[k] += (task.kind == "F") - (task.kind == last_use(table, task.stage))
            peak[k] = max(peak[k], stashed[k])
    return tuple(peak)
