"""Test the programs beside the benchmark's GPT against an independent dense GPT; test_smallest compares pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt import (
    Sizes,
    blocks,
    blocks_unrolled,
    for_the_usual_idiom,
    from_the_usual_idiom,
    in_the_usual_idiom,
    init_params,
    make_pipeline,
    random_batch,
    unsharded,
)
from ipu_jax import make_mesh
from support import transformer
from support.dense import largest_relative_error

SIZES = Sizes(vocabulary=11, length=6, features=8, heads=2, layers=4)  # 11 divides by neither 2 nor 4 IPUs
M = 3


def dense_loss(params, batch):
    """Return the mean loss without any function of gpt.py: one sequence, head and layer at a time."""

    def of_one(tokens, targets):
        x = jax.nn.one_hot(tokens, SIZES.vocabulary) @ params["table"] + params["positions"]
        for name in ("blocks0", "blocks1"):
            for layer in range(SIZES.layers // 2):
                x = transformer.block(jax.tree.map(lambda w, layer=layer: w[layer], params[name]), x)
        logits = transformer.normalised(params["norm"], x) @ params["table"].T
        return transformer.cross_entropy(logits, targets)

    return jax.vmap(jax.vmap(of_one))(batch["tokens"], batch["targets"]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [blocks, blocks_unrolled])
def test_the_programs_beside_it_are_the_same_gpt(layers):
    """The unsharded program and the usual idiom, with which the pipeline is compared, equal the dense GPT."""
    drawn, batch = np.random.default_rng(0), random_batch(SIZES, M, 2)
    # larger weights than `init_params`, with which gradients of early layers and biases are nearly 0
    params = jax.tree.map(lambda w: jnp.float32(0.3 * drawn.normal(size=w.shape)), init_params(SIZES, 2))
    exact, tolerance = jax.jit(jax.value_and_grad(dense_loss))(params, batch), 50 * np.finfo(np.float32).eps
    assert largest_relative_error(unsharded(params, batch, layers), exact) < tolerance

    step = in_the_usual_idiom(make_mesh(1, 2), M, layers, checkpoint=True, skip_idle=True)
    loss, gradients = step(*for_the_usual_idiom(params), batch)
    assert largest_relative_error((loss, from_the_usual_idiom(*gradients)), exact) < tolerance


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="layers=4 don't divide by ipus=3: give a multiple"):
        make_pipeline(SIZES, 3)
