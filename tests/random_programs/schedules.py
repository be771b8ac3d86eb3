"""Test schedules: valid tables must be accepted, parsed from their text and run correctly; faulty tables refused.

`judge` decides what is valid, by playing the table task by task.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ipu_jax.schedules import Schedule
from random_programs.dice import Dice
from random_programs.drawing import draw_model
from random_programs.judge import fault_of
from random_programs.pipelines import assert_right, pipeline_of
from random_programs.tables import Clock, Placement, Segment, Table, random_table, segments_of

SPOILT = 12  # the spoilt tables made from each table


class Case:
    """A case of a small model under its own table, and of many spoilt tables."""

    def __init__(self, dice: Dice):
        self.model = draw_model(dice, simple=True)
        self.model = dataclasses.replace(self.model, schedule="own")
        self.dice, placement, m = dice, self.model.placement, self.model.micro_batches
        self.table = random_table(np.random.default_rng(dice.number()), placement, m)
        self.spoilt = [spoil(dice, placement, self.table) for _ in range(SPOILT)]
        # a spoilt table that is still valid is unusual, so it is run in place of the first table
        unusual = [t for t in self.spoilt if t != self.table and not fault_of(placement, self.model.ipus, t)]
        # state must be updated in the order of micro-batches, or the table is refused
        if any(piece.norm for piece in self.model.pieces):
            unusual = [t for t in unusual if all(list(row) == sorted(row) for row in t[0])]
        self.runs = unusual[-1] if unusual and dice.chance(0.7) else self.table

    def __str__(self) -> str:
        return f"{self.model}\n  runs {self.runs}"

    def check(self) -> None:
        placement, ipus = self.model.placement, self.model.ipus
        for table in (self.table, *self.spoilt):
            fault = fault_of(placement, ipus, table)
            assert table is not self.table or not fault, f"the table that was made is faulty: {fault}"
            schedule, refusal = _schedule_or_refusal(placement, ipus, table)
            assert fault or schedule, f"refused, though nothing is wrong with {table}: {refusal}"
            assert not fault or not schedule, f"accepted, though {fault}: {table}"
            if schedule is not None:
                again = Schedule.from_text(str(schedule))
                assert again == schedule, f"read back from its text it is another one:\n{schedule}\n{again}"
        schedule = Schedule("own", placement, ipus, *self.runs)
        assert_right(self.model, pipeline_of(self.model, schedule))


def _schedule_or_refusal(placement: Placement, ipus: int, table: Table) -> tuple[Schedule | None, str]:
    try:
        return Schedule("own", placement, ipus, *table), ""
    except ValueError as error:
        return None, str(error)


def spoil(dice: Dice, placement: Placement, table: Table) -> Table:
    """Return a table with one or two cells moved, swapped, doubled, or dropped. Sometimes it is still valid."""
    forward, backward, weight, clock = table
    rows: dict[str, Any] = {"F": [*map(list, forward)], "B": [*map(list, backward)]}
    if weight is not None:
        rows["W"] = [*map(list, weight)]
    m = len(forward[0])
    how = dice.weighted(
        {"move": 4, "swap": 3, "double": 1, "drop": 0.5, "early": 2, "relabel": 2, "shift": 1, "clock": 1}
    )
    kind, stage, at = dice.one_of(list(rows)), dice.between(0, len(placement) - 1), dice.between(0, m - 1)
    alike = _segment(placement, stage).stages if dice.chance(0.8) else (stage,)
    if how == "move":
        _set(rows, kind, alike, at, max(0, rows[kind][stage][at] + dice.one_of((-3, -2, -1, 1, 2, 3))), placement)
    elif how == "swap":
        other = dice.between(0, m - 1)
        one, two = rows[kind][stage][at], rows[kind][stage][other]
        _set(rows, kind, alike, at, two, placement)
        _set(rows, kind, alike, other, one, placement)
    elif how == "double":
        _set(rows, kind, alike, at, rows[kind][stage][dice.between(0, m - 1)], placement)
    elif how == "drop":
        rows[kind][stage].pop(at)
    elif how == "early":
        before = {"F": ("F", max(stage - 1, 0)), "B": ("F", stage), "W": ("B", stage)}[kind]
        _set(rows, kind, alike, at, rows[before[0]][before[1]][at] - dice.between(0, 1), placement)
    elif how == "relabel":  # reorder the micro-batches, in the same way for every task
        order = dice.shuffled(range(m))
        rows = {kind: [[row[i] for i in order] for row in of_kind] for kind, of_kind in rows.items()}
    elif how == "shift":  # everything from some tick on is one tick later
        after = dice.between(0, max(map(max, backward)))
        rows = {k: [[t + (t >= after) for t in row] for row in of_kind] for k, of_kind in rows.items()}
    else:
        other_clock: Clock = "one-phase" if clock == "two-phase" else "two-phase"
        clock = other_clock
    as_rows = lambda of: tuple(tuple(row) for row in of)
    return as_rows(rows["F"]), as_rows(rows["B"]), as_rows(rows["W"]) if "W" in rows else None, clock


def _segment(placement: Placement, stage: int) -> Segment:
    return next(segment for segment in segments_of(placement) if stage in segment.stages)


def _set(rows: dict[str, Any], kind: str, stages: Sequence[int], m: int, tick: int, placement: Placement) -> None:
    """Move these stages' task to a new tick, together with a concurrent stage's W, and with F and B of a head."""
    for stage in stages:
        role = _segment(placement, stage).role
        together = {"local": kind, "head": "FBW", "entry": "F" if kind == "F" else "BW"}[role]
        for other in together:
            if other in rows:
                rows[other][stage][m] = tick
