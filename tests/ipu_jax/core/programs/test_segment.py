"""Test segments: joined stages, and the skips, state, aux and keys that pass between them."""

from ipu_jax import ALL_IPUS, Stage
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, segments_of, whole
from ipu_jax.core.schedules import make_schedule
from support.inputs import mlp

# segments


def test_neighbours_that_stand_in_one_place_are_one_segment():
    places = (0, 0, 1, ALL_IPUS, ALL_IPUS, 1, 0)
    stages = tuple(Stage(mlp, params=f"g{i % 3}", ipu=ipu) for i, ipu in enumerate(places))
    schedule = make_schedule(
        "grouped", gradient_accumulation=2, ipus=2, placement=tuple(stage.place for stage in stages)
    )
    segments = segments_of(stages, schedule)
    assert [(s.first, len(s.stages), s.place) for s in segments] == [
        (0, 2, 0),
        (2, 1, 1),
        (3, 2, None),
        (5, 1, 1),
        (6, 1, 0),
    ]
    assert [s.groups for s in segments] == [("g0", "g1"), ("g2",), ("g0", "g1"), ("g2",), ("g0",)]
    assert segments[0].name == "g0 + g1"


def test_a_segment_runs_its_stages_one_after_the_other_each_with_its_group():
    double = Stage(lambda p, x, mb: 2 * x, name="double")
    add = Stage(lambda p, x, mb: x + p, params="a")
    message, state, aux = whole((add, double, add), "training")(
        {"a": 3.0}, Message(1.0), MicrobatchInputs(None, (None,) * 3), {}
    )
    assert (message, state, aux) == (Message(11.0), {}, {})
