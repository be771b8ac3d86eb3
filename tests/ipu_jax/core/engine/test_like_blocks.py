"""Test that like blocks are one class, also beside concurrent stages, whose messages lie elsewhere, on each platform.

A TPU's or a GPU's program runs on CPUs here: only the name of the platform differs.
"""

import contextlib

import pytest

from support.against_plain import assert_equals_its_twin, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import chain
from support.platforms import programs_for


@pytest.mark.fast("grouped-zb-ends-tpu")
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize(
    ("schedule", "places", "classes"),
    [
        *(
            pytest.param(name, (None, 0, 1, 2, None), [(0,), (1, 2, 3), (4,)], id=f"{name}-ends")
            for name in ("grouped", "grouped-zb", "1f1b", "zb-h1", "gpipe", "interleaved", "sequential")
        ),
        *(
            pytest.param(name, (0, 1, 2, 3), [(0,), (1, 2), (3,)], id=f"{name}-local")
            for name in ("grouped", "grouped-zb")
        ),
        pytest.param("grouped", (None, 2, 0, 1, 3), [(0,), (1, 2, 3), (4,)], id="grouped-before"),
        pytest.param("1f1b", (2, 0, 1, 3, None), [(0,), (1, 2, 3), (4,)], id="1f1b-after"),
        *(
            pytest.param(name, (None, 0, None, 1, None), [(0,), (1, 3), (2,), (4,)], id=f"{name}-each side")
            for name in ("1f1b", "grouped")
        ),
        # IPU 0 sends the second round's gradient where block 1 would write the embedding's
        *(
            pytest.param(name, (None, 0, 1, 0, 1, None), [(k,) for k in range(6)], id=f"{name}-rounds")
            for name in ("looped", "grouped", "grouped-zb")
        ),
        pytest.param(
            *("looped-zb", (None, 0, 1, 2, 0, 1, 2, None)), [(0,), (1,), (2, 3), (4,), (5, 6), (7,)], id="looped-zb"
        ),
    ],
)
def test_loss_and_every_gradient_equal_the_dense_twin(schedule, places, classes, platform):
    model, ipus = chain(places, 5), 1 + max(place or 0 for place in places)
    with contextlib.nullcontext() if platform == "cpu" else programs_for(platform):
        pipeline = assert_equals_its_twin(model, ipus, {"schedule": schedule})
        params = pipeline.shard(model.params)
        plan = pipeline.placement.plan(params, model.batch)
        if schedule == "grouped":
            assert float(pipeline.loss(params, model.batch)) == pytest.approx(float(model.twin()[0]), rel=1e-5)
    assert sorted(plan.classes) == classes
