"""Test that a function of shares has the values and gradients of the function, however it is written."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.core.cutting.shares import in_shares
from sharded_ops import Split
from support.dense import largest_relative_error

from .tails import LABELS, TABLE, TAILS, H, V, random_tail

FAST = (
    *("optax", "one_hot", "vmap", "map", "checkpoint", "relu", "hinge", "max of equal ones", "clipped gradient"),
    *("cosine", "first columns", "masked columns", "position weights", "product", "labels out of range", "argmax"),
    *("sort", "half", "h @ W + b", "chunks", "tied", "take columns", "at, fill", "one_hot @", "weight decay"),
    *("normed gradient", "straight through", "whole scale"),
)


def on_ipus(ipus, loss, weights, h, dims, size=V):
    """Return (loss, gradients of weights and h), and the elements of the largest array that is gathered.

    As in the engine, each IPU has a part of the cotangent of a value that all have.
    """
    leaves, tree = jax.tree.flatten((weights, h))
    splits = [*((dims[name], size) if name in dims else None for name in sorted(weights)), None]
    run = in_shares(jax.make_jaxpr(lambda *leaves: loss(*jax.tree.unflatten(tree, leaves)))(*leaves), splits)
    specs = [P() if split is None else P(*[None] * split[0], "ipu") for split in splits]

    def value_and_grad(*leaves):
        (value,), vjp = jax.vjp(run, *leaves)
        gradients = vjp([jnp.ones_like(value) / ipus])
        return value, [g if tuple(spec) else jax.lax.psum(g, "ipu") for g, spec in zip(gradients, specs, strict=True)]

    mapped = jax.shard_map(
        value_and_grad, mesh=make_mesh(1, ipus), in_specs=tuple(specs), out_specs=(P(), specs), check_vma=False
    )
    rows = Split(size, ipus)
    padded = [x if split is None else rows.pad(x, split[0]) for x, split in zip(leaves, splits, strict=True)]
    compiled = jax.jit(mapped).lower(*padded).compile()
    value, gradients = compiled(*padded)
    padding = [
        g.take(jnp.arange(size, rows.padded), split[0]) for g, split in zip(gradients, splits, strict=True) if split
    ]
    assert not any(np.asarray(rows).any() for rows in padding)
    found = [g[tuple(map(slice, x.shape))] for g, x in zip(gradients, leaves, strict=True)]
    gathered = re.findall(r"= \(?\w+\[([\d,]+)\][^=]*? all-gather\(", str(compiled.as_text()))
    sizes = [math.prod(map(int, of_array.split(","))) for of_array in gathered]
    return (value, jax.tree.unflatten(tree, found)), max(sizes, default=0)


@pytest.mark.fast(*(f"{name}-3" for name in FAST))
@pytest.mark.parametrize("ipus", [3, 4])
@pytest.mark.parametrize("name", TAILS)
def test_shares_have_the_values_and_gradients_of_the_function(name, ipus):
    tail = TAILS[name]
    found, most = on_ipus(ipus, tail.loss, tail.weights, H, tail.dims)
    expected = jax.jit(jax.value_and_grad(tail.loss, (0, 1)))(tail.weights, H)
    assert largest_relative_error(found, expected) < tail.tolerance
    assert (most > ipus * LABELS.size) == tail.gathered


@pytest.mark.fast("0-4-5", "1-4-5", "2-4-5", "3-4-5", "4-4-5", "5-3-8", "6-3-8", "7-2-6", "8-1-7")
@pytest.mark.parametrize(("ipus", "size"), [(4, 5), (3, 8), (2, 6), (1, 7)])
@pytest.mark.parametrize("seed", range(12))
def test_random_functions_of_shares(seed, ipus, size):
    tail = random_tail(seed, size)
    found, _ = on_ipus(ipus, tail.loss, tail.weights, H, tail.dims, size)
    expected = jax.jit(jax.value_and_grad(tail.loss, (0, 1)))(tail.weights, H)
    assert largest_relative_error(found, expected) < tail.tolerance


def test_a_nan_in_one_row_reaches_every_result():
    for of in (jnp.max, jnp.min, jax.nn.logsumexp, jnp.sum, jnp.prod):
        found, _ = on_ipus(
            3,
            lambda w, h, of=of: of(w["table"][:, 0] * h.sum()),
            {"table": TABLE.at[V - 1].set(jnp.nan)},
            H,
            {"table": 0},
        )
        assert jnp.isnan(found[0])
    place, _ = on_ipus(
        3,
        lambda w, h: jnp.argmax(w["table"][:, 0]) + 0 * h.sum(),
        {"table": TABLE.at[20].set(jnp.nan)},
        H,
        {"table": 0},
    )
    assert place[0] == 20
