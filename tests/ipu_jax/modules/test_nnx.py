"""Test stages of `flax.nnx` modules against calls of the modules themselves on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ipu_jax import Pipeline, gather_stages, nnx_stage
from support import one_device
from support.one_device import assert_trees_close

M, ROWS, D = 2, 4, 5


class Block(nnx.Module):
    def __init__(self, size: int, features: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(size, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.5, rngs=rngs)
        self.before, self.after = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.after(nnx.tanh(self.norm(self.linear(self.before(x)))))


def loss_of(y, microbatch):
    return jnp.mean((y.sum(-1) - microbatch["y"]) ** 2)


BATCH = {
    "x": np.random.default_rng(0).normal(size=(M, ROWS, D)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(M, ROWS)).astype(np.float32),
}


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


def test_training_equals_the_modules_own_calls(modules):
    body, head = modules
    parts = [nnx_stage(body, "body", ipu=0, inputs="x"), nnx_stage(head, "head", ipu=1, loss=loss_of)]
    stages, params, state = gather_stages(parts)
    pipeline = Pipeline(stages, gradient_accumulation=M)
    key = jax.random.key(5)
    applies = [
        ("body", lambda params, stats, x, mb, key: called(body, "train", (params, stats), mb["x"], key)),
        ("head", lambda params, stats, x, mb, key: called(head, "train", (params,), x)),
    ]
    loss, gradients, new_state = pipeline.value_and_grad(
        pipeline.shard(params), BATCH, pipeline.shard_state(state), key
    )
    expected = one_device.value_and_grad(applies, loss_of, params, state, BATCH, key)
    assert_trees_close((loss, pipeline.unshard(gradients), pipeline.unshard(new_state)), expected)


def test_evaluation_equals_the_modules_own_calls(modules):
    part = nnx_stage(modules[0], "body", inputs="x")
    microbatch = one_device.microbatches_of(BATCH)[0]
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
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
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


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_a_module_sows_is_dropped():
    class Sowing(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return self.norm(x)

    part = nnx_stage(Sowing(), "sowing")
    out = part.stage.fn(part.params["sowing"], jnp.ones((2, 3)), None, state=part.state["sowing"])
    assert jax.tree.structure(out.state) == jax.tree.structure(part.state["sowing"])


def test_modules_of_other_libraries_are_refused():
    with pytest.raises(ValueError, match=r"^module=function is not an nnx.Module: for flax.linen use linen_stage"):
        nnx_stage(lambda x: x, "x")
