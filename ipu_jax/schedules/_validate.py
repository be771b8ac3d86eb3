"""Validate a timetable against the clock, and name the task that is wrong.

The engine runs only timetables that pass these checks, which are made in this order:

    shape       there is a tick for each stage and micro-batch, and stages are on IPUs that exist
    together    the stages of a segment share their ticks; a head does F and B in one tick; under the one-phase clock an
                IPU does one segment's task per tick
    inputs      the inputs of a task were computed before, and had the time to arrive
    messages    each boundary's messages are used in the order in which they were sent
    slots       stash, cut and inbox are rings, slot = micro-batch modulo depth: no slot is written before it is free
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NoReturn

from ipu_jax._checks import check_choice, check_count
from ipu_jax.schedules._timetable import (
    CLOCKS,
    Kind,
    Moment,
    Task,
    Timetable,
    inbox_spans,
    last_use,
    moment,
    overlap,
    phase,
    segments_of,
    sent,
    stash_spans,
    tables_of,
    tasks_of,
    tick_of,
    weight_residual_spans,
)

_KINDS = {"F": "forward", "B": "backward", "W": "weight"}


def validate(table: Timetable) -> None:
    """Check a timetable.

    Raises:
        ValueError: for the first violation. The message names IPU, tick and task, what is wrong, and how to mend it.
    """
    _check_shape(table)
    _check_together(table)
    if table.clock == "one-phase":
        _check_one_task_a_tick(table)
    for task in tasks_of(table):
        _check_inputs(table, task)
    for boundary in range(len(table.placement) - 1):
        _check_messages(table, boundary, "F")
        _check_messages(table, boundary, "B")
    for stage in range(len(table.placement)):
        _check_slots(table, stage)


def _refuse(table: Timetable, task: Task, why: str) -> NoReturn:
    ipu = table.placement[task.stage]
    where = "all IPUs" if ipu is None else f"IPU {ipu}"
    raise ValueError(f"schedule {table.name!r}: {where}, tick {tick_of(table, task)}, {task}: {why}")


def _check_shape(table: Timetable) -> None:
    name, stages = table.name, len(table.placement)
    if not isinstance(name, str) or not name or name != " ".join(name.split()):
        raise ValueError(f"name={name!r} cannot stand in a header: give one line, words apart by one blank")
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
    if table.weight is not None and table.clock == "two-phase":
        raise ValueError(f"schedule {name!r}: the two-phase clock has no phase for W: give clock='one-phase'")
    if table.weight is not None and all(ipu is None for ipu in table.placement):
        raise ValueError(f"schedule {name!r}: concurrent stages have no W, and there are no others: give weight=None")
    for kind, rows in tables_of(table):
        for stage, row in enumerate(rows):
            if min(row) < 0:
                _refuse(table, Task(stage, kind, row.index(min(row))), "there is no such tick: the first is tick 0")
            if len(set(row)) < count and (kind != "W" or table.placement[stage] is not None):
                twice = next(m for m in range(count) if row[m] in row[:m])
                first = Task(stage, kind, row.index(row[twice]))
                _refuse(
                    table,
                    Task(stage, kind, twice),
                    f"{first} has this tick, and a stage does {kind} of one micro-batch a tick: move one of them",
                )


def _check_together(table: Timetable) -> None:
    for stages in segments_of(table.placement):
        for kind, rows in tables_of(table):
            for stage in stages[1:]:
                for m, tick in enumerate(rows[stage]):
                    if tick != rows[stages[0]][m]:
                        _refuse(
                            table,
                            Task(stage, kind, m),
                            f"its neighbour's {Task(stages[0], kind, m)} runs in tick {rows[stages[0]][m]}, and "
                            "neighbouring stages of one place run as one: give both the same tick",
                        )
    for stage, ipu in enumerate(table.placement):
        if ipu is not None:
            continue
        for m, tick in enumerate(table.backward[stage]):
            if phase(table, stage, "F") == "head" and tick != table.forward[stage][m]:
                _refuse(
                    table,
                    Task(stage, "B", m),
                    f"{Task(stage, 'F', m)} runs in tick {table.forward[stage][m]}, and the concurrent stages at the "
                    "end do F and B in one tick: give both the same tick",
                )
            if table.weight is not None and table.weight[stage][m] != tick:
                _refuse(
                    table,
                    Task(stage, "W", m),
                    f"a concurrent stage has no W, its B in tick {tick} does everything: repeat that tick",
                )


def _check_one_task_a_tick(table: Timetable) -> None:
    busy: dict[tuple[int, int], Task] = {}
    firsts = {stage: stages[0] for stages in segments_of(table.placement) for stage in stages}
    for task in tasks_of(table):
        ipu = table.placement[task.stage]
        if ipu is None:
            continue
        mine = Task(firsts[task.stage], task.kind, task.microbatch)
        other = busy.setdefault((ipu, tick_of(table, task)), mine)
        if other != mine:
            _refuse(
                table,
                task,
                f"the IPU does {other} in this tick, and under the one-phase clock one task a tick: move one of them",
            )


def _check_inputs(table: Timetable, task: Task) -> None:
    for source in sources(table, task):
        is_message = table.placement[source.stage] != table.placement[task.stage]
        ready = sent(table, source) if is_message else moment(table, source)
        if moment(table, task) > ready:
            continue
        between = is_message and table.placement[source.stage] is not None and table.placement[task.stage] is not None
        why = ", and a message between IPUs takes until the next tick" if between else ""
        # under the one-phase clock the IPU that does both needs a tick for each
        later = moment(table, task)[1:] <= ready[1:] or (source.stage == task.stage and table.clock == "one-phase")
        _refuse(
            table,
            task,
            f"it needs {source}, which runs in tick {ready[0]}{why}: move it to tick {ready[0] + later} or later",
        )


def sources(table: Timetable, task: Task) -> Iterator[Task]:
    """Yield the tasks whose results a task uses."""
    stage, m = task.stage, task.microbatch
    if task.kind == "F" and stage > 0:
        yield Task(stage - 1, "F", m)
    if task.kind == "B":
        yield Task(stage, "F", m)
        if stage + 1 < len(table.placement):
            yield Task(stage + 1, "B", m)
    if task.kind == "W":
        yield Task(stage, "B", m)


def _check_messages(table: Timetable, boundary: int, kind: Kind) -> None:
    spans = inbox_spans(table, boundary, kind)
    if not spans:
        return
    source, target = (boundary, boundary + 1) if kind == "F" else (boundary + 1, boundary)
    in_order = sorted(range(len(spans)), key=lambda m: spans[m])
    for m, following in itertools.pairwise(in_order):
        first, second = Task(source, kind, m), Task(source, kind, following)
        if spans[following][1] < spans[m][1]:
            _refuse(
                table,
                Task(target, kind, following),
                f"the messages cross: {first} (tick {spans[m][0][0]}) was sent before {second} "
                f"(tick {spans[following][0][0]}), but {Task(target, kind, m)} comes only in tick {spans[m][1][0]}: "
                "use them in the order in which they are sent",
            )
        if table.clock == "two-phase" and spans[following][0] < spans[m][1]:
            _refuse(
                table,
                second,
                f"it overwrites the message of {first} before {Task(target, kind, m)} in tick {spans[m][1][0]} has "
                "used it, and under the two-phase clock none may wait: move one of them, or give clock='one-phase'",
            )
    _check_ring(table, spans, "inbox", lambda m: Task(source, kind, m), lambda m: Task(target, kind, m))


def _check_slots(table: Timetable, stage: int) -> None:
    last = last_use(table, stage)
    _check_ring(
        table, stash_spans(table, stage), "stash", lambda m: Task(stage, "F", m), lambda m: Task(stage, last, m)
    )
    if last == "W":
        _check_ring(
            table,
            weight_residual_spans(table, stage),
            "cut",
            lambda m: Task(stage, "B", m),
            lambda m: Task(stage, "W", m),
        )


def _check_ring(
    table: Timetable,
    spans: list[tuple[Moment, Moment]],
    ring: str,
    writer: Callable[[int], Task],
    reader: Callable[[int], Task],
) -> None:
    depth = overlap(spans)
    for slot in range(depth):
        mine = sorted(range(slot, len(spans), depth), key=lambda m: spans[m])
        for m, following in itertools.pairwise(mine):
            if spans[following][0] <= spans[m][1]:
                _refuse(
                    table,
                    writer(following),
                    f"it writes slot {slot} of {depth} of the {ring} before {reader(m)} in tick {spans[m][1][0]} has "
                    "freed it: run the micro-batches in order",
                )
