"""Test schedules that `test_matrix` has not: more stages an IPU, tables made for costs or read, waiting messages."""

import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, verify
from ipu_jax.core.schedules import StageCosts, find_schedule, make_schedule
from ipu_jax.schedules import Schedule
from support.against_plain import assert_equals_its_twin, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import chain
from support.layers import normal


@pytest.mark.parametrize(
    ("name", "ipus", "micro_batches", "rounds"),
    [
        ("looped-zb", 2, 3, 3),
        *(pytest.param("zb-wave", ipus, m, m, marks=pytest.mark.slow) for ipus, m in ((2, 3), (3, 4))),
    ],
)
def test_more_stages_per_ipu_than_two(name, ipus, micro_batches, rounds):
    schedule = make_schedule(name, micro_batches=micro_batches, ipus=ipus, rounds=rounds)
    if ipus == 3:
        places = (*schedule.placement, None)
        schedule = make_schedule(name, micro_batches=micro_batches, ipus=ipus, placement=places)
    assert_equals_its_twin(chain(schedule.placement, micro_batches, like=False), ipus, {"schedule": schedule})


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_a_table_made_for_the_costs_of_unlike_stages(lockstep):
    """Four layers there and back over two IPUs, and a concurrent head: the first layer costs 14 times the third."""
    placement, forward = (0, 1, 1, 0, None), [420, 175, 30, 210, 245]
    costs = StageCosts(forward, forward, forward, stash=[12, 35, 5, 6, 0])
    found = find_schedule(costs, placement=placement, micro_batches=5, stash_limit=70, lockstep=lockstep)
    assert found.schedule.name == "auto"
    assert found.schedule.weight is not None
    assert_equals_its_twin(chain(placement, 5, like=False), 2, {"schedule": found.schedule})


def test_a_backward_in_reverse_from_torchs_csv():
    schedule = Schedule.from_torch_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0")
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="first", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=1),
    ]
    pipeline = Pipeline(stages, schedule=schedule, gradient_accumulation=3)
    params = pipeline.shard({"first": normal(3, 5, seed=0), "last": normal(5, 2, seed=1)})
    verify(pipeline, params, np.random.default_rng(2).normal(size=(3, 4, 3)).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "places", "micro_batches", "waiting"),
    [
        pytest.param(
            *("zbv", (0, 1, 2, 3, 3, 2, 1, 0), 5, {"F": [1, 2], "B": [1, 1]}),
            marks=pytest.mark.slow,
        ),
        ("looped", (0, 1, 2, 0, 1, 2), 4, {"F": [1, 1], "B": [1, 3]}),
    ],
)
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
    assert {"F": [plan.queue(i - 1, "F") for i in (1, 2)], "B": [plan.queue(i, "B") for i in (1, 2)]} == waiting
    verify(pipeline, params, batch)
