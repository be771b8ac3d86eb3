"""Test schedules: their pictures, their closed formulas, and the errors for wrong tables.

`replay` implements the clock independently: it moves messages through registers as an engine would and checks what each
task finds there. Every schedule that the validator accepts must pass it.
"""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ipu_jax.schedules import SCHEDULES, Schedule, Task, make_schedule
from ipu_jax.schedules._validate import validate

NAMES = ", ".join(map(repr, (*SCHEDULES, "auto")))


def table(*rows: str) -> tuple[tuple[int, ...], ...]:
    """Return `((0, 1), (1, 3))` for `table("01", "13")`: a row for each stage, a digit for each micro-batch."""
    return tuple(tuple(map(int, row)) for row in rows)


def replay(schedule: Schedule) -> None:
    """Run the schedule's tables with (stage, micro-batch) tags for arrays, and assert that each task reads its own."""
    places, stages = schedule.placement, range(len(schedule.placement))
    last_local = max((s for s in stages if places[s] is not None), default=-1)
    messages: dict[str, dict[int, int]] = {"y": {}, "y received": {}, "dx": {}, "dx received": {}}
    rings = [[-1] * schedule.stash_depth(s) for s in stages]

    def crosses(s: int) -> bool:  # from stage s to stage s + 1, over a wire
        return places[s] is not None and places[s + 1] is not None and places[s] != places[s + 1]

    def forward(s: int, m: int) -> None:
        if s > 0:
            assert messages["y received" if crosses(s - 1) else "y"][s - 1] == m
        messages["y"][s] = m
        assert rings[s][m % len(rings[s])] == -1
        rings[s][m % len(rings[s])] = m

    def backward(s: int, m: int) -> None:
        if s < stages[-1]:
            assert messages["dx received" if crosses(s) else "dx"][s + 1] == m
        messages["dx"][s] = m
        assert rings[s][m % len(rings[s])] == m
        rings[s][m % len(rings[s])] = -1

    for tick in range(schedule.ticks):
        now = {
            (kind, s): row.index(tick)
            for kind, rows in (("F", schedule.forward), ("B", schedule.backward))
            for s, row in enumerate(rows)
            if tick in row
        }
        entries = [s for s in stages if places[s] is None and s < last_local]
        locals_ = [s for s in stages if places[s] is not None]
        head = [s for s in stages if s > last_local]
        for kind, phase in (("F", entries), ("F", locals_), ("F", head), ("B", head), ("B", locals_), ("B", entries)):
            for s in phase if kind == "F" else reversed(phase):
                if (kind, s) in now:
                    (forward if kind == "F" else backward)(s, now[kind, s])
            if phase is locals_:
                sent = "y" if kind == "F" else "dx"
                messages[f"{sent} received"] = dict(messages[sent])
    assert all(slot == -1 for ring in rings for slot in ring)


PLACEMENTS = st.integers(1, 4).flatmap(
    lambda ipus: st.tuples(
        st.just(ipus), st.lists(st.none() | st.integers(0, ipus - 1), min_size=1, max_size=6).map(tuple)
    )
)


# pictures


def test_the_grouped_grid_is_the_picture_that_opens_the_module():
    assert str(make_schedule("grouped", ipus=3, micro_batches=4)).splitlines() == [
        "grouped: 3 stages on 3 IPUs, 4 micro-batches, 8 ticks, bubble 33.3%",
        "stash: stage 0 holds 4, stage 1 holds 3, stage 2 holds 1",
        "       ramp-up       main                                ramp-down",
        "tick   0        1    2        3        4        5        6          7",
        "IPU 0  0F0      0F1  0F2      0F3      0B0      0B1      0B2        0B3",
        "IPU 1           1F0  1F1      1F2 1B0  1F3 1B1  1B2      1B3",
        "IPU 2                2F0 2B0  2F1 2B1  2F2 2B2  2F3 2B3",
    ]


