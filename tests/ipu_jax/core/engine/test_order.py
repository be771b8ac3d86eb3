"""Test what IPUs do in a tick, by lists worked out by hand."""

import dataclasses
import itertools

import pytest

from ipu_jax import make_schedule
from ipu_jax.core.engine.order import Tick, tick_of
from ipu_jax.core.schedules._timetable import segments_of
from ipu_jax.schedules import Schedule

A = None  # a concurrent stage


def tick(schedule: Schedule, *, backward: bool = True, beside: bool = False, always: bool = False) -> Tick:
    """Return the tick of a schedule whose segments are classes of their own, with a channel per boundary."""
    firsts = [stages[0] for stages in segments_of(schedule.placement)]
    places = [schedule.placement[first] for first in firsts]
    crossing = [k for k, pair in enumerate(itertools.pairwise(places)) if A not in pair and pair[0] != pair[1]]
    classes = [[i] for i in range(len(firsts))]
    sends = {"sends_beside_tasks": beside, "always_sends": always}
    return tick_of(schedule, firsts, classes, crossing, backward=backward, **sends)


@pytest.mark.parametrize(
    ("name", "placement", "expected", "beside"),
    [
        ("1f1b", (0, 1), "F 0, F 1, B 1, B 0, y 0, dx 0", None),
        ("1f1b", (0, 0, 1, 1), "F 0, F 1, B 1, B 0, y 0, dx 0", None),
        ("grouped", (0, 1), "F 0, F 1, B 1, B 0, y 0, dx 0", "dx 0, F 0, F 1, y 0, B 1, B 0"),
        (
            "grouped",
            (A, 0, 1, A),
            "F 0, F 1, F 2, FB 3, B 2, B 1, y 1, dx 1, B 0",
            "dx 1, F 0, F 1, F 2, y 1, FB 3, B 2, B 1, B 0",
        ),
        (
            "grouped-zb",
            (0, 1, A),
            "F 0, F 1, FB 2, B 1, B 0, W 1, W 0, y 0, dx 0",
            "F 0, F 1, y 0, FB 2, B 1, B 0, dx 0, W 1, W 0",
        ),
        # under the one-phase clock the head follows all local tasks, and gpipe keeps its gradients
        ("gpipe", (0, 1, A), "F 0, F 1, B 1, B 0, FB 2, dy 1 from 2, y 0, dx 0", None),
        # the third stage receives activations while IPU 0 still runs the first one
        (
            "zbv",
            (0, 1, 1, 0),
            "F 0, F 1, F 2, B 2, B 1, B 0, W 2, W 1, W 0, y 0, y 1, x 2 from 0 1 2, dx 0, dx 1",
            None,
        ),
    ],
)
def test_what_ipus_do_in_a_tick(name, placement, expected, beside):
    schedule = make_schedule(name, placement=placement, gradient_accumulation=4)
    assert str(tick(schedule)) == expected
    found = tick(schedule, beside=True)
    assert (str(found), found.always_sends) == (beside or expected, beside is not None)
    assert dataclasses.replace(found, always_sends=True) == tick(schedule, beside=True, always=True)


def test_without_gradients_only_f_and_y_are_left():
    schedule = make_schedule("grouped", placement=(A, 0, 1, A), gradient_accumulation=4)
    assert str(tick(schedule, backward=False)) == "F 0, F 1, F 2, F 3, y 1"
