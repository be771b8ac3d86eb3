"""Test the benchmark's ResNet and transformer against independent programs: loss, gradients and running averages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import models
from gpt import Sizes
from ipu_jax.core.engine import _carry
from models import Model, pipelined, recommender, resnet18, rows_in_place, u_transformer, unsharded
from support import transformer
from support.dense import largest_relative_error

M = 3


@pytest.fixture(autouse=True)
def bubbles_hold_nan(monkeypatch):
    monkeypatch.setattr(_carry, "IDLE_FILL", float("nan"))


def small_resnet() -> Model:
    """Return a ResNet whose last batch norms are over 32 values each, with fewer of which rounding errors grow."""
    return resnet18(width=4, side=16, images=8, micro_batches=M)


def small_transformer() -> Model:
    sizes = Sizes(vocabulary=11, length=6, features=8, heads=2, layers=5)
    model = u_transformer(sizes, sequences=2, micro_batches=M)
    random = np.random.default_rng(0)  # with the benchmark's own small weights, some gradients are nearly 0
    model.params.update(jax.tree.map(lambda w: jnp.float32(0.4 * random.normal(size=w.shape)), model.params))
    return model


# the independent programs: the loss of one micro-batch, and new running averages


def resnet_loss(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
    """Follow table 1 of He et al. from its second row, after a 3x3 convolution."""
    averages: dict[str, Any] = {}

    def conv_norm(path: tuple[str, ...], x: jax.Array, strides: int) -> jax.Array:
        is_stem = path == ("stem",)
        conv, norm = ("Conv_0", "BatchNorm_0") if is_stem else ("conv", "norm")
        of_state = path if is_stem else (path[0], "batch_stats", *path[1:])  # the collection of Flax
        p, s = (functools.reduce(lambda tree, name: tree[name], *args) for args in ((path, params), (of_state, state)))
        kernel = p[conv]["kernel"]
        pad = [(kernel.shape[0] // 2,) * 2] * 2
        y = lax.conv_general_dilated(x, kernel, (strides,) * 2, pad, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean = y.mean((0, 1, 2))
        variance = ((y - mean) ** 2).mean((0, 1, 2))
        found = {"mean": mean, "var": variance}
        into = averages
        for name in of_state:
            into = into.setdefault(name, {})
        into[norm] = {k: 0.9 * s[norm][k] + 0.1 * found[k] for k in found}
        return (y - mean) / jnp.sqrt(variance + 1e-5) * p[norm]["scale"] + p[norm]["bias"]

    x = jnp.maximum(conv_norm(("stem",), images, 1), 0)
    for number in range(1, 9):
        name, strides = f"block{number}", 2 if number in (3, 5, 7) else 1
        y = jnp.maximum(conv_norm((name, "conv0"), x, strides), 0)
        y = conv_norm((name, "conv1"), y, 1)
        x = conv_norm((name, "shortcut"), x, strides) if strides == 2 else x
        x = jnp.maximum(x + y, 0)
    logits = x.mean((1, 2)) @ params["classifier"]["w"] + params["classifier"]["b"]
    return transformer.cross_entropy(logits, labels), averages


def transformer_loss(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
    """Compute one sequence after the other, with two encoders, a block in the middle and two decoders."""

    def of_one(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        first, second = params["encoder0"], params["encoder1"]
        outer = transformer.block(first["block"], first["table"][tokens] + first["positions"])
        inner = transformer.block(second["block"], outer)
        x = transformer.block(params["middle"], inner)
        join = params["decoder1"]["join"]
        x = transformer.block(params["decoder1"]["block"], x @ join[:8] + inner @ join[8:])
        join = params["decoder0"]["join"]
        x = transformer.block(params["decoder0"]["block"], x @ join[:8] + outer @ join[8:])
        last = params["prediction"]
        return transformer.cross_entropy(transformer.normalised(last["norm"], x) @ last["projection"].T, targets)

    return jnp.mean(jnp.stack([of_one(*one) for one in zip(tokens, targets, strict=True)])), state


CASES = {
    "resnet": (small_resnet, resnet_loss, ("images", "labels")),
    "transformer": (small_transformer, transformer_loss, ("tokens", "targets")),
}


def expected(model: Model, loss_of: Callable[..., Any], keys: tuple[str, str]) -> Any:
    """Return mean loss, mean gradients and the last state, of one micro-batch after the other."""
    step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    found, state = [], model.state
    for i in range(M):
        (loss, state), gradients = step(model.params, state, *(model.batch[key][i] for key in keys))
        found.append((loss, gradients))
    return (*jax.tree.map(lambda *parts: np.mean(np.asarray(parts, np.float64), axis=0), *found), state)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_the_independent_program(name):
    make, loss_of, keys = CASES[name]
    model = make()
    exact = expected(model, loss_of, keys)
    assert largest_relative_error(jax.jit(unsharded(model))(model.params, model.batch, model.state), exact) < 1e-5
    found = pipelined(model, "grouped").result()
    assert largest_relative_error(found if model.state else (*found, {}), exact) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ipus", [2, 4])
def test_the_recommender_that_adds_rows_in_place_is_the_unsharded_one(ipus, monkeypatch):
    monkeypatch.setattr(models, "ROWS", 11)  # so that rows are read many times
    model = recommender(packed=True, micro_batches=M, examples=5, hidden=3, ipus=ipus)
    exact = jax.jit(unsharded(model))(model.params, model.batch, model.state)
    assert largest_relative_error(jax.jit(rows_in_place)(model.params, model.batch, model.state), exact) < 1e-5
    assert largest_relative_error((*pipelined(model, "grouped").result(), {}), exact) < 1e-5