def test_the_sequential_grid_has_one_ipu_at_work_in_each_tick():
    assert str(make_schedule("sequential", ipus=2, micro_batches=2)).splitlines() == [
        "sequential: 2 stages on 2 IPUs, 2 micro-batches, 6 ticks, bubble 50.0%",
        "stash: stage 0 holds 1, stage 1 holds 1",
        "       ramp-up  main                        ramp-down",
        "tick   0        1        2    3    4        5",
        "IPU 0  0F0               0B0  0F1           0B1",
        "IPU 1           1F0 1B0            1F1 1B1",
    ]


def test_the_grid_shows_concurrent_stages_on_every_ipu_in_the_order_of_the_clock():
    assert str(make_schedule("grouped", placement=(None, 0, None, 1, None), micro_batches=2)).splitlines() == [
        "grouped: 5 stages on 2 IPUs, 2 micro-batches, 4 ticks, bubble 16.7%",
        "stash: stage 0 holds 2, stage 1 holds 2, stage 2 holds 1, stage 3 holds 1, stage 4 holds 1",
        "       ramp-up  main                                                      ramp-down",
        "tick   0        1                            2                            3",
        "IPU 0  0F0 1F0  0F1 2F0 1F1 4F0 4B0 2B0      2F1 4F1 4B1 1B0 2B1 0B0      1B1 0B1",
        "IPU 1  0F0      0F1 2F0 3F0 4F0 4B0 3B0 2B0  2F1 3F1 4F1 4B1 3B1 2B1 0B0  0B1",
    ]


def test_the_grid_of_several_stages_an_ipu():
    assert str(make_schedule("grouped", placement=(0, 0, 1), micro_batches=3)).splitlines() == [
        "grouped: 3 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 28.9%",
        "stash: stage 0 holds 3, stage 1 holds 3, stage 2 holds 1",
        "       ramp-up  main                               ramp-down",
        "tick   0        1        2                3        4",
        "IPU 0  0F0 1F0  0F1 1F1  0F2 1F2 1B0 0B0  1B1 0B1  1B2 0B2",
        "IPU 1           2F0 2B0  2F1 2B1          2F2 2B2",
    ]
    assert str(make_schedule("grouped", placement=(0, 1, 0, 1), micro_batches=3)).splitlines()[2:] == [
        "       ramp-up                main                               ramp-down",
        "tick   0        1    2        3            4        5            6          7    8",
        "IPU 0  0F0      0F1  0F2 2F0  2F1          2F2 2B0  2B1          2B2 0B0    0B1  0B2",
        "IPU 1           1F0  1F1      1F2 3F0 3B0  3F1 3B1  3F2 3B2 1B0  1B1        1B2",
    ]


# formulas


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8, 84])
def test_the_bubble_is_the_closed_formula(stages, micro_batches):
    grouped = make_schedule("grouped", ipus=stages, micro_batches=micro_batches)
    sequential = make_schedule("sequential", ipus=stages, micro_batches=micro_batches)
    for costs in ({}, {"forward": 1.0, "backward": 1.0}, {"forward": 3.0, "backward": 0.5}):
        assert grouped.bubble(**costs) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        assert sequential.bubble(**costs) == pytest.approx(1 - 1 / stages)


def test_stages_that_share_an_ipu_make_a_bubble_of_their_imbalance():
    # IPU 0 does two stages of three; without ramps the other IPU idles half of the time
    assert make_schedule("grouped", placement=(0, 0, 1), micro_batches=200).bubble() == pytest.approx(0.25, abs=0.01)
    assert make_schedule("grouped", placement=(None, None), ipus=8, micro_batches=3).bubble() == pytest.approx(0)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 9, 40])
def test_the_stash_of_grouped_does_not_grow_with_the_micro_batches(stages, micro_batches):
    schedule = make_schedule("grouped", ipus=stages, micro_batches=micro_batches)
    assert [schedule.stash_depth(s) for s in range(stages)] == [
        min(micro_batches, 2 * (stages - 1 - s) + 1) for s in range(stages)
    ]


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0), (None, 0, 1, None), (0, None, 1)])
def test_sequential_stashes_one_micro_batch(placement):
    schedule = make_schedule("sequential", placement=placement, micro_batches=5)
    assert [schedule.stash_depth(s) for s in range(len(placement))] == [1] * len(placement)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (3, 1), (3, 3), (3, 8)])
