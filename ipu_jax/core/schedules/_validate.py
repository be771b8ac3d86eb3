"""Validate a timetable against the clock, and name the first wrong task.

The engine runs only timetables that pass these checks, in this order:

    shape       there is a tick for each stage and micro-batch, and stages are on IPUs that exist
    together    the stages of a segment share their ticks; a head does F and B in one tick; under the one-phase clock an
                IPU does one segment's task per tick
    inputs      the inputs of a task were computed before, and have had time to arrive
    messages    each boundary's messages are used in the order in which they were sent
    slots       stash, cut and inbox are rings, slot = micro-batch modulo depth: no slot is written before it is free

The checks compare whole rows of moments at once (`lifetimes`).
"""

import operator
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from ipu_jax.base.checks import check_choice, check_count
from ipu_jax.core.schedules._timetable import (
    CLOCKS,
    Kind,
    Task,
    Timetable,
    last_use,
    phase,
    segments_of,
    tables_of,
    tick_of,
)
from ipu_jax.core.schedules.lifetimes import Lifetimes, Spans

_KINDS = {"F": "forward", "B": "backward", "W": "weight"}
_LATEST = 1 << 32  # no engine runs this many ticks, and moments are 64-bit numbers


def validate(table: Timetable) -> None:
    """Check a timetable.

    Raises:
        ValueError: a check fails. The message names the IPU, tick and task, what is wrong, and how to mend it.
    """
    _check_shape(table)
    _check_together(table)
    lifetimes = Lifetimes(table)
    if table.clock == "one-phase":
        _check_one_task_a_tick(lifetimes)
    _check_inputs(lifetimes)
    for boundary in range(len(table.placement) - 1):
        _check_messages(lifetimes, boundary, "F")
        _check_messages(lifetimes, boundary, "B")
    for stage in range(len(table.placement)):
        _check_ring(table, lifetimes.stash(stage), "stash", (stage, "F"), (stage, last_use(table, stage)))
        _check_ring(table, lifetimes.weight_residuals(stage), "cut", (stage, "B"), (stage, "W"))


def _refuse(table: Timetable, task: Task, why: str) -> NoReturn:
    ipu = table.placement[task.stage]
    where = "all IPUs" if ipu is None else f"IPU {ipu}"
    raise ValueError(f"schedule {table.name!r}: {where}, tick {tick_of(table, task)}, {task}: {why}")


def _check_shape(table: Timetable) -> None:
    name, stages = table.name, len(table.placement)
    if not isinstance(name, str) or not name or name != " ".join(name.split()):
        raise ValueError(f"name={name!r} cannot be in a header: give one line, with single spaces between words")
    check_choice("clock", table.clock, CLOCKS)
    check_count("ipus", table.ipus)
    count = len(table.forward[0]) if table.forward else 0
    if stages == 0 or count == 0:
        raise ValueError(f"schedule {name!r} is empty: give at least one stage and one micro-batch")
    for kind, rows in tables_of(table):
        if len(rows) != stages or any(len(row) != count for row in rows):
            raise ValueError(
                f"schedule {name!r}: the {_KINDS[kind]} table must be {stages} stages x {count} micro-batches"
            )
    for stage, ipu in enumerate(table.placement):
        if ipu is not None and not 0 <= ipu < table.ipus:
            raise ValueError(f"stage {stage} is on IPU {ipu}, outside the replica: it has IPUs 0 to {table.ipus - 1}")
    if table.weight is not None and all(ipu is None for ipu in table.placement):
        raise ValueError(f"schedule {name!r}: concurrent stages have no W, and there are no others: give weight=None")
    for kind, rows in tables_of(table):
        for stage, row in enumerate(rows):
            if min(row) < 0:
                _refuse(table, Task(stage, kind, row.index(min(row))), "there is no such tick: the first is tick 0")
            if max(row) > _LATEST:
                why = f"there is no such tick: the last is tick {_LATEST}, leave out ticks without tasks"
                _refuse(table, Task(stage, kind, row.index(max(row))), why)
            if len(set(row)) < count and (kind != "W" or table.placement[stage] is not None):
                twice = next(m for m in range(count) if row[m] in row[:m])
                first = Task(stage, kind, row.index(row[twice]))
                why = f"{first} has this tick, and a stage does {kind} of one micro-batch a tick: move one of them"
                _refuse(table, Task(stage, kind, twice), why)


def _check_together(table: Timetable) -> None:
    for stages in segments_of(table.placement):
        for kind, rows in tables_of(table):
            for stage in stages[1:]:
                if rows[stage] != rows[stages[0]]:
                    m = next(m for m, tick in enumerate(rows[stage]) if tick != rows[stages[0]][m])
                    why = f"its neighbour's {Task(stages[0], kind, m)} runs in tick {rows[stages[0]][m]}, and "
                    why += "neighbouring stages of one place run as one: give both the same tick"
                    _refuse(table, Task(stage, kind, m), why)
    for stage, ipu in enumerate(table.placement):
        if ipu is not None:
            continue
        is_head = phase(table, stage, "F") == "head"
        for m, tick in enumerate(table.backward[stage]):
            if is_head and tick != table.forward[stage][m]:
                why = f"{Task(stage, 'F', m)} runs in tick {table.forward[stage][m]}, and the concurrent stages at the "
                why += "end do F and B in one tick: give both the same tick"
                _refuse(table, Task(stage, "B", m), why)
            if table.weight is not None and table.weight[stage][m] != tick:
                why = f"a concurrent stage has no W, its B in tick {tick} does everything: repeat that tick"
                _refuse(table, Task(stage, "W", m), why)


