"""Test that `Pipeline.loss`, and nothing else, runs each stage's `evaluate`; the expected numbers are NumPy's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, reference_value_and_grad
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.layers import normal

ROWS, D, M = 3, 4, 3


def pipeline_of(schedule: str, replicas: int) -> Pipeline:
    """In evaluation the first stage multiplies by its state, the second adds 1, and the third draws nothing."""

    def first(w, x, mb, *, state):
        return Outputs(mb @ w, state=state + 1, skips={"x": mb}, aux={"trained": jnp.float32(1)})

    def first_in_evaluation(w, x, mb, *, state):
        return Outputs(mb @ w * state, state="dropped", skips={"x": mb}, aux={"seen": state, "top": mb.max()})

    def second(w, x, mb):
        return lax.all_gather(x @ w, "ipu", axis=1, tiled=True)

    def third(w, x, mb, *, key, skips):
        return jnp.mean((x + skips["x"]) @ w) * jax.random.uniform(key)

    def third_in_evaluation(w, x, mb, *, key, skips):
        assert key is None
        loss = jnp.mean((x + 2 * skips["x"]) @ w)
        return loss, {"rows": x.sum(1)}

    stages = [
        Stage(first, params="a", state="s", evaluate=first_in_evaluation),
        Stage(second, params="b", ipu=ALL_IPUS, evaluate=lambda w, x, mb: second(w, x, mb) + 1),
        Stage(third, params="c", ipu=1, random=True, takes=("x",), evaluate=third_in_evaluation),
    ]
    return Pipeline(
        stages,
        mesh=make_mesh(replicas, 2),
        schedule=schedule,
        gradient_accumulation=M,
        specs={"b": P(None, "ipu")},
    )


PARAMS = {name: normal(D, D, seed=seed) for seed, name in enumerate("abc")}
STATE = {"s": normal(D, seed=9)}


@pytest.mark.parametrize(("schedule", "replicas"), [("zb-h1", 2), pytest.param("grouped", 1, marks=pytest.mark.slow)])
def test_evaluation_by_hand(schedule, replicas):
    pipeline = pipeline_of(schedule, replicas)
    lead = (M,) if replicas == 1 else (replicas, M)
    batch = normal(*lead, ROWS, D, seed=5)
    x = batch @ PARAMS["a"] * STATE["s"] @ PARAMS["b"] + 1
    expected = np.mean((x + 2 * batch) @ PARAMS["c"])
    params, state = pipeline.shard(PARAMS), pipeline.shard_state(STATE)
    loss, aux = pipeline.loss(params, batch, state)
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert jax.tree.structure(aux) == jax.tree.structure({"a": {"seen": 0, "top": 0}, "c": {"rows": 0}})
    np.testing.assert_allclose(aux["a"]["seen"], np.broadcast_to(STATE["s"], (*lead, D)), rtol=1e-6)
    np.testing.assert_allclose(aux["a"]["top"], batch.max((-2, -1)), rtol=1e-6)
    np.testing.assert_allclose(aux["c"]["rows"], x.sum(-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(pipeline.unshard(state)["s"], STATE["s"])


def test_neither_training_nor_the_unsharded_program_evaluates():
    pipeline = pipeline_of("grouped", 1)
    batch, key = normal(M, ROWS, D, seed=5), jax.random.key(3)
    keys = [functools.reduce(jax.random.fold_in, (0, m, 2), key) for m in range(M)]
    rows = (batch @ PARAMS["a"] @ PARAMS["b"] + batch) @ PARAMS["c"]
    expected = np.mean(rows.mean((-2, -1)) * np.array([jax.random.uniform(of_stage) for of_stage in keys]))
    params, state = pipeline.shard(PARAMS), pipeline.shard_state(STATE)
    results: Any = [
        pipeline.value_and_grad(params, batch, state, key),
        reference_value_and_grad(pipeline, PARAMS, batch, STATE, key),
    ]
    for ((loss, aux), _, new), whole in zip(results, (False, True), strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
        assert set(aux) == {"a"}
        np.testing.assert_array_equal(aux["a"]["trained"], np.ones(M))
        np.testing.assert_allclose((new if whole else pipeline.unshard(new))["s"], STATE["s"] + M, rtol=1e-6)
