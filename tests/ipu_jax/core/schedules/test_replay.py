"""Test the validator: what it accepts can be replayed independently; and drawings, which become tables.

The judge of the random programs plays a table task by task, with the messages and rings that an engine would have.
"""

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_jax.core.schedules import SCHEDULES, Schedule, make_schedule
from random_programs.judge import depths_of, fault_of
from random_programs.tables import segments_of


def replay(schedule: Schedule) -> None:
    """Assert that a schedule can run, and that it needs the memory that it says."""
    placement = schedule.placement
    table: Any = schedule.forward, schedule.backward, schedule.weight, schedule.clock
    assert not fault_of(placement, schedule.ipus, table)
    segments = segments_of(placement)
    for (ring, segment, kind), depth in depths_of(placement, table).items():
        stages = segments[segment].stages
        if ring == "inbox":  # of the boundary behind the segment
            assert schedule.inbox_depth(stages[-1], "F" if kind == "F" else "B") == depth
        else:
            depth_of = schedule.stash_depth if ring == "stash" else schedule.weight_residual_depth
            assert [depth_of(stage) for stage in stages] == [depth] * len(stages)


@st.composite
def schedules(draw, names=SCHEDULES, most_ipus: int = 6, most_micro_batches: int = 10) -> Schedule:
    """Draw a schedule of some family, with concurrent stages anywhere."""
    name = draw(st.sampled_from(names))
    ipus, m_count = draw(st.integers(1, most_ipus)), draw(st.integers(1, most_micro_batches))
    line = list(make_schedule(name, ipus=ipus, gradient_accumulation=1, rounds=draw(st.integers(1, 3))).placement)
    if name not in ("looped", "looped-bfs", "looped-zb", "zbv", "zb-wave", "dualpipev"):
        line = draw(st.lists(st.integers(0, ipus - 1), max_size=8))
    placement = []
    for ipu in line:
        placement += [None] * draw(st.sampled_from([0, 0, 0, 0, 1, 2])) + [ipu]
    placement += [None] * draw(st.sampled_from([0, 1, 2] if placement else [1, 2]))
    return make_schedule(name, ipus=ipus, placement=tuple(placement), gradient_accumulation=m_count)


@settings(max_examples=50)
@given(schedule=schedules(), data=st.data())
def test_every_family_replays_on_every_placement_also_with_idle_ticks_put_in(schedule, data):
    replay(schedule)
    replay(dataclasses.replace(schedule, **_with_idle_ticks(schedule, data)))
    assert Schedule.from_text(str(schedule)) == schedule
    assert str(Schedule.from_text(str(schedule))) == str(schedule)
    assert 0 <= schedule.bubble() < 1
    if schedule.clock == "two-phase":
        stages = range(len(schedule.placement))
        most = min(schedule.micro_batches, 2 * len(stages) - 1)
        assert all(schedule.stash_depth(s) <= most for s in stages)


@pytest.mark.parametrize(
    "placement",
    [
        (0, 0, 0, 1, 1, 0),
        (0, 1, 1, 1, 0, 0),
        (0, 0, 0, 0, 0, 1, 0),
        (2, 0, 0, 1, 1, 1, 1, 0, 2, 2),
        (0, 1, 1, 2, 2, 2, 2, 1, 0, 0, 0),
        (0, 0, 1, 2, 1, 1, 1, 0),
        (None, 0, 0, 1, None, 1, 1, 0, None),
        (3, 2, 2, 2, 1, 0, 0, 0, 0, 1, 2, 3, 3),
    ],
    ids=str,
)
def test_zbv_with_more_stages_on_one_ipu_than_on_another_replays(placement):
    ipus, stages = set(placement) - {None}, range(len(placement))
    for m_count in (1, 2, 3, 4, 5, 8, 13):
        schedule = make_schedule("zbv", placement=placement, gradient_accumulation=m_count)
        replay(schedule)
        assert schedule.weight is not None
        for table in (schedule.forward, schedule.backward, schedule.weight):
            assert all(list(row) == sorted(set(row)) for row in table), "micro-batches in order, one a tick"
        for ipu, tick in itertools.product(ipus, range(schedule.ticks)):
            mine = [s for s in stages if placement[s] == ipu]
            spans = (span for s in mine for span in zip(schedule.forward[s], schedule.weight[s], strict=True))
            held = sum(first <= tick <= last for first, last in spans)
            assert held <= len(ipus) * len(mine), "no more than S micro-batches of its share"


def attempt(schedule: Schedule, **tables) -> tuple[Schedule | None, str]:
    """Return the schedule with other tables, or the error."""
    try:
        return dataclasses.replace(schedule, name="mutant", **tables), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.slow
