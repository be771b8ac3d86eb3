"""Test that tasks and messages overlap on chips under the two-phase clock, and not on CPUs.

A TPU's program runs on CPUs here: only the name of the platform differs.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection
from support.against_plain import (
    assert_equals_plain,
    bubbles_hold_nan,  # noqa: F401 (a fixture)
)
from support.platforms import programs_for

N, D, V, M = 4, 6, 11, 5


@pytest.fixture(params=["tpu", "gpu"])
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    with programs_for(request.param):
        yield request.param


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def pipeline_of(ipus: int, ends: bool, schedule: str, rounds: int = 1) -> tuple[Pipeline, dict[str, Any], Any, Any]:
    """Return a pipeline, its weights, a batch, and its mean loss in plain jax."""
    rng = np.random.default_rng(ipus)
    normal = lambda *shape: (rng.normal(size=shape) / 2).astype(np.float32)
    names = [f"layer{i}" for i in range(ipus * rounds)]
    params: dict[str, Any] = {name: normal(D, D) for name in names}
    batch = {"x": normal(M, N, D), "ids": rng.integers(0, V, (M, N))}
    stages = [
        Stage(lambda w, x, mb: layer(w, mb["x"] if x is None else x), params=name, ipu=i % ipus)
        for i, name in enumerate(names)
    ]
    if ends:
        params["table"] = normal(V, D)
        stages = [
            Stage(lambda t, x, mb: embedding(t, mb["ids"], size=V), params="table", ipu=ALL_IPUS, name="embed"),
            *stages,
            Stage(split_loss, params="table", ipu=ALL_IPUS, name="loss"),
        ]
    else:
        stages.append(Stage(lambda w, x, mb: jnp.mean((x - mb["x"]) ** 2), ipu=(ipus * rounds - 1) % ipus))

    def plain(params: Any) -> Any:
        x = params["table"][batch["ids"]] if ends else batch["x"]
        for name in names:
            x = layer(params[name], x)
        if not ends:
            return jnp.mean((x - batch["x"]) ** 2)
        chances = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(chances, batch["ids"][..., None], -1))

    pipeline = Pipeline(
        stages,
        mesh=make_mesh(1, ipus),
        schedule=schedule,
        gradient_accumulation=M,
        specs={"table": P("ipu")} if ends else {},
    )
    return pipeline, params, batch, plain


def split_loss(table: Any, x: Any, mb: Any) -> Any:
    return jnp.mean(log_softmax_cross_entropy(tied_projection(x, table, size=V), mb["ids"], size=V))


@pytest.mark.parametrize("ends", [False, True], ids=["basic", "concurrent ends"])
@pytest.mark.parametrize(
    ("ipus", "schedule", "rounds"),
    [
        *((ipus, name, rounds) for ipus, rounds in ((2, 1), (4, 1), (2, 2)) for name in ("grouped", "grouped-zb")),
        (3, "sequential", 1),
        (3, "1f1b", 1),
    ],
)
@pytest.mark.fast("tpu-2-grouped-zb-1-concurrent ends")
def test_loss_and_every_gradient_equal_plain_jax(ipus, schedule, rounds, ends, platform):
    pipeline, params, batch, plain = pipeline_of(ipus, ends, schedule, rounds)
    expected = assert_equals_plain(pipeline, params, batch, plain)
    if rounds == 2 and ends:
        assert float(pipeline.loss(pipeline.shard(params), batch)) == pytest.approx(float(expected), rel=1e-5)


def exchanges_outside_guards(schedule: str) -> int:
    """Return how many exchanges of a tick are in no guard."""
    pipeline, params, batch, _ = pipeline_of(2, False, schedule)
    jaxpr = jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(params), batch).jaxpr
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
