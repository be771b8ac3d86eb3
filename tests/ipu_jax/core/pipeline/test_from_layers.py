"""Test pipelines made of a list of layers: where the layers are, and that they compute what the list computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline
from support.dense import largest_relative_error
from support.refusals import refusals, refused

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
    make = lambda **given: Pipeline.from_layers(layers, PARAMS, loss=loss, inputs=inputs, ipus=2, **given)[0]
    shapes = {name: jax.ShapeDtypeStruct((ROWS, D), jnp.float32) for name in ("x", "y")}
    assert places(make()) == [0, 0, 0, 1, 1, 1]
    assert places(make(costs=[1, 1, 1, 1, 9])) == [0, 0, 0, 0, 1, 1]
    assert places(make(microbatch=shapes)) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("layers_per_ipu", "ipus", "counts"),
    [
        ([2, 3], 2, [2, 3]),
        (np.array([1, 4]), 2, [1, 4]),
        ([-1, -1], 2, [2, 3]),
        ((1, 2, -1, -1), 4, [1, 2, 1, 1]),
        ([-1, 2, -1], 3, [1, 2, 2]),
        ([-1, 1, -1, 1], 4, [1, 1, 2, 1]),
        ([-1], 1, [5]),
        ([-1, -1, -1], 3, [1, 1, 3]),  # the last gets the whole remainder, as in optimum-graphcore
    ],
)
def test_layers_are_placed_by_their_numbers_per_ipu(layers_per_ipu, ipus, counts):
    pipeline, _ = made(layers_per_ipu=layers_per_ipu, ipus=ipus)()
    *of_layers, of_loss = places(pipeline)
    assert of_layers == [ipu for ipu, count in enumerate(counts) for _ in range(count)]
    assert of_loss == ipus - 1


def made(**given: Any) -> Any:
    layers = {"layers": [block] * 5, "params": PARAMS} if "layers" not in given else {}
    return lambda: Pipeline.from_layers(**{"loss": loss, "ipus": 2} | layers | given)


@refusals(
    (made(layers=block, params=PARAMS), "layers=<function block", "not a list of layers", "give functions layer(p"),
    (made(layers=[block] * 4, params=PARAMS), "4 layers and 5 params", "the weights of each layer"),
    (made(layers=[3] * 5, params=PARAMS), "layer 0 is 3", "a function of (params, x)"),
    (made(layers=[block]), "layer 0 is <function block", "give (function, params), or params="),
    (made(loss=None), "loss=None", "callable", "a function of (x, microbatch)"),
    (made(inputs="x"), "inputs='x'", "callable", "a function of (microbatch)"),
    (made(costs=[1] * 5, microbatch=BATCH), "costs and microbatch are given together", "give the layers' costs, or a "),
    (made(costs=[1] * 5, layers_per_ipu=[-1, -1]), "costs and layers_per_ipu are given together", "or the numbers of"),
    (made(microbatch=BATCH, layers_per_ipu=[-1, -1]), "microbatch and layers_per_ipu are given together", "or the num"),
    *(
        (
            made(layers_per_ipu=wrong),
            f"layers_per_ipu={wrong!r} does not give numbers of layers for 2 IPUs",
            "at least 1, or -1",
        )
        for wrong in ([5], [1, 2, 2], [0, 5], [-2, 5], [2.0, 3], [True, 4], "23", 5)
    ),
    *(
        (made(layers_per_ipu=wrong), f"layers_per_ipu={wrong!r} cannot place 5 layers", "add up to 5")
        for wrong in ([2, 2], [3, 3], [5, -1], [6, -1])
    ),
    (
        made(layers_per_ipu=[2, 3], rounds=2),
        "layers_per_ipu=[2, 3] with rounds=2",
        "one round",
        "leave one of them out",
    ),
    (made(costs=[1, 2]), "costs has 2 numbers for 5 layers", "one for each layer"),
    (made(ipus=6), "5 layers cannot fill 6 IPUs", "take fewer IPUs"),
)
def test_layers_that_do_not_fit_together_are_refused(call, holds):
    with refused(*holds):
        call()
