"""Test which values of F are stashed where one function's residual follows from another's, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Outputs, Pipeline, Stage
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, one_by_one
from ipu_jax.core.programs.segment_program import trace_segment

ROWS, WIDTH = 4, 8


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))


def two_products(weights, x, microbatch):
    for w in weights:
        x = jnp.tanh(product(x, w)) * 2
    return x


def stash_of(fn):
    stage = Stage(fn, params="w")
    weights = [jnp.ones((WIDTH, WIDTH))] * 2
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    program = trace_segment(
        one_by_one((stage,))[0], {"w": weights}, Message(x), MicrobatchInputs(None, (None,)), {}, last=False
    )
    return [leaf.shape for leaf in program.stash]


def test_the_input_of_a_custom_vjp_is_computed_again_from_what_is_stashed_anyway():
    # x, and the two results of tanh: the second product's input is twice the first of them
    assert stash_of(two_products) == [(ROWS, WIDTH)] * 3


def attention(w, x):
    q, k, v = jnp.split(x @ jnp.tile(w, 3), 3, axis=-1)
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


EMPTY = {
    "product": lambda w, x: jnp.tanh(x @ w),
    "custom": lambda w, x: jnp.tanh(product(x, w)) * 2,
    "scan": lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0],
    "attention": attention,
    "norm": lambda w, x: jax.nn.standardize(x @ w) * w[0],
    "table": lambda w, x: x @ w + w[jnp.argmax(x, axis=-1)],
    "checkpoint": jax.checkpoint(lambda w, x: jnp.tanh(x @ w)),
}


SCHEDULES = ("grouped", "zb-h1", "sequential")


@pytest.mark.fast("custom-zb-h1")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, schedule) for name in EMPTY for schedule in SCHEDULES],
)
def test_gradients_of_micro_batches_without_rows(name, schedule):
    """Sums over rows are 0, so the loss is the sum of w**2 of two weights, and the gradient of each is 2 * w."""
    fn = EMPTY[name]
    stages = [
        Stage(lambda w, x, mb: fn(w, mb), params="a", ipu=0),
        Stage(lambda w, x, mb: Outputs(fn(w, x), loss=jnp.sum(w**2)), params="b", ipu=1),
        Stage(lambda w, x, mb: jnp.sum(fn(w, x) ** 2) + jnp.sum(w**2), params="c", ipu=1),
    ]
    params = {name: np.linspace(-1, i, WIDTH * WIDTH, dtype="f4").reshape(WIDTH, WIDTH) for i, name in enumerate("abc")}
    pipeline = Pipeline(stages, schedule=schedule, gradient_accumulation=3)
    loss, gradients = pipeline.value_and_grad(pipeline.shard(params), np.zeros((3, 0, WIDTH), "f4"))
    expected = {name: 2.0 * params[name] * (name != "a") for name in "abc"}
    np.testing.assert_allclose(loss, sum(np.sum(params[name].astype(float) ** 2) for name in "bc"), rtol=1e-6)
    for name, gradient in pipeline.unshard(gradients).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-6)
