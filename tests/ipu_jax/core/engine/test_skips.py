"""Test skips that go past stages, and what stages return besides their result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from support.against_plain import assert_equals_plain, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.layers import ROWS, D, normal
from support.refusals import refusals, refused


def sender(p, x, mb):
    x = mb["x"] if x is None else x
    h = x @ p["w"]
    return Outputs(jnp.tanh(h), skips={"long": {"h": jnp.sin(h) * 2, "rows": jnp.arange(ROWS)}})


def passer(p, x, mb):
    return jnp.sin(x @ p["w"])


def taker(p, x, mb, *, skips):
    return x @ p["w"] + skips["long"]["h"] * skips["long"]["rows"][:, None]


@pytest.mark.fast("places3-zb-h1")
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "gpipe", "zb-h1", "sequential"])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 0, 1, 1), (0, None, 1, 2), (None, 0, None, 1), (0, 1, None, 2)])
def test_skips_pass_along_with_their_gradients(places, schedule):
    stages, specs = stages_at(places, [sender, passer, taker, _taking_loss])
    stages[2:] = [dataclasses.replace(stage, takes=("long",)) for stage in stages[2:]]
    pipeline = Pipeline(stages, gradient_accumulation=3, schedule=schedule, specs=specs, mesh=make_mesh(1, 4))
    params = {f"p{i}": {"w": normal(D, D, seed=i)} for i in range(4)}
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}

    def twin(params):
        w = [params[f"p{i}"]["w"] for i in range(4)]
        long = jnp.sin(batch["x"] @ w[0]) * 2
        h = jnp.sin(jnp.tanh(batch["x"] @ w[0]) @ w[1]) @ w[2] + long * np.arange(ROWS)[None, :, None]
        return jnp.mean((h @ w[3] + long - batch["y"]) ** 2)

    expected = assert_equals_plain(pipeline, params, batch, twin)
    if schedule == "grouped":
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


def traced_together(*stages):
    pipeline = Pipeline(stages)
    return lambda: jax.eval_shape(pipeline.value_and_grad, pipeline.shard({}), np.ones((1, 2)))


def sending(name="", **given):
    """Return a stage that hands x on, and returns it as well as each of `given` says."""

    def fn(p, x, mb):
        x = mb if x is None else x
        return Outputs(x, **{kind: {"a": x} if kind == "skips" else x for kind in given})

    return Stage(fn, name=name)


END = Stage(lambda p, x, mb: x.mean())
TAKER = Stage(lambda p, x, mb, *, skips: x.mean(), takes=("a",), name="end")
TWIN = Stage(lambda p, x, mb: (x.mean(), x), name="twin")
TWINS = "two stages called 'twin' return aux", "names of their own", "name=..."


@refusals(
    (traced_together(sending(), TAKER), "stage 'end' takes skip 'a'", "no earlier stage", "skips={'a': ...}"),
    (traced_together(sending("start", skips=1), END), "stage 'start' sends skip 'a'", "no later stage", "leave it out"),
    (
        traced_together(sending(skips=1), sending("middle", skips=1), TAKER),
        "stage 'middle' sends skip 'a'",
        "still on its way",
        "another name",
    ),
    (traced_together(sending("start", state=1), END), "stage 'start' returns state", "Stage(..., state='name')"),
    (traced_together(sending("twin", aux=1), dataclasses.replace(TWIN, ipu=1)), *TWINS),
    (traced_together(sending("twin", aux=1), TWIN), *TWINS),
)
def test_what_stages_say_of_each_other_must_fit(call, holds):
    with refused(*holds):
        call()


# aux


@pytest.mark.slow
def test_every_stage_may_return_an_aux():
    stages = [
        Stage(lambda p, x, mb: Outputs(mb + 1, aux={"top": mb.max(), "rows": jnp.arange(2), "no": None}), name="a"),
        Stage(lambda p, x, mb: Outputs(2 * x, aux=x.min()), ipu=ALL_IPUS, name="b"),
        Stage(lambda p, x, mb: Outputs(x.mean(), aux=[x > 3, x.astype("bfloat16")]), ipu=1, name="c"),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=3)
    batch = np.arange(6, dtype=np.float32).reshape(3, 2)
    tops = {"top": np.array([1, 3, 5], np.float32), "rows": np.array([[0, 1]] * 3, np.int32), "no": None}
    y = 2 * (batch + 1)
    expected = {"a": tops, "b": batch.min(1) + 1, "c": [y > 3, y.astype("bfloat16")]}
    for loss, aux in (pipeline.value_and_grad(pipeline.shard({}), batch)[0], pipeline.loss(pipeline.shard({}), batch)):
        assert float(loss) == 7
        assert jax.tree.structure(aux) == jax.tree.structure(expected)
        assert jax.tree.map(lambda leaf: leaf.dtype, aux) == jax.tree.map(lambda leaf: leaf.dtype, expected)
        jax.tree.map(np.testing.assert_array_equal, aux, expected)