def _check_one_task_a_tick(lifetimes: Lifetimes) -> None:
    table, count = lifetimes.table, len(lifetimes.table.forward[0])
    shared: list[tuple[int, Task, Task]] = []  # per IPU, the first time that a task shares the tick of another task
    for ipu in lifetimes.stages_of.keys() - {None}:
        own = [stages[0] for stages in segments_of(table.placement) if table.placement[stages[0]] == ipu]
        rows: list[tuple[int, Kind]] = [(stage, kind) for stage in own for kind, _ in tables_of(table)]
        at = np.concatenate([lifetimes.at(*row) for row in rows])
        in_order = at.argsort(kind="stable")
        ticks = at[in_order] // lifetimes.per_tick
        for k in np.flatnonzero(ticks[1:] == ticks[:-1])[:1]:
            first, second = (Task(*rows[n // count], microbatch=n % count) for n in in_order[k : k + 2].tolist())
            shared.append((int(at[in_order[k + 1]]), second, first))
    if shared:
        _, task, other = min(shared, key=operator.itemgetter(0))
        why = f"the IPU does {other} in this tick, and under the one-phase clock one task a tick: move one of them"
        _refuse(table, task, why)


def _check_inputs(lifetimes: Lifetimes) -> None:
    table, per_tick = lifetimes.table, lifetimes.per_tick
    late: list[tuple[int, Task, Task, int]] = []  # when a task runs, the task, its source, and when that is ready
    for stage in range(len(table.placement)):
        for kind, _ in tables_of(table):
            for source, source_kind in sources(table, stage, kind):
                is_message = table.placement[source] != table.placement[stage]
                ready = (lifetimes.sent if is_message else lifetimes.at)(source, source_kind)
                at = lifetimes.at(stage, kind)
                wrong = np.flatnonzero(at <= ready)
                if len(wrong):
                    m = int(wrong[at[wrong].argmin()])
                    late.append((int(at[m]), Task(stage, kind, m), Task(source, source_kind, m), int(ready[m])))
    if late:
        runs, task, source, ready = min(late, key=lambda one: (one[0], one[1].microbatch))
        here, there = table.placement[task.stage], table.placement[source.stage]
        wait = ", and a message between IPUs takes until the next tick" * (None not in (here, there) and here != there)
        # under the one-phase clock the IPU that does both needs a tick for each
        later = runs % per_tick <= ready % per_tick or (source.stage == task.stage and table.clock == "one-phase")
        tick = ready // per_tick
        why = f"it needs {source}, which runs in tick {tick}{wait}: move it to tick {tick + later} or later"
        _refuse(table, task, why)


def sources(table: Timetable, stage: int, kind: Kind) -> Iterator[tuple[int, Kind]]:
    """Yield the stage and kind of each task whose result a task of the same micro-batch uses."""
    if kind == "F" and stage > 0:
        yield stage - 1, "F"
    if kind == "B":
        yield stage, "F"
        if stage + 1 < len(table.placement):
            yield stage + 1, "B"
    if kind == "W" and table.placement[stage] is not None:  # a concurrent stage has no W
        yield stage, "B"


def _check_messages(lifetimes: Lifetimes, boundary: int, kind: Kind) -> None:
    spans, table = lifetimes.inbox(boundary, kind), lifetimes.table
    source, target = (boundary, boundary + 1) if kind == "F" else (boundary + 1, boundary)
    in_order = spans.starts.argsort()
    sent_at, used_at = spans.starts[in_order], spans.ends[in_order]
    crosses = used_at[1:] < used_at[:-1]
    overwrites = (sent_at[1:] < used_at[:-1]) & (table.clock == "two-phase")
    for k in np.flatnonzero(crosses | overwrites)[:1]:
        m, following = in_order[k : k + 2].tolist()
        first, second = Task(source, kind, m), Task(source, kind, following)
        use = Task(target, kind, m)
        if crosses[k]:
            why = f"the messages cross: {first} (tick {tick_of(table, first)}) was sent before {second} "
            why += f"(tick {tick_of(table, second)}), but {use} comes only in tick {tick_of(table, use)}: "
            why += "use them in the order in which they are sent"
            _refuse(table, Task(target, kind, following), why)
        why = f"it overwrites the message of {first} before {use} in tick {tick_of(table, use)} has "
        why += "used it, and under the two-phase clock none may wait: move one of them, or give clock='one-phase'"
        _refuse(table, second, why)
    _check_ring(table, spans, "inbox", (source, kind), (target, kind))


def _check_ring(table: Timetable, spans: Spans, ring: str, writer: tuple[int, Kind], reader: tuple[int, Kind]) -> None:
    """Check that no slot is written before it is free.

    Args:
        table: the timetable.
        spans: per micro-batch, the span in which it has its slot.
        ring: the name of the ring.
        writer, reader: the stage and kind of the tasks that write a slot, and of the tasks that read it last.
    """
    depth, count = spans.depth(), len(spans.starts)
    if (spans.starts[depth:] > spans.ends[: count - depth]).all() and (np.diff(spans.starts) > 0).all():
        return
    for slot in range(depth):
        mine = np.arange(slot, count, depth)
        mine = mine[spans.starts[mine].argsort()]
        for k in np.flatnonzero(spans.starts[mine[1:]] <= spans.ends[mine[:-1]])[:1]:
            read = Task(*reader, int(mine[k]))
            why = f"it writes slot {slot} of {depth} of the {ring} before {read} in tick "
            why += f"{tick_of(table, read)} has freed it: run the micro-batches in order"
            _refuse(table, Task(*writer, int(mine[k + 1])), why)
