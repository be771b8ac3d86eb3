"""Test pipelines made of a list of layers: where the layers are, and that they compute what the list computes."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline
from support.dense import largest_relative_error

LAYERS, ROWS, D, M = 5, 3, 4, 3
rng = np.random.default_rng(0)
PARAMS = [{"w": rng.normal(size=(D, D)).astype(np.float32) / 2} for _ in range(LAYERS)]
BATCH = {"x": rng.normal(size=(M, ROWS, D)).astype(np.float32), "y": rng.normal(size=(M, ROWS, D)).astype(np.float32)}


def block(p, x):
    return x + jnp.tanh(x @ p["w"])


def loss(x, microbatch):
    return jnp.mean((x - microbatch["y"]) ** 2)


def inputs(microbatch):
    return microbatch["x"]


def forward(params, x):
    for p in params:
        x = x + jnp.tanh(x @ p["w"])
    return x


def places(pipeline: Pipeline) -> list:
    return [stage.ipu for stage in pipeline.stages]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ipus": 2, "schedule": "1f1b"}, {"ipus": 2, "rounds": 2, "schedule": "looped"}])
def test_it_trains_and_predicts_what_the_list_computes(options):
    pipeline, params = Pipeline.from_layers(
        [block] * LAYERS, PARAMS, loss=loss, inputs=inputs, gradient_accumulation=M, **options
    )
    value, gradients = pipeline.value_and_grad(params, BATCH)
    expected, by_layer = jax.value_and_grad(lambda p: jnp.mean((forward(p, BATCH["x"]) - BATCH["y"]) ** 2))(PARAMS)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    found = pipeline.unshard(gradients)
    assert largest_relative_error([found[f"layer {k}"] for k in range(LAYERS)], by_layer) < 1e-5
    outputs = pipeline.predict(params, {"x": BATCH["x"][:1]})
    np.testing.assert_allclose(outputs, forward(PARAMS, BATCH["x"][:1]), rtol=1e-4, atol=1e-5)
    assert str(pipeline).splitlines()[1].split() == ["0", "layer", "0", "IPU", "0", "params", "'layer", "0'"]


def test_layers_may_be_pairs_and_some_without_weights_and_there_may_be_replicas():
    relu = (lambda p, x: jax.nn.relu(x) + len(p), {})
    pipeline, params = Pipeline.from_layers(
        [(block, PARAMS[0]), relu, (block, PARAMS[1])],
        loss=lambda x, mb: (jnp.mean(x), {"top": x.max()}),
        ipus=1,
        replicas=2,
    )
    assert pipeline.unshard(params).keys() == {"layer 0", "layer 2"}
    x = BATCH["x"][:2, None]
    value, aux = pipeline.loss(params, x)
    y = forward(PARAMS[1:2], jax.nn.relu(forward(PARAMS[:1], x)))
    assert float(value) == pytest.approx(float(y.mean()), rel=1e-5)
    np.testing.assert_allclose(aux["top"], y.max((2, 3)), rtol=1e-5)


def wide(p, x):
    return x + jnp.tanh(x @ p["w"]) @ jnp.ones((D, 64)) @ jnp.ones((64, D))


def test_layers_are_placed_by_number_by_cost_or_by_flops():
    layers = [wide, block, block, block, block]
    make = lambda **given: Pipeline.from_layers(layers, PARAMS, loss=loss, inputs=inputs, ipus=2, **given)[0]  # noqa: E731
    shapes = {name: jax.ShapeDtypeStruct((ROWS, D), jnp.float32) for name in ("x", "y")}
    assert places(make()) == [0, 0, 0, 1, 1, 1]
    assert places(make(costs=[1, 1, 1, 1, 9])) == [0, 0, 0, 0, 1, 1]
    assert places(make(microbatch=shapes)) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": block, "params": PARAMS}, f"layers={block!r} are no layers: give a list of functions layer(p"),
        ({"layers": [block] * 4, "params": PARAMS}, "4 layers and 5 params: give the weights of each layer"),
        ({"layers": [3] * 5, "params": PARAMS}, "layer 0 is 3: give a function of (params, x)"),
        ({"layers": [block]}, f"layer 0 is {block!r}: give (function, params), or params="),
        ({"loss": None}, "loss=None is not callable: give a function of (x, microbatch)"),
        ({"inputs": "x"}, "inputs='x' is not callable: give a function of (microbatch)"),
        ({"costs": [1] * 5, "microbatch": BATCH}, "costs and microbatch are both given: give the layers' costs, or a "),
        ({"costs": [1, 2]}, "costs has 2 numbers for 5 layers: give one for each layer"),
        ({"ipus": 6}, "5 layers cannot fill 6 IPUs: cut them finer, or take fewer IPUs"),
    ],
    ids=itertools.count(),  # the messages contain addresses
)
def test_what_does_not_fit_together(given, message):
    layers = {"layers": [block] * 5, "params": PARAMS} if "layers" not in given else {}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Pipeline.from_layers(**{"loss": loss, "ipus": 2} | layers | given)
