"""Test that like blocks are one class, also beside concurrent stages, whose messages lie elsewhere."""

import contextlib

import pytest

from support.against_plain import assert_equals_its_twin, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import chain
from support.platforms import programs_for

BOTH_ENDS = (None, 0, 1, 2, None)
slow = pytest.mark.slow


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=slow)])
@pytest.mark.parametrize(
    ("schedule", "places", "classes"),
    [
        ("grouped", BOTH_ENDS, [(0,), (1, 2, 3), (4,)]),
        ("1f1b", BOTH_ENDS, [(0,), (1, 2, 3), (4,)]),
        ("zb-h1", BOTH_ENDS, [(0,), (1, 2, 3), (4,)]),
        *(pytest.param(name, BOTH_ENDS, [(0,), (1, 2, 3), (4,)], marks=slow) for name in ("gpipe", "interleaved")),
        pytest.param("sequential", BOTH_ENDS, [(0,), (1, 2, 3), (4,)], marks=slow),
        # on one side only
        pytest.param("grouped", (None, 2, 0, 1, 3), [(0,), (1, 2, 3), (4,)], marks=slow),
        pytest.param("1f1b", (2, 0, 1, 3, None), [(0,), (1, 2, 3), (4,)], marks=slow),
        # a concurrent stage on each side of each block
        ("1f1b", (None, 0, None, 1, None), [(0,), (1, 3), (2,), (4,)]),
        pytest.param("grouped", (None, 0, None, 1, None), [(0,), (1, 3), (2,), (4,)], marks=slow),
        # IPU 0 sends the second round's gradient where block 1 would write the embedding's
        ("looped", (None, 0, 1, 0, 1, None), [(0,), (1,), (2,), (3,), (4,), (5,)]),
        pytest.param("grouped", (None, 0, 1, 0, 1, None), [(0,), (1,), (2,), (3,), (4,), (5,)], marks=slow),
        pytest.param(
            *("looped-zb", (None, 0, 1, 2, 0, 1, 2, None)), [(0,), (1,), (2, 3), (4,), (5, 6), (7,)], marks=slow
        ),
    ],
)
def test_loss_and_every_gradient_equal_the_dense_twin(schedule, places, classes, platform):
    model, ipus = chain(places, 7), 1 + max(place or 0 for place in places)
    with contextlib.nullcontext() if platform == "cpu" else programs_for(platform):
        pipeline = assert_equals_its_twin(model, ipus, {"schedule": schedule})
        plan = pipeline.placement.plan(pipeline.shard(model.params), model.batch)
    assert sorted(plan.classes) == classes
