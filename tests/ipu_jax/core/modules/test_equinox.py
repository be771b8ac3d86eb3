"""Test stages of Equinox modules against the modules themselves, vmapped on one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.nn import equinox_stage
from support.one_device import BATCH, ROWS, D, assert_trees_close, microbatches_of


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, size, features, mode, key):
        self.linear = eqx.nn.Linear(size, features, key=key)
        self.norm = eqx.nn.BatchNorm(features, axis_name="batch", momentum=0.5, mode=mode)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.linear(x), state)
        return self.dropout(jnp.tanh(x), key=key), state


class Model(eqx.Module):
    body: Block
    head: eqx.nn.Linear

    def __init__(self, mode):
        self.body, self.head = Block(D, 7, mode, jax.random.key(0)), eqx.nn.Linear(7, 3, key=jax.random.key(1))


def called(module, x, state, keys):
    leaves, treedef = jax.tree.flatten(state)
    state = jax.tree.unflatten(treedef, leaves)  # Equinox refuses a state that was set before
    over_rows = jax.vmap(
        lambda x, state, key: module(x, state, key=key), axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
    )
    return jax.jit(over_rows)(x, state, keys)


@pytest.fixture(scope="module", params=["batch", "ema"])
def model_and_state(request):
    return eqx.filter_jit(eqx.nn.make_with_state(Model))(request.param)


def test_the_function_of_a_stage_is_the_modules_own_call(model_and_state):
    model, of_model = model_and_state
    part = equinox_stage(model.body, "body", state=of_model, ipu=0, inputs="x", random=True)
    microbatch, key, state = microbatches_of(BATCH)[1], jax.random.key(2), part.state["body"]
    expected = called(model.body, microbatch["x"], state, jax.random.split(key, ROWS))
    out = part.stage.fn(part.params["body"], None, microbatch, state=state, key=key)
    assert_trees_close((out.y, out.state), expected)


def test_evaluation_equals_the_modules_own_calls(model_and_state):
    model, of_model = model_and_state
    part = equinox_stage(model.body, "body", state=of_model, inputs="x", random=True)
    microbatch = microbatches_of(BATCH)[0]
    state = jax.tree.map(lambda leaf: leaf + 1, part.state["body"])
    expected, _ = called(eqx.nn.inference_mode(model.body), microbatch["x"], state, None)
    out = part.stage.function("evaluation")(part.params["body"], None, microbatch, state=state, key=None)
    np.testing.assert_allclose(out.y, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_the_floating_arrays_and_the_rest_stays():
    mlp = eqx.nn.MLP(D, 2, 3, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    part = equinox_stage(mlp, "mlp")
    assert [leaf.shape for leaf in jax.tree.leaves(part.params)] == [(3, D), (3,), (2, 3), (2,)]
    assert (part.state, part.stage.state, part.stage.random) == ({}, None, False)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, part.params["mlp"])
    x = jnp.asarray(BATCH["x"][0])
    np.testing.assert_allclose(
        part.stage.fn(doubled, x, None).y, jax.vmap(eqx.combine(doubled, mlp))(x), rtol=1e-6, atol=1e-6
    )


def test_a_module_without_vmap_takes_the_whole_micro_batch():
    dropout = eqx.nn.Dropout(0.5, inference=True)
    part = equinox_stage(dropout, "dropout", vmap=None, random=True)
    x, key = jnp.ones((ROWS, D)), jax.random.key(1)
    expected = eqx.nn.Dropout(0.5)(x, key=key)
    np.testing.assert_array_equal(part.stage.fn(None, x, None, key=key).y, expected)
    np.testing.assert_array_equal(part.stage.function("evaluation")(None, x, None, key=None).y, x)
    assert part.params == {}
