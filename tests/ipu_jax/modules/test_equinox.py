"""Test stages of Equinox modules against the modules themselves, vmapped on one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, equinox_stage, gather_stages
from support import one_device
from support.one_device import assert_trees_close

M, ROWS, D = 3, 4, 5


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, size, features, key):
        self.linear = eqx.nn.Linear(size, features, key=key)
        self.norm = eqx.nn.BatchNorm(features, axis_name="batch", momentum=0.5, mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.linear(x), state)
        return self.dropout(jnp.tanh(x), key=key), state


class Model(eqx.Module):
    body: Block
    head: Block

    def __init__(self):
        self.body, self.head = Block(D, 7, jax.random.key(0)), Block(7, 3, jax.random.key(1))


def loss_of(y, microbatch):
    return jnp.mean((y.sum(-1) - microbatch["y"]) ** 2)


BATCH = {
    "x": np.random.default_rng(0).normal(size=(M, ROWS, D)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(M, ROWS)).astype(np.float32),
}


def called(module, x, state, keys):
    leaves, treedef = jax.tree.flatten(state)
    state = jax.tree.unflatten(treedef, leaves)  # Equinox refuses a state that was set before
    over_rows = jax.vmap(
        lambda x, state, key: module(x, state, key=key), axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
    )
    return over_rows(x, state, keys)


@pytest.fixture(scope="module")
def model_and_state():
    return eqx.nn.make_with_state(Model)()


def test_training_and_evaluation_equal_the_modules_own_calls(model_and_state):
    model, of_model = model_and_state
    parts = [
        equinox_stage(model.body, "body", state=of_model, ipu=0, inputs="x", random=True),
        equinox_stage(model.head, "head", state=of_model, ipu=1, loss=loss_of, random=True),
    ]
    stages, params, state = gather_stages(parts)
    pipeline = Pipeline(stages, gradient_accumulation=M)
    key = jax.random.key(5)

    def apply_of(module):
        def apply(params, state, x, microbatch, key):
            x = microbatch["x"] if x is None else x
            return called(eqx.combine(params, module), x, state, jax.random.split(key, ROWS))

        return apply

    sharded, sharded_state = pipeline.shard(params), pipeline.shard_state(state)
    loss, gradients, new_state = pipeline.value_and_grad(sharded, BATCH, sharded_state, key)
    modules = [("body", apply_of(model.body)), ("head", apply_of(model.head))]
    expected = one_device.value_and_grad(modules, loss_of, params, state, BATCH, key)
    assert_trees_close((loss, pipeline.unshard(gradients), pipeline.unshard(new_state)), expected)

    def evaluated(microbatch):
        x, _ = called(eqx.nn.inference_mode(model.body), microbatch["x"], expected[2]["body"], None)
        return loss_of(called(eqx.nn.inference_mode(model.head), x, expected[2]["head"], None)[0], microbatch)

    losses = list(map(jax.jit(evaluated), one_device.microbatches_of(BATCH)))
    assert_trees_close(pipeline.loss(sharded, BATCH, new_state), np.mean(losses))


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


def test_other_things_are_refused():
    with pytest.raises(ValueError, match=r"^module=int of stage 'x' is not callable: give an Equinox module$"):
        equinox_stage(1, "x")
    with pytest.raises(ValueError, match=r"^state=dict of stage 'x' is not an eqx.nn.State: give the second"):
        equinox_stage(eqx.nn.Dropout(), "x", state={})
