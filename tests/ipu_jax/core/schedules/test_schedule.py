"""Test schedules: their pictures, their closed formulas, their tasks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.core.schedules import Task, make_schedule


def table(*rows: str) -> tuple[tuple[int, ...], ...]:
    """Return `((0, 1), (1, 3))` for `table("01", "13")`: a row for each stage, a digit for each micro-batch."""
    return tuple(tuple(map(int, row)) for row in rows)


# pictures


def test_the_grouped_grid_is_the_picture_that_opens_the_module():
    assert str(make_schedule("grouped", ipus=3, gradient_accumulation=4)).splitlines() == [
        "grouped: 3 stages on 3 IPUs, 4 micro-batches, 8 ticks, bubble 33.3%",
        "stash: stage 0 holds 4, stage 1 holds 3, stage 2 holds 1",
        "       ramp-up       main                                ramp-down",
        "tick   0        1    2        3        4        5        6          7",
        "IPU 0  0F0      0F1  0F2      0F3      0B0      0B1      0B2        0B3",
        "IPU 1           1F0  1F1      1F2 1B0  1F3 1B1  1B2      1B3",
        "IPU 2                2F0 2B0  2F1 2B1  2F2 2B2  2F3 2B3",
    ]


def test_the_grid_shows_concurrent_stages_on_every_ipu_in_the_order_of_the_clock():
    assert str(make_schedule("grouped", placement=(None, 0, None, 1, None), gradient_accumulation=2)).splitlines() == [
        "grouped: 5 stages on 2 IPUs, 2 micro-batches, 4 ticks, bubble 16.7%",
        "stash: stage 0 holds 2, stage 1 holds 2, stage 2 holds 1, stage 3 holds 1, stage 4 holds 1",
        "       ramp-up  main                                                      ramp-down",
        "tick   0        1                            2                            3",
        "IPU 0  0F0 1F0  0F1 2F0 1F1 4F0 4B0 2B0      2F1 4F1 4B1 1B0 2B1 0B0      1B1 0B1",
        "IPU 1  0F0      0F1 2F0 3F0 4F0 4B0 3B0 2B0  2F1 3F1 4F1 4B1 3B1 2B1 0B0  0B1",
    ]


def test_the_grid_of_several_stages_an_ipu():
    assert str(make_schedule("grouped", placement=(0, 0, 1), gradient_accumulation=3)).splitlines() == [
        "grouped: 3 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 28.9%",
        "stash: stage 0 holds 3, stage 1 holds 3, stage 2 holds 1",
        "       ramp-up  main                               ramp-down",
        "tick   0        1        2                3        4",
        "IPU 0  0F0 1F0  0F1 1F1  0F2 1F2 1B0 0B0  1B1 0B1  1B2 0B2",
        "IPU 1           2F0 2B0  2F1 2B1          2F2 2B2",
    ]
    assert str(make_schedule("grouped", placement=(0, 1, 0, 1), gradient_accumulation=3)).splitlines()[2:] == [
        "       ramp-up                main                               ramp-down",
        "tick   0        1    2        3            4        5            6          7    8",
        "IPU 0  0F0      0F1  0F2 2F0  2F1          2F2 2B0  2B1          2B2 0B0    0B1  0B2",
        "IPU 1           1F0  1F1      1F2 3F0 3B0  3F1 3B1  3F2 3B2 1B0  1B1        1B2",
    ]


# formulas


def test_stages_that_share_an_ipu_make_a_bubble_of_their_imbalance():
    # IPU 0 does two stages of three; without ramps the other IPU idles half of the time
    assert make_schedule("grouped", placement=(0, 0, 1), gradient_accumulation=200).bubble() == pytest.approx(
        0.25, abs=0.01
    )
    assert make_schedule("grouped", placement=(None, None), ipus=8, gradient_accumulation=3).bubble() == pytest.approx(
        0
    )


def test_a_concurrent_head_runs_forward_and_backward_in_the_tick_of_the_last_local_stage():
    schedule = make_schedule("grouped", placement=(None, 0, 1, None), gradient_accumulation=3)
    assert schedule.forward == table("012", "012", "123", "123")
    assert schedule.backward == table("234", "234", "123", "123")
    assert [schedule.phase(s, "F") for s in range(4)] == ["entry", "F", "F", "head"]
    assert [schedule.phase(s, "B") for s in range(4)] == ["exit", "B", "B", "head"]


# tasks


@given(stage=st.integers(0, 999), kind=st.sampled_from("FB"), microbatch=st.integers(0, 9999))
def test_a_task_prints_and_parses_back(stage, kind, microbatch):
    task = Task(stage, kind, microbatch)
    assert Task.parse(str(task)) == task
    assert str(task) == f"{stage}{kind}{microbatch}"


def test_tasks_of_a_tick_come_in_the_order_of_the_clock():
    schedule = make_schedule("grouped", placement=(None, 0, 1, None), gradient_accumulation=4)
    assert [str(task) for task in schedule.tasks(2)] == ["0F2", "1F2", "2F1", "3F1", "3B1", "2B1", "1B0", "0B0"]


def test_without_ipus_the_placement_says_how_many():
    assert make_schedule("grouped", placement=(0, 3), gradient_accumulation=1).ipus == 4
    assert make_schedule("grouped", placement=(None,), gradient_accumulation=1).ipus == 1


def test_a_schedule_is_plain_data():
    schedule = make_schedule("grouped", ipus=2, gradient_accumulation=3)
    assert schedule == make_schedule("grouped", ipus=2, gradient_accumulation=3)
    assert len({schedule, make_schedule("grouped", ipus=2, gradient_accumulation=3)}) == 1
    assert dataclasses.replace(schedule, name="mine").forward == schedule.forward
    with pytest.raises(ValueError, match=r"^schedule 'grouped': the forward table must be"):
        dataclasses.replace(schedule, placement=(0,))
