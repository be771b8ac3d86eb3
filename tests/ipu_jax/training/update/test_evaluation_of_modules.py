"""Test that modules of linen, NNX and Equinox are evaluated by their own idioms: without dropout, by running averages.

Each is trained and evaluated as a function; the figure is compared with the module itself, whole, on one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ipu_jax import Feed, Pipeline, fit, make_train_step
from ipu_jax.steps import Evaluation
from support.trained import compiled_quickly

B, D, LAYERS, M = 4, 3, 2, 2

_compiled_quickly = compiled_quickly()


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)
    return {"x": 3 * x + 1, "y": x.sum(-1)}


def mse(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


@dataclasses.dataclass
class Modules:
    """A model as functions of its weights and its state.

    Attributes:
        loss: (params, state, micro-batch, key) -> (loss, new state), in training.
        test: (params, state, micro-batch) -> the loss in evaluation.
        plain: (params, state, x) -> the results of the module itself in evaluation.
    """

    params: Any
    state: Any
    loss: Callable[..., Any]
    test: Callable[..., Any]
    plain: Callable[..., Any]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for _ in range(LAYERS):
            y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(D)(x))
            x = x + nn.Dropout(0.5, deterministic=not train)(nn.tanh(y))
        return x.sum(-1)


def linen() -> Modules:
    model = Linen()
    variables = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), examples(1, 0)["x"])

    def loss(params, stats, batch, key):
        both = {"params": params, "batch_stats": stats}
        y, new = model.apply(both, batch["x"], train=True, rngs={"dropout": key}, mutable=["batch_stats"])
        return mse(y, batch), new["batch_stats"]

    def plain(params, stats, x):
        return model.apply({"params": params, "batch_stats": stats}, x, train=False)

    test = lambda params, stats, batch: mse(plain(params, stats, batch["x"]), batch)
    return Modules(variables["params"], variables["batch_stats"], loss, test, plain)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(LAYERS)])
        self.norms = nnx.List([nnx.BatchNorm(D, momentum=0.5, rngs=rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(nnx.tanh(norm(layer(x))))
        return x.sum(-1)


def of_nnx(evaluated: Callable[[Any, Any, Any], Any]) -> Modules:
    """Return the functions of an NNX model.

    Args:
        evaluated: returns the module for evaluation from the original, the weights and the averages.
    """
    model = Nnx(nnx.Rngs(0))
    graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)

    def loss(params, stats, batch, key):
        net = nnx.merge(graph, params, stats, rest, copy=True)
        nnx.reseed(net, default=key)
        return mse(net(batch["x"]), batch), nnx.state(net, nnx.BatchStat)

    def plain(params, stats, x):
        whole = Nnx(nnx.Rngs(0))
        nnx.update(whole, params, stats)
        whole.eval()
        return whole(x)

    test = lambda params, stats, batch: mse(evaluated(model, params, stats)(batch["x"]), batch)
    return Modules(params, stats, loss, test, plain)


def _eval_of_the_merged(model, params, stats):
    graph, _, _, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    net = nnx.merge(graph, params, stats, rest, copy=True)
    net.eval()
    return net


def _split_of_a_view(model, params, stats):
    view = nnx.view(model, deterministic=True, use_running_average=True)
    graph, _, _, rest = nnx.split(view, nnx.Param, nnx.BatchStat, ...)
    return nnx.merge(graph, params, stats, rest, copy=True)


class Equinox(eqx.Module):
    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.BatchNorm]
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(D, D, key=k) for k in jax.random.split(key, LAYERS)]
        self.norms = [eqx.nn.BatchNorm(D, axis_name="batch", mode="ema", momentum=0.5) for _ in range(LAYERS)]
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, key=None):
        keys = [None] * LAYERS if key is None else jax.random.split(key, LAYERS)
        for layer, norm, of_layer in zip(self.layers, self.norms, keys, strict=True):
            y, state = norm(layer(x), state)
            x = x + self.dropout(jax.nn.tanh(y), key=of_layer)
        return x.sum(), state


def equinox() -> Modules:
    model, state = eqx.nn.make_with_state(Equinox)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    axes: dict[str, Any] = {"axis_name": "batch", "out_axes": (0, None)}

    def loss(params, state, batch, key):
        keys = jax.random.split(key, len(batch["x"]))
        net = jax.vmap(eqx.combine(params, static), in_axes=(0, None, 0), **axes)
        y, state = net(batch["x"], state, keys)
        return mse(y, batch), state

    def plain(params, state, x):
        net = eqx.nn.inference_mode(eqx.combine(params, static))
        return jax.vmap(net, in_axes=(0, None), **axes)(x, state)[0]

    test = lambda params, state, batch: mse(plain(params, state, batch["x"]), batch)
    return Modules(params, state, loss, test, plain)


MODULES: dict[str, Callable[[], Modules]] = {
    "linen": linen,
    "nnx": lambda: of_nnx(_eval_of_the_merged),
    "nnx view": lambda: of_nnx(_split_of_a_view),
    "equinox": equinox,
}


@pytest.mark.fast("linen", "nnx", "equinox")
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_evaluated_without_dropout_and_by_its_averages(kind):
    modules, train, data = MODULES[kind](), examples(2 * M * B, 1), examples(M * B, 2)
    one = {name: leaf[:B] for name, leaf in train.items()}
    pipeline = Pipeline.from_function(
        modules.loss, modules.params, one, state=modules.state, ipus=2, gradient_accumulation=M
    )
    step = make_train_step(pipeline, optax.sgd(0.05))
    state = step.init(modules.params, stages=modules.state, key=jax.random.key(3))
    evaluation = Evaluation(step.model.forward(modules.test, one), data)
    plain = jax.jit(modules.plain)
    figure = lambda params, stats: np.mean(np.square(plain(params, stats, data["x"]) - data["y"]))
    with Feed(train, step=step, micro_batch=B) as feed:
        result = fit(step, state, feed, evaluate=evaluation, progress=False, say=list)
    whole = step.whole(result.state)
    expected = figure(whole["params"], whole["stages"])
    assert abs(figure(whole["params"], modules.state) / expected - 1) > 0.01  # it depends on the averages
    [(updates, found)] = result.evaluations
    assert updates == 2
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
