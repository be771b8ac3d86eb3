"""Test losses that stages add to the last stage's, such as the balance loss of a mixture of experts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import (
    ALL_IPUS,
    NonFiniteLossError,
    Outputs,
    Pipeline,
    Stage,
    TrainOptions,
    VerificationError,
    make_mesh,
    make_train_step,
    replicate,
    verify,
)
from ipu_jax.engine import _hooks
from support.dense import largest_relative_error
from support.layers import ROWS, D, normal

M = 3


@pytest.fixture(autouse=True)
def bubbles_hold_nan(monkeypatch):
    monkeypatch.setattr(_hooks, "IDLE_FILL", float("nan"))


def adding(p, x, mb):
    x = mb["x"] if x is None else x
    y = jnp.tanh(x @ p["w"])
    return Outputs(y, loss=0.1 * jnp.mean(y**4))


def plain(p, x, mb):
    return jnp.sin(x @ p["w"])


def last(p, x, mb):
    y = x @ p["w"]
    return Outputs(jnp.mean((y - mb["y"]) ** 2), loss=0.3 * jnp.mean(jnp.abs(y)), aux=jnp.mean(y))


FUNCTIONS = [adding, plain, adding, last]
PARAMS = {f"p{i}": {"w": normal(D, D, seed=i)} for i in range(4)}


def dense(params, x, y):
    """Return the loss of one micro-batch with all that is added to it."""
    w = [params[f"p{i}"]["w"] for i in range(4)]
    a = jnp.tanh(x @ w[0])
    b = jnp.tanh(jnp.sin(a @ w[1]) @ w[2])
    out = b @ w[3]
    return jnp.mean((out - y) ** 2) + 0.1 * jnp.mean(a**4) + 0.1 * jnp.mean(b**4) + 0.3 * jnp.mean(jnp.abs(out))


def pipeline_of(places, **options):
    stages = [
        Stage(fn, params=f"p{i}", ipu=ALL_IPUS if place is None else place, name=f"s{i}")
        for i, (fn, place) in enumerate(zip(FUNCTIONS, places, strict=True))
    ]
    specs = {f"p{i}": PartitionSpec() for i, place in enumerate(places) if place is None}
    return Pipeline(stages, gradient_accumulation=M, specs=specs, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "reduction"),
    [("grouped", "mean"), ("1f1b", "sum"), ("gpipe", "mean"), ("zb-h1", "sum"), ("sequential", "sum")],
)
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 0, 1, 1), (None, 0, 1, None)])
def test_added_losses_count_like_the_loss(places, schedule, reduction):
    pipeline = pipeline_of(places, schedule=schedule, reduction=reduction, mesh=make_mesh(2, 4))
    batch = {"x": normal(2, M, ROWS, D, seed=1), "y": normal(2, M, ROWS, D, seed=2)}
    params = pipeline.shard(PARAMS)
    (loss, _), gradients = pipeline.value_and_grad(params, batch)

    def twin(params):
        return jnp.mean(jax.vmap(jax.vmap(lambda x, y: dense(params, x, y)))(batch["x"], batch["y"]))

    expected, of_mean = jax.value_and_grad(twin)(PARAMS)
    scale = 2 * M if reduction == "sum" else 1
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert largest_relative_error(pipeline.unshard(gradients), jax.tree.map(lambda g: scale * g, of_mean)) < 1e-5
    assert float(pipeline.loss(params, batch)[0]) == pytest.approx(float(expected), rel=1e-5)


def test_verify_sees_an_added_loss():
    """A reference that adds nothing is another model: its loss and gradients differ."""
    pipeline = pipeline_of((0, 0, 1, 1))
    batch = {"x": normal(M, ROWS, D, seed=1), "y": normal(M, ROWS, D, seed=2)}
    params = pipeline.shard(PARAMS)
    expected = np.mean([dense(PARAMS, x, y) for x, y in zip(batch["x"], batch["y"], strict=True)])
    assert verify(pipeline, params, batch).reference_loss == pytest.approx(expected, rel=1e-5)
    without = Stage(adding, params="p0", name="s0", reference=lambda *args: adding(*args).y)
    with pytest.raises(VerificationError, match=r"^the loss differs from the unsharded program's by more than"):
        verify(pipeline.replace(stages=[without, *pipeline.stages[1:]]), params, batch)


def test_prediction_ignores_added_losses():
    stages = [
        Stage(adding, params="p0", ipu=0),
        Stage(last, params="p1", ipu=1, predict=lambda p, x, mb: Outputs(x @ p["w"], loss=jnp.float32(1))),
    ]
    pipeline = Pipeline(stages)
    params = {name: PARAMS[name] for name in ("p0", "p1")}
    x = normal(2, ROWS, D, seed=1)
    outputs = pipeline.predict(pipeline.shard(params), {"x": x})
    np.testing.assert_allclose(outputs, jnp.tanh(x @ params["p0"]["w"]) @ params["p1"]["w"], rtol=1e-5, atol=1e-6)


def two_stages(loss, ipus=(0, 1)):
    first = lambda p, x, mb: Outputs(mb * p, loss=loss(p))  # noqa: E731
    return [Stage(first, params="a", ipu=ipus[0]), Stage(lambda p, x, mb: jnp.mean(x * p), params="b", ipu=ipus[1])]


@pytest.mark.parametrize(
    ("loss", "found"), [(lambda p: jnp.ones(3) * p, "float32[3]"), (lambda p: jnp.int32(1), "int32[]")]
)
def test_a_loss_that_is_no_float_scalar_is_refused(loss, found):
    pipeline = Pipeline(two_stages(loss))
    message = f"stage 'a' adds a loss of {found}: return Outputs(y, loss=...) with a float scalar"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pipeline.value_and_grad(pipeline.shard({"a": 1.0 * np.ones(()), "b": np.ones(())}), jnp.ones((1, 2)))


def test_a_loss_beside_counts_is_refused():
    stages = two_stages(lambda p: p)
    stages[1] = Stage(lambda p, x, mb: (jnp.sum(x * p), jnp.float32(2)), params="b", ipu=1)
    step = make_train_step(Pipeline(stages), optax.sgd(1.0), TrainOptions(weighted=True))
    with pytest.raises(
        ValueError, match=r"^weighted=True divides the loss by counts, but a stage adds a loss that has"
    ):
        step(step.init({"a": jnp.float32(1), "b": jnp.float32(1)}), jnp.ones((1, 2)))


def test_a_plain_loss_function_adds_by_itself():
    step = make_train_step(
        replicate(lambda p, mb: Outputs(jnp.mean(mb * p), loss=p), replication_factor=1), optax.sgd(1.0)
    )
    with pytest.raises(ValueError, match=r"^loss_fn returned Outputs\(loss=...\), which stages add to a loss: add it"):
        step(step.init(jnp.float32(1)), jnp.ones((1, 2)))


@pytest.mark.parametrize("bad", [0, 1])
def test_an_added_loss_that_is_not_finite_is_named(bad):
    """The last stage's own loss is finite: the micro-batch's is not."""
    first = lambda p, x, mb: Outputs(mb["x"] * p, loss=jnp.mean(mb["bad"]))  # noqa: E731
    stages = [
        Stage(first, params="a", ipu=0),
        Stage(lambda p, x, mb: jnp.mean(x * p), params="b", ipu=1),
    ]
    step = make_train_step(Pipeline(stages, gradient_accumulation=2), optax.sgd(0.1), TrainOptions(on_nonfinite="stop"))
    state = step.init({"a": jnp.float32(1), "b": jnp.float32(1)})
    batch = {"x": jnp.ones((2, 4)), "bad": jnp.zeros((2, 4)).at[bad, 0].set(jnp.inf)}
    state, _ = step(state, batch)
    with pytest.raises(NonFiniteLossError, match=rf"micro-batch {bad}, stage 0, 'a': batch\['bad'\] is not finite"):
        step.check(state)
