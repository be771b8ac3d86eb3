"""Test stages of `flax.nnx` modules against calls of the modules themselves on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ipu_jax.nn import nnx_stage
from support.one_device import BATCH, D, assert_trees_close, microbatches_of


class Block(nnx.Module):
    def __init__(self, size: int, features: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(size, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.5, rngs=rngs)
        self.before, self.after = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.after(nnx.tanh(self.norm(self.linear(self.before(x)))))


def called(module, mode, variables, x, key=None):
    """Call a copy of the module in the words of NNX's own documentation; return y and the new batch statistics."""
    copy = nnx.clone(module)
    getattr(copy, mode)()
    nnx.update(copy, *variables)
    if key is not None:
        nnx.reseed(copy, default=key)
    return copy(x), nnx.state(copy, nnx.BatchStat)


@pytest.fixture(scope="module")
def modules():
    return nnx.jit(lambda: (Block(D, 7, nnx.Rngs(0)), nnx.Linear(7, 3, rngs=nnx.Rngs(1))))()


def test_the_function_of_a_stage_is_the_modules_own_call(modules):
    part = nnx_stage(modules[0], "body", inputs="x")
    microbatch, key, stats = microbatches_of(BATCH)[1], jax.random.key(2), part.state["body"]
    expected = called(modules[0], "train", (part.params["body"], stats), microbatch["x"], key)
    out = part.stage.fn(part.params["body"], None, microbatch, state=stats, key=key)
    assert_trees_close((out.y, out.state), expected)


def test_evaluation_equals_the_modules_own_calls(modules):
    part = nnx_stage(modules[0], "body", inputs="x")
    microbatch = microbatches_of(BATCH)[0]
    stats = jax.tree.map(lambda leaf: leaf + 0.5, part.state["body"])
    expected, _ = called(modules[0], "eval", (part.params["body"], stats), microbatch["x"])
    out = part.stage.function("evaluation")(part.params["body"], None, microbatch, state=stats, key=None)
    np.testing.assert_allclose(out.y, expected, rtol=1e-6)


def test_weights_and_statistics_are_split_by_the_kind_of_variable(modules):
    part = nnx_stage(modules[0], "body", inputs="x")
    assert nnx.to_pure_dict(part.params["body"]).keys() == {"linear", "norm"}
    assert nnx.to_pure_dict(part.state["body"])["norm"].keys() == {"mean", "var"}
    assert part.stage.random


def numbers_of(module):
    """Return copies of all variables, keys as integers."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), nnx.state(module))


def test_the_module_itself_does_not_change(modules):
    module = nnx.clone(modules[0])
    module.eval()
    before = numbers_of(module)
    part = nnx_stage(module, "body", inputs="x")
    microbatch = {"x": BATCH["x"][0]}
    part.stage.fn(part.params["body"], None, microbatch, state=part.state["body"], key=jax.random.key(0))
    assert module.norm.use_running_average
    assert module.after.deterministic
    jax.tree.map(np.testing.assert_array_equal, numbers_of(module), before)


class TwoStreams(nnx.Module):
    def __init__(self):
        self.noise, self.dropout = nnx.Rngs(noise=0), nnx.Rngs(dropout=0)

    def __call__(self, x):
        return x + jax.random.normal(self.noise.noise(), x.shape) + jax.random.normal(self.dropout.dropout(), x.shape)


def test_streams_of_several_names_get_keys_of_their_own():
    part = nnx_stage(TwoStreams(), "two")
    key, x = jax.random.key(3), jnp.zeros(4)
    module = TwoStreams()
    nnx.reseed(module, dropout=jax.random.fold_in(key, 0), noise=jax.random.fold_in(key, 1))
    np.testing.assert_allclose(part.stage.fn(None, x, None, key=key).y, module(x), rtol=1e-6)
    assert (part.params, part.state) == ({}, {})