@settings(max_examples=100)
@given(schedule=schedules(most_ipus=3, most_micro_batches=4), data=st.data())
def test_what_the_validator_lets_through_replays(schedule, data):
    """Move cells of a table with room between its ticks: it must be refused, or be still right."""
    tables = _with_cells_moved(schedule, _with_idle_ticks(schedule, data), data)
    mutant, refusal = attempt(schedule, **tables)
    if mutant is not None:
        replay(mutant)
    else:
        assert re.match(r"schedule 'mutant': (IPU \d+|all IPUs), tick -?\d+, \d+[FBW]\d+: ", refusal)


def _with_cells_moved(schedule: Schedule, tables: dict, data) -> dict:
    """Move one micro-batch's F, B or W of a segment a little, or swap it with another one's, once or twice."""
    rows = {kind: [list(row) for row in table] for kind, table in tables.items()}
    micro_batches = st.integers(0, schedule.micro_batches - 1)
    for _ in range(data.draw(st.integers(1, 2))):
        segment, kind = data.draw(st.sampled_from(schedule.segments)), data.draw(st.sampled_from(list(rows)))
        m, other = data.draw(micro_batches), data.draw(micro_batches)
        by = data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3, 9]))
        kinds = [kind]
        if schedule.placement[segment[0]] is None:  # a head does F and B in one tick, and B includes W
            at_the_end = all(ipu is None for ipu in schedule.placement[segment[0] :])
            kinds = list(rows) if at_the_end else [k for k in rows if (k == "forward") == (kind == "forward")]
        some = segment[: data.draw(st.sampled_from([len(segment), len(segment), 1]))]
        for row in (rows[k][s] for k in kinds for s in some):
            if m != other:
                row[m], row[other] = row[other], row[m]
            else:
                row[m] += by
    return {kind: tuple(map(tuple, table)) for kind, table in rows.items()}


def _with_idle_ticks(schedule: Schedule, data) -> dict:
    gaps = [data.draw(st.integers(0, 2)) for _ in range(schedule.ticks)]
    at = [tick + sum(gaps[: tick + 1]) for tick in range(schedule.ticks)]
    return {
        kind: tuple(tuple(at[tick] for tick in row) for row in rows)
        for kind in ("forward", "backward", "weight")
        if (rows := getattr(schedule, kind)) is not None
    }


def rows(*lines: str) -> tuple[tuple[int, ...], ...]:
    """Return `((0, 1), (1, 3))` for `rows("01", "13")`: a line for each stage, a digit for each micro-batch."""
    return tuple(tuple(map(int, line)) for line in lines)


# drawings


def test_a_bare_grid_tells_placement_and_clock():
    drawn = Schedule.from_text("""
        IPU 0  0F0  0F1  .    0B0  .    0B1
        IPU 1  .    1F0  1B0  1F1  1B1  .
    """)
    assert drawn == Schedule("custom", (0, 1), 2, rows("01", "13"), rows("35", "24"), None, "one-phase")
    barred = Schedule.from_text("IPU 0 | 0F0 | 0F1 |  | 0B0 |  | 0B1 |\nIPU 1 |  | 1F0 | 1B0 | 1F1 | 1B1 |  |")
    assert barred == drawn
    placed = Schedule.from_text("""
        tick   0    1    2    3    4    5
        IPU 1       1F0  1B0  1F1  1B1
        IPU 0  0F0  0F1       0B0       0B1
    """)
    assert placed == drawn


def test_a_bare_grid_with_two_tasks_of_an_ipu_in_a_tick_has_the_two_phase_clock():
    assert Schedule.from_text("""
        IPU 0  0F0 1F0 1B0  0B0
        IPU 1  1F0 1B0      .
    """) == Schedule("custom", (0, None), 2, rows("0", "0"), rows("1", "0"), None, "one-phase")
    assert Schedule.from_text("IPU 0  0F0 1F0 1B0 0B0\nIPU 1  1F0 1B0") == Schedule(
        "custom", (0, None), 2, rows("0", "0"), rows("0", "0")
    )


def test_w_of_a_drawing_is_read_and_concurrent_stages_have_none():
    drawn = Schedule.from_text("""
        IPU 0  0F0 1F0 1B0  0B0  0W0
        IPU 1  1F0 1B0
    """)
    assert drawn.weight == rows("2", "0")
    assert [str(task) for task in drawn.order(0)] == ["0F0", "1F0", "1B0", "0B0", "0W0"]
    assert [str(task) for task in drawn.order(1)] == ["1F0", "1B0"]


def test_one_ipu_needs_its_placement_said():
    concurrent = make_schedule("zb-h1", ipus=1, placement=(None, 0, None), gradient_accumulation=2)
    assert str(concurrent).splitlines()[2] == "placement: all IPUs, IPU 0, all IPUs"
    assert Schedule.from_text(str(concurrent)) == concurrent
