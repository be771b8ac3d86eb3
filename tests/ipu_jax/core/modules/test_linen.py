"""Test stages of `flax.linen` modules against the modules' own `apply` on one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.nn import linen_stage
from support.one_device import BATCH, ROWS, D, assert_trees_close, loss_of, microbatches_of


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(self.features)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.tanh(x))


BODY, HEAD = Block(7), nn.Dense(3)


@pytest.fixture(scope="module")
def variables():
    init_body = lambda key: BODY.init(key, jnp.zeros((1, D)), train=False)
    init_head = lambda key: HEAD.init(key, jnp.zeros((1, 7)))
    return jax.jit(lambda key: {"body": init_body(key), "head": init_head(key)})(jax.random.key(0))


def parts_of(variables, ipus):
    return [
        linen_stage(BODY, variables["body"], "body", ipu=ipus[0], inputs="x", random=True),
        linen_stage(HEAD, variables["head"], "head", ipu=ipus[1], loss=loss_of),
    ]


def test_the_function_of_a_stage_is_the_modules_own_apply(variables):
    body, _ = parts_of(variables, (0, 1))
    microbatch, key = microbatches_of(BATCH)[1], jax.random.key(2)
    out = body.stage.fn(body.params["body"], None, microbatch, state=body.state["body"], key=key)
    expected: Any = BODY.apply(
        variables["body"], microbatch["x"], train=True, rngs={"dropout": key}, mutable=["batch_stats"]
    )
    assert_trees_close((out.y, out.state), expected)


def test_evaluation_equals_the_modules_own_apply(variables):
    body, _ = parts_of(variables, (0, 1))
    microbatch = microbatches_of(BATCH)[0]
    stats = jax.tree.map(lambda leaf: leaf + 0.5, body.state["body"])
    expected: Any = BODY.apply({**variables["body"], **stats}, microbatch["x"], train=False)
    evaluated = body.stage.function("evaluation")
    for key in (None, jax.random.key(0)):  # a key does not turn dropout on
        out = evaluated(body.params["body"], None, microbatch, state=stats, key=key)
        np.testing.assert_allclose(out.y, expected, rtol=1e-6)


def test_params_and_state_are_the_modules_collections(variables):
    body, _ = parts_of(variables, (0, 1))
    assert body.params == {"body": variables["body"]["params"]}
    assert body.state == {"body": {"batch_stats": variables["body"]["batch_stats"]}}
    assert (body.stage.name, body.stage.params, body.stage.state, body.stage.random) == ("body", "body", "body", True)


def test_a_module_without_state_and_randomness_makes_a_stage_without():
    dense = nn.Dense(2)
    variables = dense.init(jax.random.key(0), jnp.zeros((1, D)))
    part = linen_stage(dense, variables, "dense", ipu=1, recompute="all")
    stage = part.stage
    assert (stage.state, stage.random, stage.ipu, stage.recompute, part.state) == (None, False, 1, "all", {})
    x = jnp.ones((ROWS, D))
    out = stage.fn(part.params["dense"], x, None)
    np.testing.assert_array_equal(out.y, dense.apply(variables, x))
    assert out.state is None


def test_a_module_without_weights_makes_a_stage_without():
    part = linen_stage(nn.Dropout(0.5), {}, "drop", random=True, training={"deterministic": False})
    assert (part.stage.params, part.params, part.stage.name) == (None, {}, "drop")
    x, key = jnp.ones((ROWS, D)), jax.random.key(1)
    expected = nn.Dropout(0.5).apply({}, x, deterministic=False, rngs={"dropout": key})
    np.testing.assert_array_equal(part.stage.fn(None, x, None, key=key).y, expected)


class Told(nn.Module):
    """Returns the modes that it was told."""

    def __call__(self, x, deterministic: bool, use_running_average: bool, is_training: bool, training: bool, scale=1):
        return x * scale, (deterministic, use_running_average, is_training, training)


@pytest.mark.parametrize("role", ["fn", "evaluate"])
def test_every_usual_name_of_the_mode_is_known(role):
    stage = linen_stage(Told(), {}, "told").stage
    in_training = role == "fn"
    _, told = getattr(stage, role)(None, 1.0, None).y
    assert told == (not in_training, not in_training, in_training, in_training)


def test_the_mode_may_be_given_in_the_modules_own_words():
    class Scaled(nn.Module):
        def __call__(self, x, scale):
            return x * scale

    stage = linen_stage(Scaled(), {}, "scaled", training={"scale": 3.0}, evaluation={"scale": 4.0}).stage
    assert (stage.fn(None, 1.0, None).y, stage.function("evaluation")(None, 1.0, None).y) == (3.0, 4.0)