def test_grouped_takes_the_ticks_of_1f1b_and_forward_alone_half_the_ramp(stages, micro_batches):
    schedule = make_schedule("grouped", ipus=stages, micro_batches=micro_batches)
    assert schedule.ticks == micro_batches + 2 * (stages - 1)
    assert schedule.forward_ticks == micro_batches + stages - 1


def test_a_concurrent_head_runs_forward_and_backward_in_the_tick_of_the_last_local_stage():
    schedule = make_schedule("grouped", placement=(None, 0, 1, None), micro_batches=3)
    assert schedule.forward == table("012", "012", "123", "123")
    assert schedule.backward == table("234", "234", "123", "123")
    assert [schedule.phase(s, "F") for s in range(4)] == ["entry", "F", "F", "head"]
    assert [schedule.phase(s, "B") for s in range(4)] == ["exit", "B", "B", "head"]


@pytest.mark.parametrize("name", ["sequential", "grouped"])
@settings(max_examples=100)
@given(ipus_and_placement=PLACEMENTS, micro_batches=st.integers(1, 6))
def test_every_placement_gives_a_schedule_that_replays(name, ipus_and_placement, micro_batches):
    ipus, placement = ipus_and_placement
    schedule = make_schedule(name, placement=placement, ipus=ipus, micro_batches=micro_batches)
    validate(schedule)
    replay(schedule)
    stages = len(placement)
    assert all(schedule.stash_depth(s) <= min(micro_batches, 2 * (stages - 1) + 1) for s in range(stages))
    assert 0 <= schedule.bubble() < 1
    done = Counter(task for tick in range(schedule.ticks) for task in schedule.tasks(tick))
    assert done == {
        Task.parse(f"{s}{kind}{m}"): 1 for s in range(stages) for kind in "FB" for m in range(micro_batches)
    }
    for tick, k in itertools.product(range(schedule.ticks), range(ipus)):
        local = [t for t in schedule.tasks(tick) if placement[t.stage] == k]
        assert all(f"{task}" in str(schedule) for task in local)


# tasks


@given(stage=st.integers(0, 999), kind=st.sampled_from("FB"), microbatch=st.integers(0, 9999))
def test_a_task_prints_and_parses_back(stage, kind, microbatch):
    task = Task(stage, kind, microbatch)
    assert Task.parse(str(task)) == task
    assert str(task) == f"{stage}{kind}{microbatch}"


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "2F0 ", "2F0\n", "2F-1", "2.0F1"])
def test_what_is_no_task_is_refused(text):
    with pytest.raises(ValueError, match="is not a task") as caught:
        Task.parse(text)
    assert str(caught.value) == f"{text!r} is not a task: write stage, F, B or W, micro-batch, as in '2F0'"


def test_tasks_of_a_tick_come_in_the_order_of_the_clock():
    schedule = make_schedule("grouped", placement=(None, 0, 1, None), micro_batches=4)
    assert [str(task) for task in schedule.tasks(2)] == ["0F2", "1F2", "2F1", "3F1", "3B1", "2B1", "1B0", "0B0"]


# wrong tables

