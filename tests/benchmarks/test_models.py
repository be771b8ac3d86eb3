"""Test the benchmark's models: the transformer against an independent program, the others against the unsharded ones.

The ResNet has the blocks of `mnist_example`, which `test_mnist_resnet` compares with an independent network.
`test_smallest` runs the recommender.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt import Sizes
from models import Model, pipelined, resnet18, u_transformer, unsharded
from support import transformer
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error

M = 3


def small_resnet() -> Model:
    """Return a ResNet whose last batch norms are over 32 values each, with fewer of which rounding errors grow."""
    return resnet18(width=4, side=16, images=8, micro_batches=M)


def small_transformer() -> Model:
    sizes = Sizes(vocabulary=11, length=6, features=8, heads=2, layers=5)
    model = u_transformer(sizes, sequences=2, micro_batches=M)
    random = np.random.default_rng(0)  # with the benchmark's own small weights, some gradients are nearly 0
    model.params.update(jax.tree.map(lambda w: jnp.float32(0.4 * random.normal(size=w.shape)), model.params))
    return model


def transformer_loss(params: Any, batch: Any) -> Any:
    """Compute one sequence after the other, with two encoders, a block in the middle and two decoders."""

    def of_one(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        first, second = params["encoder0"], params["encoder1"]
        outer = transformer.block(first["block"], first["table"][tokens] + first["positions"])
        inner = transformer.block(second["block"], outer)
        x = transformer.block(params["middle"], inner)
        for name, skip in (("decoder1", inner), ("decoder0", outer)):
            join = params[name]["join"]
            x = transformer.block(params[name]["block"], x @ join[:8] + skip @ join[8:])
        last = params["prediction"]
        return transformer.cross_entropy(transformer.normalised(last["norm"], x) @ last["projection"].T, targets)

    return jax.vmap(jax.vmap(of_one))(batch["tokens"], batch["targets"]).mean()


@pytest.mark.slow
def test_the_transformer_is_the_independent_program():
    model = small_transformer()
    exact = jax.jit(jax.value_and_grad(transformer_loss))(model.params, model.batch)
    assert largest_relative_error(jax.jit(unsharded(model))(model.params, model.batch, {})[:2], exact) < 1e-5
    assert largest_relative_error(pipelined(model, "grouped").result(), exact) < 1e-5


@pytest.mark.slow
def test_the_resnet_and_its_averages_are_the_unsharded_ones():
    model = small_resnet()
    exact = jax.jit(unsharded(model))(model.params, model.batch, model.state)
    assert largest_relative_error(pipelined(model, "grouped").result(), exact) < 1e-5
