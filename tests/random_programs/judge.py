"""Decide whether a schedule table can run, by playing it. Nothing is shared with the library's own validator.

The rules, from the docstrings of `ipu_jax.core.schedules._timetable` and `_validate`:

    every stage does F and B (and W, if there is one) of every micro-batch; each kind does one micro-batch per tick
    the stages of a segment share their ticks; a head does F and B in one tick; a concurrent stage has no W
    under the one-phase clock an IPU does one segment's task per tick
    a result can be used by other segments after the phase in which it was made, and by the same segment at once
    messages over a boundary are used in the order in which they were sent
    under the two-phase clock a message must be used before the next one comes
    stash (F to the last use), cut (B to W) and inbox (sent to used) are rings: micro-batch m is in slot m modulo the
    largest number that is alive at once, and a slot is never written before it is free
"""

from random_programs.tables import Placement, Table, segments_of

PHASES = {"two-phase": ("entry", "F", "head", "B", "W", "exit"), "one-phase": ("entry", "work", "head", "exit")}
Done = dict[tuple[int, str, int], tuple[int, int, int]]
Lives = dict[tuple[str, int, str], dict[int, list[tuple[int, int, int]]]]


def fault_of(placement: Placement, ipus: int, table: Table) -> str:
    """Return what is wrong with the table, or ""."""
    forward, backward, weight, clock = table
    rows = {"F": forward, "B": backward} | ({} if weight is None else {"W": weight})
    m = len(forward[0])
    if m == 0:
        return "it is empty"
    if weight is not None and all(place is None for place in placement):
        return "W has no place here"
    for kind, of_kind in rows.items():
        if len(of_kind) != len(placement) or any(len(row) != m for row in of_kind):
            return f"{kind} is not {len(placement)} stages x {m} micro-batches"
        for stage, row in enumerate(of_kind):
            if min(row) < 0 or len(set(row)) < m:
                return f"{kind} of stage {stage} has ticks {row}"
    return _together(placement, rows) or _one_task(placement, rows, clock) or _play(placement, rows, clock, m, {})


def depths_of(placement: Placement, table: Table) -> dict[tuple[str, int, str], int]:
    """Return how many micro-batches each ring of a table without a fault holds: ("stash", segment, "") and so on."""
    forward, backward, weight, clock = table
    rows = {"F": forward, "B": backward} | ({} if weight is None else {"W": weight})
    lives: Lives = {}
    assert not _play(placement, rows, clock, len(forward[0]), lives)
    return {ring: _depth(of_ring) for ring, of_ring in lives.items()}


def _together(placement: Placement, rows: dict[str, tuple[tuple[int, ...], ...]]) -> str:
    for segment in segments_of(placement):
        for kind, of_kind in rows.items():
            if len({of_kind[stage] for stage in segment.stages}) > 1:
                return f"the stages {segment.stages} of one segment have several ticks of {kind}"
        stage = segment.stages[0]
        if segment.role == "head" and rows["F"][stage] != rows["B"][stage]:
            return f"the head {segment.stages} does F and B in several ticks"
        if segment.place is None and "W" in rows and rows["W"][stage] != rows["B"][stage]:
            return f"the concurrent stages {segment.stages} have a W"
    return ""


def _one_task(placement: Placement, rows: dict[str, tuple[tuple[int, ...], ...]], clock: str) -> str:
    if clock == "two-phase":
        return ""
    busy: set[tuple[int, int]] = set()
    for segment in segments_of(placement):
        if segment.place is None:
            continue
        for of_kind in rows.values():
            for tick in of_kind[segment.stages[0]]:
                if (segment.place, tick) in busy:
                    return f"IPU {segment.place} has two tasks in tick {tick}"
                busy.add((segment.place, tick))
    return ""


def _play(placement: Placement, rows: dict[str, tuple[tuple[int, ...], ...]], clock: str, m: int, lives: Lives) -> str:
    """Play every task by segment, in the order of the clock, with what the tasks leave in registers and rings.

    `lives` gets the lifetimes of the micro-batches in each ring.
    """
    segments, phases = segments_of(placement), PHASES[clock]
    last = len(segments) - 1
    tasks = []
    for i, segment in enumerate(segments):
        for kind, of_kind in rows.items():
            if kind == "W" and segment.place is None:
                continue
            if segment.role == "local":
                phase = "work" if clock == "one-phase" else kind
            else:
                phase = "head" if segment.role == "head" else "entry" if kind == "F" else "exit"
            for micro_batch, tick in enumerate(of_kind[segment.stages[0]]):
                tasks.append((tick, phases.index(phase), "FBW".index(kind), i, kind, micro_batch))
    done: Done = {}
    # for each boundary and direction: the micro-batches sent but not yet used, oldest first; and each message's
    # lifetime
    waiting: dict[tuple[int, str], list[int]] = {(b, kind): [] for b in range(last) for kind in "FB"}
    sent: list[tuple[int, str, int]] = []
    now = (-1, -1)
    for tick, phase, turn, i, kind, micro_batch in sorted(tasks):
        if (tick, phase) != now:
            fault = _deliver(sent, waiting, lives, now, clock)
            if fault:
                return fault
            sent, now = [], (tick, phase)
        at = (tick, phase, turn)
        name = f"{kind}{micro_batch} of segment {i} in tick {tick}"
        if kind in "BW" and (i, "F" if kind == "B" else "B", micro_batch) not in done:
            return f"{name} comes before what it needs"
        boundary = (i - 1, "F") if kind == "F" and i > 0 else (i, "B") if kind == "B" and i < last else None
        if boundary is not None:
            if micro_batch not in waiting[boundary]:
                return f"{name} has no message yet"
            if waiting[boundary].pop(0) != micro_batch:
                return f"{name} overtakes an older message"
            lives["inbox", *boundary][micro_batch].append(at)
        done[i, kind, micro_batch] = at
        sent += [(i, "F", micro_batch)] if kind == "F" and i < last else []
        sent += [(i - 1, "B", micro_batch)] if kind == "B" and i > 0 else []
    for i, segment in enumerate(segments):
        has_w = "W" in rows and segment.place is not None
        ends = "W" if has_w else "B"
        lives["stash", i, ""] = {k: [done[i, "F", k], done[i, ends, k]] for k in range(m)}
        if has_w:
            lives["cut", i, ""] = {k: [done[i, "B", k], done[i, "W", k]] for k in range(m)}
    for ring, of_ring in lives.items():
        fault = _ring_fault(of_ring)
        if fault:
            return f"{ring}: {fault}"
    return ""


def _deliver(sent: list, waiting: dict, lives: dict, now: tuple[int, int], clock: str) -> str:
    for boundary, kind, micro_batch in sent:
        if clock == "two-phase" and waiting[boundary, kind]:
            return f"the message of {kind}{micro_batch} over boundary {boundary} overwrites one that was not used"
        waiting[boundary, kind].append(micro_batch)
        lives.setdefault(("inbox", boundary, kind), {})[micro_batch] = [(*now, 9)]
    return ""


def _depth(lives: dict[int, list[tuple[int, int, int]]]) -> int:
    return max(sum(start <= at <= end for start, end in lives.values()) for at, _ in lives.values())


def _ring_fault(lives: dict[int, list[tuple[int, int, int]]]) -> str:
    depth = _depth(lives)
    for one, (start, end) in lives.items():
        for two, (start_2, end_2) in lives.items():
            if one < two and one % depth == two % depth and start <= end_2 and start_2 <= end:
                return f"micro-batches {one} and {two} need slot {one % depth} of {depth} at the same time"
    return ""
