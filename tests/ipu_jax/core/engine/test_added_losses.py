"""Test losses that stages add to the last stage's, such as the balance loss of a mixture of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step, verify
from ipu_jax.pipelines import VerificationError
from ipu_jax.steps import NonFiniteLossError, replicate
from support.against_plain import assert_equals_plain, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.layers import ROWS, D, normal
from support.refusals import refusals, refused

M = 3


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
    stages, specs = stages_at(places, FUNCTIONS)
    return Pipeline(stages, gradient_accumulation=M, specs=specs, **options)


@pytest.mark.fast("places1-zb-h1-sum")
@pytest.mark.parametrize(
    ("schedule", "reduction"),
    [("grouped", "mean"), ("1f1b", "sum"), ("gpipe", "mean"), ("zb-h1", "sum"), ("sequential", "sum")],
)
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 0, 1, 1), (None, 0, 1, None)])
def test_added_losses_count_like_the_loss(places, schedule, reduction):
    pipeline = pipeline_of(places, schedule=schedule, reduction=reduction, mesh=make_mesh(2, 4))
    batch = {"x": normal(2, M, ROWS, D, seed=1), "y": normal(2, M, ROWS, D, seed=2)}

    def twin(params):
        return jnp.mean(jax.vmap(jax.vmap(lambda x, y: dense(params, x, y)))(batch["x"], batch["y"]))

    expected = assert_equals_plain(pipeline, PARAMS, batch, twin, scale=2 * M if reduction == "sum" else 1)
    if schedule == "grouped":
        assert float(pipeline.loss(pipeline.shard(PARAMS), batch)[0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_verify_sees_an_added_loss():
    """A reference that adds nothing is another model: its loss and gradients differ."""
    pipeline = pipeline_of((0, 0, 0, 0))
    batch = {"x": normal(M, ROWS, D, seed=1), "y": normal(M, ROWS, D, seed=2)}
    params = pipeline.shard(PARAMS)
    expected = np.mean([dense(PARAMS, x, y) for x, y in zip(batch["x"], batch["y"], strict=True)])
    assert verify(pipeline, params, batch).reference_loss == pytest.approx(expected, rel=1e-5)
    without = Stage(adding, params="p0", reference=lambda *args: adding(*args).y)
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
    first = lambda p, x, mb: Outputs(mb * p, loss=loss(p))
    return [Stage(first, params="a", ipu=ipus[0]), Stage(lambda p, x, mb: jnp.mean(x * p), params="b", ipu=ipus[1])]


def stepping(pipeline, params, **options):
    step = make_train_step(pipeline, optax.sgd(1.0), TrainOptions(**options))
    state = step.init(params)
    return lambda: step(state, np.ones((1, 2)))


def adding_a_loss(loss):
    pipeline = Pipeline(two_stages(loss))
    return lambda: pipeline.value_and_grad(pipeline.shard({"a": ONE, "b": ONE}), np.ones((1, 2)))


def with_counts():
    stages = two_stages(lambda p: p)
    stages[1] = Stage(lambda p, x, mb: (jnp.sum(x * p), jnp.float32(2)), params="b", ipu=1)
    return stepping(Pipeline(stages), {"a": ONE, "b": ONE}, weighted=True)


def from_a_loss_function():
    return stepping(replicate(lambda p, mb: Outputs(jnp.mean(mb * p), loss=p), replication_factor=1), ONE)


ONE = np.float32(1)
A_SCALAR = "return Outputs(y, loss=...) with a float scalar"


@refusals(
    (lambda: adding_a_loss(lambda p: jnp.ones(3) * p), "stage 'a' adds a loss of float32[3]", A_SCALAR),
    (lambda: adding_a_loss(lambda p: jnp.int32(1)), "stage 'a' adds a loss of int32[]", A_SCALAR),
    (with_counts, "weighted=True divides the loss by counts", "a stage adds a loss that has none", "as a skip"),
    (from_a_loss_function, "loss_fn returned Outputs(loss=...)", "add it"),
)
def test_an_added_loss_that_there_cannot_be_is_refused(call, holds):
    run = call()  # what it prepares may be compiled
    with refused(*holds):
        run()


@pytest.mark.slow
def test_an_added_loss_that_is_not_finite_is_named():
    """The last stage's own loss is finite: the micro-batch's is not."""
    first = lambda p, x, mb: Outputs(mb["x"] * p, loss=jnp.mean(mb["bad"]))
    stages = [
        Stage(first, params="a", ipu=0),
        Stage(lambda p, x, mb: jnp.mean(x * p), params="b", ipu=1),
    ]
    step = make_train_step(Pipeline(stages, gradient_accumulation=2), optax.sgd(0.1), TrainOptions(on_nonfinite="stop"))
    for bad in (0, 1):
        state = step.init({"a": jnp.float32(1), "b": jnp.float32(1)})
        batch = {"x": jnp.ones((2, 4)), "bad": jnp.zeros((2, 4)).at[bad, 0].set(jnp.inf)}
        state, _ = step(state, batch)
        message = rf"micro-batch {bad}, stage 0, 'a': batch\['bad'\] is not finite"
        with pytest.raises(NonFiniteLossError, match=message):
            step.check(state)
