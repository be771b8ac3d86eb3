"""Test every family of schedules, and what `test_matrix` has not: more stages an IPU, tables for costs or read."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, make_mesh, verify
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from ipu_jax.schedules import Schedule
from support.against_plain import assert_equals_its_twin, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.dense import chain, largest_relative_error
from support.layers import normal


@functools.cache
def small(stages: int) -> Any:
    """Return weights of products with a vector, a batch, and the loss and gradients by plain jax."""
    weights = {f"p{i}": normal(3, seed=i) + 1 for i in range(stages)}
    batch = normal(3, 2, 3, seed=9)

    def plain(weights):
        h = batch
        for w in weights.values():
            h = jnp.sin(h * w)
        return jnp.mean(h)

    return weights, batch, jax.jit(jax.value_and_grad(plain))(weights)


# many other tests have the rest
@pytest.mark.fast("looped-zb", "sequential")
@pytest.mark.parametrize("name", SCHEDULES)
def test_loss_and_every_gradient_of_each_family_equal_plain_jax(name):
    places = make_schedule(name, ipus=2, gradient_accumulation=1).placement
    weights, batch, expected = small(len(places))

    def fn(w, x, mb):
        return jnp.sin((mb if x is None else x) * w)

    stages, _ = stages_at(places, [*[fn] * (len(places) - 1), lambda w, x, mb: jnp.mean(fn(w, x, mb))])
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), schedule=name, gradient_accumulation=3)
    loss, gradients = pipeline.value_and_grad(pipeline.shard(weights), batch)
    assert largest_relative_error((loss, pipeline.unshard(gradients)), expected) < 1e-5


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


@pytest.mark.slow
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
        ("zbv", (0, 1, 2, 3, 3, 2, 1, 0), 5, {"F": [1, 2], "B": [1, 1]}),
        ("looped", (0, 1, 2, 0, 1, 2), 4, {"F": [1, 1], "B": [1, 3]}),
    ],
    ids=["zbv", "looped"],
)
@pytest.mark.slow
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