WRONG = {
    "B before its own F": (
        (0,),
        table("1"),
        table("0"),
        "IPU 0, tick 0, 0B0: it needs 0F0, which runs in tick 1: move it to tick 1 or later",
    ),
    "B of a later stage before its F": (
        (0, 1),
        table("0", "1"),
        table("2", "0"),
        "IPU 1, tick 0, 1B0: it needs 1F0, which runs in tick 1: move it to tick 1 or later",
    ),
    "F before the stage before": (
        (0, 1),
        table("1", "0"),
        table("3", "2"),
        "IPU 1, tick 0, 1F0: it needs 0F0, which runs in tick 1, and a message between IPUs takes until "
        "the next tick: move it to tick 2 or later",
    ),
    "an activation used in the tick in which it is sent": (
        (0, 1),
        table("0", "0"),
        table("1", "0"),
        "IPU 1, tick 0, 1F0: it needs 0F0, which runs in tick 0, and a message between IPUs takes until "
        "the next tick: move it to tick 1 or later",
    ),
    "a gradient used in the tick in which it is sent": (
        (0, 1),
        table("0", "1"),
        table("1", "1"),
        "IPU 0, tick 1, 0B0: it needs 1B0, which runs in tick 1, and a message between IPUs takes until "
        "the next tick: move it to tick 2 or later",
    ),
    "an activation overwritten before it is used": (
        (0, 1),
        table("01", "34"),
        table("45", "34"),
        "IPU 0, tick 1, 0F1: it overwrites the message of 0F0 before 1F0 in tick 3 has used it, and "
        "under the two-phase clock none may wait: move one of them, or give clock='one-phase'",
    ),
    "a gradient overwritten before it is used": (
        (0, 1),
        table("01", "12"),
        table("45", "12"),
        "IPU 1, tick 2, 1B1: it overwrites the message of 1B0 before 0B0 in tick 4 has used it, and "
        "under the two-phase clock none may wait: move one of them, or give clock='one-phase'",
    ),
    "a stash slot written before it is free": (
        (0,),
        table("012"),
        table("213"),
        "IPU 0, tick 2, 0F2: it writes slot 0 of 2 of the stash before 0B0 in tick 2 has freed it: run "
        "the micro-batches in order",
    ),
    "two micro-batches of a stage in a tick": (
        (0, 1),
        table("00", "12"),
        table("23", "12"),
        "IPU 0, tick 0, 0F1: 0F0 has this tick, and a stage does F of one micro-batch a tick: move one of them",
    ),
    "two gradients of a stage in a tick": (
        (0, 1),
        table("01", "12"),
        table("33", "12"),
        "IPU 0, tick 3, 0B1: 0B0 has this tick, and a stage does B of one micro-batch a tick: move one of them",
    ),
    "a tick before the first": (
        (0,),
        ((0, -1),),
        table("01"),
        "IPU 0, tick -1, 0F1: there is no such tick: the first is tick 0",
    ),
    "a concurrent stage after a local one, a tick early": (
        (0, None, 0),
        table("0", "0", "1"),
        table("2", "1", "1"),
        "all IPUs, tick 0, 1F0: it needs 0F0, which runs in tick 0: move it to tick 1 or later",
    ),
    "a gradient out of exit, a tick early": (
        (0, None, 0),
        table("0", "1", "1"),
        table("1", "1", "1"),
        "IPU 0, tick 1, 0B0: it needs 1B0, which runs in tick 1: move it to tick 2 or later",
    ),
}


