"""Test that `Pipeline.loss` runs each stage's `evaluate`, and nothing else; the expected numbers are NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.layers import normal

ROWS, D, M = 3, 4, 3


def pipeline_of(schedule: str, replicas: int) -> Pipeline:
    """Return stages with a state that evaluation keeps, with columns on all IPUs, and with a skip and no key."""

    def unused(*args, **kwargs):
        raise AssertionError("evaluate goes before fn")

    def first_in_evaluation(w, x, mb, *, state):
        return Outputs(mb @ w * state, state="dropped", skips={"x": mb}, aux={"seen": state, "top": mb.max()})

    def second_in_evaluation(w, x, mb):
        return lax.all_gather(x @ w, "ipu", axis=1, tiled=True) + 1

    def third_in_evaluation(w, x, mb, *, key, skips):
        assert key is None
        loss = jnp.mean((x + 2 * skips["x"]) @ w)
        return loss, {"rows": x.sum(1)}

    stages = [
        Stage(unused, params="a", state="s", evaluate=first_in_evaluation),
        Stage(unused, params="b", ipu=ALL_IPUS, evaluate=second_in_evaluation),
        Stage(unused, params="c", ipu=1, random=True, takes=("x",), evaluate=third_in_evaluation),
    ]
    return Pipeline(
        stages, mesh=make_mesh(replicas, 2), schedule=schedule, gradient_accumulation=M, specs={"b": P(None, "ipu")}
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
