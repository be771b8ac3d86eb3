"""Test what `test_matrix` has not: more stages per IPU than two, and messages that wait for one of two like stages."""

import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, verify
from ipu_jax.core.schedules import make_schedule
from support.against_plain import assert_equals_its_twin, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import chain
from support.layers import normal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ipus", "micro_batches", "rounds"), [("looped-zb", 2, 3, 3), ("zb-wave", 2, 3, 3), ("zb-wave", 3, 4, 4)]
)
def test_more_stages_per_ipu_than_two(name, ipus, micro_batches, rounds):
    schedule = make_schedule(name, gradient_accumulation=micro_batches, ipus=ipus, rounds=rounds)
    if ipus == 3:
        places = (*schedule.placement, None)
        schedule = make_schedule(name, gradient_accumulation=micro_batches, ipus=ipus, placement=places)
    assert_equals_its_twin(chain(schedule.placement, micro_batches, like=False), ipus, {"schedule": schedule})


@pytest.mark.parametrize(
    ("name", "places", "micro_batches", "waiting"),
    [
        ("zbv", (0, 1, 2, 3, 3, 2, 1, 0), 5, {"F": [1, 2], "B": [1, 1]}),
        ("looped", (0, 1, 2, 0, 1, 2), 4, {"F": [1, 1], "B": [1, 3]}),
    ],
    ids=["zbv", "looped"],
)
@pytest.mark.fast("looped")
def test_messages_may_wait_for_the_second_of_two_like_stages_alone(name, places, micro_batches, waiting):
    """Stages 1 and 2 are one piece of program, which comes after rings that only stage 2 needs."""
    stages = [Stage(lambda w, x, mb: jnp.sin(x), ipu=ipu, name=f"stage {i}") for i, ipu in enumerate(places)]
    stages[0] = Stage(lambda w, x, mb: mb @ w, params="first", ipu=places[0])
    stages[-1] = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=places[-1])
    pipeline = Pipeline(stages, schedule=name, gradient_accumulation=micro_batches)
    params = pipeline.shard({"first": normal(3, 3, seed=0), "last": normal(3, 2, seed=1)})
    batch = np.random.default_rng(2).normal(size=(micro_batches, 5, 3)).astype(np.float32)
    plan = pipeline.placement.plan(params, batch)
    assert (1, 2) in plan.classes
    of = plan.schedule.inbox_depth
    assert {"F": [of(i - 1, "F") for i in (1, 2)], "B": [of(i, "B") for i in (1, 2)]} == waiting
    verify(pipeline, params, batch)
