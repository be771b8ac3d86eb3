"""Test that tasks and messages overlap on chips under the two-phase clock, and not on CPUs.

`test_like_blocks` compares what they compute. A TPU's program runs on CPUs here: only the name of the platform differs.
"""

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend import core

from support.dense import chain
from support.platforms import programs_for


@pytest.fixture(params=["tpu", "gpu"])
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    with programs_for(request.param):
        yield request.param


def exchanges_outside_guards(schedule: str) -> int:
    """Return how many exchanges of a tick are in no guard."""
    model = chain((0, 1), 5)
    pipeline = model.pipeline(2, schedule=schedule)
    jaxpr = jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch).jaxpr
    return sum(eqn.primitive.name == "ppermute" for eqn in equations_of_tick(jaxpr))


def equations_of_tick(jaxpr: Any) -> list[Any]:
    """Return the equations of the scan over ticks that are in no guard."""
    for eqn in jaxpr.eqns:
        inner = [*core.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "scan":
            return list(inner[0].eqns)
        for found in filter(None, map(equations_of_tick, inner)):
            return found
    return []


def test_messages_travel_beside_tasks_on_chips_under_the_two_phase_clock(platform):
    assert exchanges_outside_guards("grouped") == exchanges_outside_guards("grouped-zb") == 2, "y and dx"
    assert exchanges_outside_guards("1f1b") == 0, "under the one-phase clock the next tick needs them"


def test_on_cpus_each_exchange_is_in_a_guard():
    assert {exchanges_outside_guards(schedule) for schedule in ("grouped", "grouped-zb", "1f1b")} == {0}
