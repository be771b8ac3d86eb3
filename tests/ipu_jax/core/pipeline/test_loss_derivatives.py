"""Test derivatives of `Pipeline.loss`: they equal those of plain jax on one device, or say why there are none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.pipelines import Sharded, reference_value_and_grad
from support.dense import chain, largest_relative_error
from support.refusals import refusals, refused


def penalty(params: Any) -> Any:
    return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "ipus", "options"),
    [
        ((0, None), 2, {"schedule": "zb-h1", "reduction": "sum"}),
        pytest.param((0,), 1, {}, marks=pytest.mark.slow),
        pytest.param((None, 0, 1, None), 4, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_the_loss_and_a_penalty(places, ipus, options):
    model = chain(places, 3, replicas=options.pop("replicas", 1), like=False)
    pipeline = model.pipeline(ipus, **options)
    params = pipeline.shard(model.params)
    expected_loss, expected = model.twin()  # the gradient of the mean
    of_penalty, gradients_of_penalty = jax.jit(jax.value_and_grad(penalty))(model.params)

    @jax.jit
    @jax.value_and_grad
    def total(params: Sharded, batch: Any) -> Any:
        return 2 * pipeline.loss(params, batch) + penalty(params)

    value, gradients = total(params, model.batch)
    assert float(value) == pytest.approx(float(2 * expected_loss + of_penalty), rel=1e-5)
    assert isinstance(gradients, Sharded)
    sums = jax.tree.map(lambda a, b: np.asarray(2 * a) + np.asarray(b), expected, gradients_of_penalty)
    assert largest_relative_error(pipeline.unshard(gradients), sums) < 1e-5


@pytest.mark.slow
def test_the_derivative_along_a_change_of_the_weights():
    model = chain((0, None), 2)
    pipeline = model.pipeline(2)
    change = jax.tree.map(lambda w: np.cos(7 * np.asarray(w)), model.params)
    loss, along = jax.jvp(
        lambda p: pipeline.loss(p, model.batch), [pipeline.shard(model.params)], [pipeline.shard(change)]
    )
    expected_loss, expected = model.twin()
    inner = jax.tree.map(lambda g, c: np.vdot(g, c), expected, change)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert float(along) == pytest.approx(float(sum(jax.tree.leaves(inner))), rel=1e-4)


# which loss it is

W = {"a": np.arange(6, dtype=np.float32).reshape(3, 2) / 6 - 0.4, "b": np.array([[1.5], [-2.5]], np.float32)}
X = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)


def stateful(**options: Any) -> Pipeline:
    """In training there is noise and a state that counts; in evaluation there is a factor of the state."""

    def first(w, x, mb, *, state, key):
        return Outputs(mb @ w + jax.random.normal(key, (2,)), state=state + 1, aux={"seen": state})

    def first_in_evaluation(w, x, mb, *, state, key):
        assert key is None
        return Outputs(state * (mb @ w), aux={"top": mb.max()})

    stages = [
        Stage(first, params="a", state="s", random=True, evaluate=first_in_evaluation),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="b", ipu=1),
    ]
    return Pipeline(stages, gradient_accumulation=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_what_is_differentiated_is_the_evaluation(schedule):
    pipeline = stateful(schedule=schedule)
    params, state = pipeline.shard(W), pipeline.shard_state({"s": np.float32(3)})
    (value, aux), gradients = jax.value_and_grad(pipeline.loss, has_aux=True)(params, X, state)

    def plain(w):
        return jnp.mean((3 * (X @ w["a"]) @ w["b"]) ** 2)

    expected, by_hand = jax.value_and_grad(plain)(W)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert float(value) == pytest.approx(float(pipeline.loss(params, X, state)[0]), rel=1e-6)
    np.testing.assert_allclose(aux["a"]["top"], X.max((1, 2)), rtol=1e-6)
    assert largest_relative_error(pipeline.unshard(gradients), by_hand) < 1e-5


@pytest.mark.slow
def test_or_with_training_what_trains_with_its_new_state():
    pipeline = stateful()
    params, state, key = pipeline.shard(W), pipeline.shard_state({"s": np.float32(3)}), jax.random.key(8)
    train = jax.value_and_grad(lambda p: pipeline.loss(p, X, state, key, training=True), has_aux=True)
    (value, (aux, new)), gradients = train(params)
    (expected, _), expected_gradients, _ = reference_value_and_grad(pipeline, W, X, {"s": np.float32(3)}, key)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert largest_relative_error(pipeline.unshard(gradients), expected_gradients) < 1e-5
    np.testing.assert_array_equal(aux["a"]["seen"], [3, 4, 5])
    assert float(pipeline.unshard(new)["s"]) == 6
    alone, (_, new) = pipeline.loss(params, X, state, key, training=True)
    assert float(alone) == pytest.approx(float(expected), rel=1e-5)
    assert float(pipeline.unshard(new)["s"]) == 6
    with refused("stage 'a' takes a random key: pass key=jax.random.key(...)"):
        pipeline.loss(params, X, state, training=True)


@pytest.mark.slow
def test_frozen_leaves_have_zeros_and_half_ones_their_own_dtype():
    stage = Stage(lambda w, x, mb: jnp.mean((mb * w["scale"]) @ w["half"].astype(jnp.float32)), params="w")
    pipeline = Pipeline([stage], gradient_accumulation=3, frozen={"w": {"scale": True, "half": False}})
    params = pipeline.shard({"w": {"scale": np.array([1, 2, 3], np.float32), "half": jnp.ones((3, 2), jnp.bfloat16)}})
    found = pipeline.unshard(jax.grad(pipeline.loss)(params, X))["w"]
    np.testing.assert_array_equal(found["scale"], 0)
    assert found["half"].dtype == jnp.bfloat16
    expected = np.broadcast_to((X * np.array([1, 2, 3])).mean((0, 1))[:, None] / 2, (3, 2))
    np.testing.assert_allclose(np.asarray(found["half"], np.float32), expected, rtol=2**-7)


# what has no derivative


def simple() -> tuple[Pipeline, Sharded]:
    def last(w, x, mb):
        y = x @ w
        return jnp.mean(y**2), {"size": jnp.abs(y).mean(), "rows": 4}

    stages = [Stage(lambda w, x, mb: mb @ w, params="a"), Stage(last, params="b", ipu=ALL_IPUS, predict=last)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=3, specs={"b": P()})
    return pipeline, pipeline.shard(W)


def derivative(by: str = "params", *, wrap: Any = jax.grad, jit: bool = False, method: str = "loss") -> Any:
    """Return a call that differentiates a method of the simple pipeline by its weights or its batch."""
    pipeline, params = simple()

    def number(p, x):
        value = getattr(pipeline, method)(p, x)
        return value[0][0] if method == "value_and_grad" else value[0].sum()

    fn = wrap((lambda p: number(p, X)) if by == "params" else lambda x: number(params, x))
    return lambda: (jax.jit(fn) if jit else fn)(params if by == "params" else X)


def by_state() -> Any:
    pipeline = stateful()
    params, state = pipeline.shard(W), pipeline.shard_state({"s": np.float32(3)})
    return jax.grad(lambda s: pipeline.loss(params, X, s)[0])(state)


def through_aux(through: Any) -> Any:
    pipeline, params = simple()

    def total(params):
        loss, aux = pipeline.loss(params, X)
        return loss + through(aux["size"]).sum()

    return jax.grad(total)(params)


def twice_in_reverse(loss: Any) -> Any:
    return jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(jax.grad(loss)(p)))))


def twice_forward(loss: Any) -> Any:
    return lambda p: jax.jvp(jax.grad(loss), [p], [p])


BY_PARAMS = "only by params", "a weight of the first stage"


@refusals(
    (derivative("batch"), "no derivative by batch", "jax.lax.stop_gradient(batch)", *BY_PARAMS),
    (derivative("batch", jit=True), "no derivative by batch", "jax.lax.stop_gradient(batch)", *BY_PARAMS),
    (by_state, "no derivative by state", "jax.lax.stop_gradient(state)", *BY_PARAMS),
    (lambda: through_aux(lambda aux: aux), "no gradient flows through aux", "the function that is differentiated"),
    (derivative(wrap=twice_in_reverse), "pipeline.loss has no second derivatives", "outside of a Pipeline"),
    (derivative(wrap=twice_forward), "pipeline.loss has no second derivatives", "outside of a Pipeline"),
    (
        derivative(method="value_and_grad"),
        "pipeline.value_and_grad",
        "cannot be differentiated again",
        "jax.value_and_grad(pipeline.loss)",
    ),
    (derivative(method="predict"), "pipeline.predict", "cannot be differentiated:", "use pipeline.loss"),
)
def test_what_has_no_derivative_is_refused(call, holds):
    with refused(*holds):
        jax.eval_shape(call)


@pytest.mark.slow
def test_aux_that_is_stopped_changes_no_derivative():
    pipeline, params = simple()
    _, gradients = pipeline.value_and_grad(params, X)
    assert largest_relative_error(through_aux(jax.lax.stop_gradient), gradients) < 1e-6
