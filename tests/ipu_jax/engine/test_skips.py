"""Test skips that go past stages, and what stages return besides their result."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.engine import _hooks
from support.dense import largest_relative_error
from support.layers import ROWS, D, normal


@pytest.fixture(autouse=True)
def bubbles_hold_nan(monkeypatch):
    monkeypatch.setattr(_hooks, "IDLE_FILL", float("nan"))


# skips


def sender(p, x, mb):
    x = mb["x"] if x is None else x
    h = x @ p["w"]
    return Outputs(jnp.tanh(h), skips={"long": {"h": jnp.sin(h) * 2, "rows": jnp.arange(ROWS)}})


def passer(p, x, mb):
    return jnp.sin(x @ p["w"])


def taker(p, x, mb, *, skips):
    return x @ p["w"] + skips["long"]["h"] * skips["long"]["rows"][:, None]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "gpipe", "zb-h1", "sequential"])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 0, 1, 1), (0, None, 1, 2), (None, 0, None, 1), (0, 1, None, 2)])
def test_skips_pass_along_with_their_gradients(places, schedule):
    functions = [sender, passer, taker, functools.partial(_taking_loss)]
    stages = [
        Stage(
            fn, params=f"p{i}", ipu=ALL_IPUS if place is None else place, takes=("long",) if i > 1 else (), name=f"s{i}"
        )
        for i, (fn, place) in enumerate(zip(functions, places, strict=True))
    ]
    specs = {f"p{i}": PartitionSpec() for i, place in enumerate(places) if place is None}
    pipeline = Pipeline(stages, gradient_accumulation=3, schedule=schedule, specs=specs, mesh=make_mesh(1, 4))
    params = {f"p{i}": {"w": normal(D, D, seed=i)} for i in range(4)}
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}
    loss, gradients = pipeline.value_and_grad(pipeline.shard(params), batch)

    def twin(params):
        w = [params[f"p{i}"]["w"] for i in range(4)]
        long = jnp.sin(batch["x"] @ w[0]) * 2
        h = jnp.sin(jnp.tanh(batch["x"] @ w[0]) @ w[1]) @ w[2] + long * np.arange(ROWS)[None, :, None]
        return jnp.mean((h @ w[3] + long - batch["y"]) ** 2)

    expected, expected_gradients = jax.value_and_grad(twin)(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert largest_relative_error(pipeline.unshard(gradients), expected_gradients) < 1e-5
    assert float(pipeline.loss(pipeline.shard(params), batch)) == pytest.approx(float(expected), rel=1e-5)


def _taking_loss(p, x, mb, *, skips):
    return jnp.mean((x @ p["w"] + skips["long"]["h"] - mb["y"]) ** 2)


def test_a_skip_is_sent_as_far_as_its_last_taker_and_no_further():
    functions = [sender, taker, passer, lambda p, x, mb: jnp.mean(x @ p["w"])]
    stages = [
        Stage(fn, params=f"p{i}", ipu=i, takes=("long",) if fn is taker else (), name=f"s{i}")
        for i, fn in enumerate(functions)
    ]
    pipeline = Pipeline(stages, gradient_accumulation=3, mesh=make_mesh(1, 4))
    params = pipeline.shard({f"p{i}": {"w": normal(D, D, seed=i)} for i in range(4)})
    report = pipeline.report(params, {"x": normal(3, ROWS, D)}, compile=False)
    y = h = dx = 4 * ROWS * D
    rows = 4 * ROWS
    assert [part.sent for part in report.ipus] == [y + h + rows, y + (dx + h), y + dx, dx]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [Stage(lambda p, x, mb: mb), Stage(lambda p, x, mb, *, skips: x.mean(), takes=("a",), name="end")],
            "stage 'end' takes skip 'a', which no earlier stage sends: return Outputs(y, skips={'a': ...}) from one",
        ),
        (
            [Stage(lambda p, x, mb: Outputs(mb, skips={"a": mb}), name="start"), Stage(lambda p, x, mb: x.mean())],
            "stage 'start' sends skip 'a', which no later stage takes: leave it out",
        ),
        (
            [
                Stage(lambda p, x, mb: Outputs(mb, skips={"a": mb})),
                Stage(lambda p, x, mb: Outputs(x, skips={"a": x}), name="middle"),
                Stage(lambda p, x, mb, *, skips: x.mean(), takes=("a",)),
            ],
            "stage 'middle' sends skip 'a', which is still on its way from an earlier stage: give it another name",
        ),
        (
            [Stage(lambda p, x, mb: Outputs(mb, state=mb), name="start"), Stage(lambda p, x, mb: x.mean())],
            "stage 'start' returns state but holds none: name its group, Stage(..., state='name')",
        ),
        (
            [
                Stage(lambda p, x, mb: Outputs(mb, aux=mb), name="twin"),
                Stage(lambda p, x, mb: (x.mean(), x), name="twin", ipu=1),
            ],
            "two stages called 'twin' return aux: give them names of their own, name=...",
        ),
        (
            [
                Stage(lambda p, x, mb: Outputs(mb, aux=mb), name="twin"),
                Stage(lambda p, x, mb: (x.mean(), x), name="twin"),
            ],
            "two stages called 'twin' return aux: give them names of their own, name=...",
        ),
    ],
)
def test_what_stages_say_of_each_other_must_fit(stages, message):
    pipeline = Pipeline(stages)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jax.eval_shape(pipeline.value_and_grad, pipeline.shard({}), np.ones((1, 2)))


# aux


def test_every_stage_may_return_an_aux():
    stages = [
        Stage(lambda p, x, mb: Outputs(mb + 1, aux={"top": mb.max(), "rows": jnp.arange(2)}), name="a"),
        Stage(lambda p, x, mb: Outputs(2 * x, aux=x.min()), ipu=ALL_IPUS, name="b"),
        Stage(lambda p, x, mb: Outputs(x.mean(), aux=x > 3), ipu=1, name="c"),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=3)
    batch = np.arange(6, dtype=np.float32).reshape(3, 2)
    for value in (pipeline.value_and_grad(pipeline.shard({}), batch)[0], pipeline.loss(pipeline.shard({}), batch)):
        loss, aux = value
        assert float(loss) == 7
        np.testing.assert_array_equal(aux["a"]["top"], [1, 3, 5])
        np.testing.assert_array_equal(aux["a"]["rows"], [[0, 1]] * 3)
        np.testing.assert_array_equal(aux["b"], [1, 3, 5])
        np.testing.assert_array_equal(aux["c"], batch > 0.5)
