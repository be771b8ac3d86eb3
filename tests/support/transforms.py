"""The parts shared by the tests of top_k and of sample: a spec of columns, a transform in each kind of shard_map."""

import jax
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