@pytest.mark.parametrize(("placement", "forward", "backward", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_table_is_refused_naming_the_cell(placement, forward, backward, message):
    with pytest.raises(ValueError, match=r"^schedule 'mine': ") as caught:
        Schedule("mine", placement, 2, forward, backward)
    assert str(caught.value) == f"schedule 'mine': {message}"


@pytest.mark.parametrize(
    ("forward", "backward", "kind"),
    [
        (table("01", "1"), table("23", "12"), "forward"),
        (table("01", "12"), table("23", "1"), "backward"),
        (table("01"), table("23", "12"), "forward"),
        (table("01", "12"), table("23", "12", "12"), "backward"),
    ],
)
def test_a_ragged_table_is_refused(forward, backward, kind):
    with pytest.raises(ValueError, match=f"^schedule 'mine': the {kind} table must be 2 stages x 2 "):
        Schedule("mine", (0, 1), 2, forward, backward)


@pytest.mark.parametrize(("placement", "tables"), [((), ()), ((0,), ((),)), ((0,), ())])
def test_a_schedule_of_nothing_is_refused(placement, tables):
    with pytest.raises(ValueError, match="is empty") as caught:
        Schedule("mine", placement, 1, tables, tables)
    assert str(caught.value) == "schedule 'mine' is empty: give at least one stage and one micro-batch"


@pytest.mark.parametrize("ipu", [2, -1])
def test_a_stage_on_an_ipu_outside_the_replica_is_refused(ipu):
    with pytest.raises(ValueError, match="outside") as caught:
        Schedule("mine", (0, ipu), 2, table("0", "1"), table("2", "1"))
    assert str(caught.value) == f"stage 1 is on IPU {ipu}, outside the replica: it has IPUs 0 to 1"


HOLES = {
    "a local stage's result, read by the head a tick late": ((0, None), table("01", "12"), table("12", "12")),
    "a gradient that waits a tick for exit": ((None, 0), table("01", "01"), table("12", "01")),
    "an entry's result, read a tick late": ((None, 0), table("01", "12"), table("12", "12")),
    "a register of two concurrent neighbours": ((None, None, 0), table("01", "12", "23"), table("45", "45", "34")),
}


@pytest.mark.parametrize(("placement", "forward", "backward"), HOLES.values(), ids=HOLES)
def test_a_message_overwritten_earlier_in_the_tick_of_its_use_is_refused(placement, forward, backward):
    with pytest.raises(ValueError, match=r"^schedule 'mine': "):
        Schedule("mine", placement, 2, forward, backward)


@st.composite
def tables_near_a_schedule(draw):
    """Return the tables of a schedule, stretched: tasks may come later, and micro-batches further apart."""
    placement = draw(st.lists(st.none() | st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    m_count, apart = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    one = make_schedule("grouped", placement=placement, ipus=2, micro_batches=1)
    late = itertools.accumulate(draw(st.sampled_from([0, 0, 0, 1, 2])) for _ in range(2 * len(placement)))
    forward = [row[0] + next(late) for row in one.forward]
    backward = [row[0] + next(late) for row in reversed(one.backward)][::-1]

    def spread(first: list[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(tick + apart * m for m in range(m_count)) for tick in first)

    return placement, spread(forward), spread(backward)


@settings(max_examples=200)
@given(tables=tables_near_a_schedule())
def test_what_the_validator_lets_through_replays(tables):
    placement, forward, backward = tables
    try:
        schedule = Schedule("mine", placement, 2, forward, backward)
    except ValueError:
        return
    replay(schedule)


@settings(max_examples=100)
@given(tables=tables_near_a_schedule(), data=st.data())
def test_a_stretched_schedule_is_accepted_where_micro_batches_dont_meet(tables, data):
    placement, forward, backward = tables
    try:
        one = Schedule("one", placement, 2, tuple(row[:1] for row in forward), tuple(row[:1] for row in backward))
    except ValueError:
        assume(False)
    replay(one)
    shift = data.draw(st.integers(0, 3))
    later = tuple((row[0], row[0] + one.ticks + shift) for row in one.forward)
    assert Schedule("two", placement, 2, later, tuple((r[0], r[0] + one.ticks + shift) for r in one.backward))


# make


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            {"name": "groupd"},
            f"schedule='groupd' is unknown: did you mean 'grouped'? Choose one of {NAMES}",
        ),
        ({"name": "?"}, f"schedule='?' is unknown: Choose one of {NAMES}"),
        ({"micro_batches": 0}, "micro_batches=0 is not a count: give an int of at least 1"),
        ({"micro_batches": 2.5}, "micro_batches=2.5 is not a count: give an int of at least 1"),
        ({"ipus": 0}, "ipus=0 is not a count: give an int of at least 1"),
        ({"ipus": None}, "give ipus=, placement=, or both"),
        ({"placement": ()}, "placement=() has no stages: give at least one"),
        ({"placement": (0, 2)}, "stage 1 is on IPU 2, outside the replica: it has IPUs 0 to 1"),
    ],
)
def test_make_refuses(given_, message):
    arguments = {"name": "grouped", "ipus": 2, "micro_batches": 1} | given_
    with pytest.raises(ValueError, match=r".") as caught:
        make_schedule(**arguments)
    assert str(caught.value) == message


def test_without_ipus_the_placement_says_how_many():
    assert make_schedule("grouped", placement=(0, 3), micro_batches=1).ipus == 4
    assert make_schedule("grouped", placement=(None,), micro_batches=1).ipus == 1


def test_a_schedule_is_plain_data():
    schedule = make_schedule("grouped", ipus=2, micro_batches=3)
    assert schedule == make_schedule("grouped", ipus=2, micro_batches=3)
    assert len({schedule, make_schedule("grouped", ipus=2, micro_batches=3)}) == 1
    assert dataclasses.replace(schedule, name="mine").forward == schedule.forward
    with pytest.raises(ValueError, match=r"^schedule 'grouped': the forward table must be"):
        dataclasses.replace(schedule, placement=(0,))
