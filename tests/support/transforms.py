"""The parts shared by the tests of top_k and of sample: a spec of columns, transforms in a shard_map, and noise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

COLUMNS = P(None, "ipu")
NAN, INF = np.nan, np.inf


def _scanned(op):
    return lambda *xs: lax.scan(lambda carry, xs: (carry, op(*xs)), 0, xs)[1]


# One transform in each kind of shard_map.
in_transforms = pytest.mark.parametrize(
    ("transform", "typed"), [(jax.vmap, False), pytest.param(_scanned, True, marks=pytest.mark.slow)]
)


@functools.cache
def _noise_bits(tokens: Any) -> Any:
    return jax.jit(lambda key, column: jax.random.bits(jax.random.fold_in(key, column), tokens))


def noise_of(bits: np.ndarray) -> np.ndarray:
    """Return the noise in float64, by another formula of the exponential; u is at most the largest float32 below 1."""
    u = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    return -np.log(np.log(1 / (1 - u.astype(np.float64)))).astype(np.float32)


def gumbel(key: jax.Array, tokens: Any, size: int) -> np.ndarray:
    """Return the noise, column by column, each from the key into which its number is folded."""
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")
    return np.stack([noise_of(np.asarray(_noise_bits(tokens)(key, column))) for column in range(size)], -1)
