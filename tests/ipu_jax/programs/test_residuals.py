"""Test which values of F are stashed where one function's residual follows from another's, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, verify
from ipu_jax.programs.segment import Message, MicrobatchInputs, one_by_one
from ipu_jax.programs.segment_program import trace_segment

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


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_gradients_are_those_of_the_unsharded_program(recompute):
    def loss(weights, x, microbatch):
        return jnp.mean(two_products(weights, x, microbatch) ** 2)

    keys = jax.random.split(jax.random.key(0), 5)
    params = {name: list(jax.random.normal(key, (2, WIDTH, WIDTH)) / 3) for name, key in zip("ab", keys, strict=False)}
    first = Stage(lambda w, x, mb: two_products(w, mb, mb), params="a", ipu=0, recompute=recompute)
    pipeline = Pipeline([first, Stage(loss, params="b", ipu=1, recompute=recompute)], gradient_accumulation=3)
    batch = jax.random.normal(keys[4], (3, ROWS, WIDTH))
    sharded = pipeline.shard(params)
    verify(pipeline, sharded, batch)

    def dense(params):  # without the custom rule
        x = batch
        for w in params["a"] + params["b"]:
            x = jnp.tanh(x @ w) * 2
        return jnp.mean(x**2)

    expected = jax.grad(dense)(params)
    found = pipeline.unshard(pipeline.value_and_grad(sharded, batch)[1])
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
