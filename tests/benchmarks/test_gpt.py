"""Test the programs beside the benchmark's GPT against an independent dense GPT; test_smallest compares pipelines."""

import functools
from typing import Any

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
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error

# 11 divides by neither 2 nor 4 IPUs
SIZES = Sizes(vocabulary=11, length=6, features=8, heads=2, layers=4)
SEQUENCES = 2


@jax.jit
def dense_value_and_grad(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
    """Return one micro-batch's loss without any function of gpt.py: one sequence, head and layer at a time."""

    def of_one(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = jax.nn.one_hot(tokens, SIZES.vocabulary) @ params["table"]
        x += params["positions"]
        for layer in range(SIZES.layers):
            x = transformer.block(jax.tree.map(lambda w, layer=layer: w[layer], params["blocks"]), x)
        logits = (transformer.normalised(params["norm"], x) @ params["table"].T).astype(jnp.float32)
        return transformer.cross_entropy(logits, targets)

    mean_loss = lambda params: jax.vmap(of_one, (None, 0, 0))(params, tokens, targets).mean()
    return jax.value_and_grad(mean_loss)(params)


def joined(params: dict[str, Any]) -> dict[str, Any]:
    """Return the weights with the blocks of all stages in one group, as float64 numpy arrays."""
    stages = [params[name] for name in sorted(params) if name.startswith("blocks")]
    together = jax.tree.map(lambda *parts: np.concatenate(parts), *stages)
    found = {name: w for name, w in params.items() if not name.startswith("blocks")} | {"blocks": together}
    return jax.tree.map(lambda w: np.asarray(w, np.float64), found)


@functools.cache
def weights_of(ipus: int) -> dict[str, Any]:
    """Return larger weights than `init_params`, with which gradients of early layers and biases are nearly 0."""
    drawn = np.random.default_rng(0)
    one = jax.eval_shape(lambda: init_params(SIZES, 1))
    one = jax.tree.map(lambda w: (0.3 * drawn.normal(size=w.shape)).astype(np.float32), one)
    each = SIZES.layers // ipus
    blocks = one.pop("blocks0")
    return one | {f"blocks{i}": jax.tree.map(lambda w, i=i: w[each * i :][:each], blocks) for i in range(ipus)}


def expected(micro_batches: int) -> tuple[Any, dict[str, Any]]:
    params = jax.tree.map(jnp.asarray, weights_of(1))
    params["blocks"] = params.pop("blocks0")
    batch = random_batch(SIZES, micro_batches, SEQUENCES)
    all_ = [
        dense_value_and_grad(params, tokens, targets)
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True)
    ]
    return jax.tree.map(lambda *parts: np.mean(np.asarray(parts, np.float64), axis=0), *all_)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [blocks, blocks_unrolled])
def test_the_programs_beside_it_are_the_same_gpt(layers):
    """The unsharded program and the usual idiom, with which the pipeline is compared, equal the dense GPT."""
    micro_batches, params = 3, jax.tree.map(jnp.asarray, weights_of(2))
    batch = random_batch(SIZES, micro_batches, SEQUENCES)
    loss, gradients = unsharded(params, batch, layers)
    exact, tolerance = expected(micro_batches), 50 * np.finfo(np.float32).eps
    assert largest_relative_error((loss, joined(gradients)), exact) < tolerance

    step = in_the_usual_idiom(make_mesh(1, 2), micro_batches, layers, checkpoint=True, skip_idle=True)
    loss, gradients = step(*for_the_usual_idiom(params), batch)
    assert largest_relative_error((loss, joined(from_the_usual_idiom(*gradients))), exact) < tolerance


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="layers=4 don't divide by ipus=3: give a multiple"):
        make_pipeline(SIZES, 3)
