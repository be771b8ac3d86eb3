"""Test which arrays are sent together when the optimizer is sharded over replicas, and that a round trip is a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.core.layout import blocks as zero
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.layout import PackedLayout


def blocks_with(*shapes, replicas, dtype="float32"):
    tree = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return Blocks(PackedLayout.of_one_ipu("params", tree), replicas=replicas)


def test_large_arrays_travel_alone_and_small_ones_together():
    large, small = (2**10, 2**10), (2**9, 2**10)  # 4 MB and 2 MB of float32
    blocks = blocks_with(small, large, (3,), small, small, large, (), replicas=2)
    assert zero.buckets(blocks, ["float32"] * 7) == [[0, 2], [1], [3, 4], [5], [6]]
    empty = blocks_with((0,), (3,), (2, 0), large, (0,), replicas=2)
    assert zero.buckets(empty, ["float32"] * 5) == [[0, 1, 2, 4], [3]]
    assert zero.buckets(blocks_with((0,), replicas=2), ["float32"]) == [[0]]
    mixed = blocks_with((3,), (4,), (5,), replicas=2)
    assert zero.buckets(mixed, ["float32", "bfloat16", "float32"]) == [[0, 2], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_trip_is_the_sum(replicas, dtype, monkeypatch):
    monkeypatch.setattr(zero, "BUCKET_BYTES", 4 * 20)
    shapes = [(0, 3), (5, 7), (3,), (), (2, 2), (0,), (11,)]
    blocks = blocks_with(*shapes, replicas=replicas, dtype=dtype)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.integers(-4, 5, (replicas, *shape)), dtype) for shape in shapes]

    def program(arrays):
        chunks = zero.scatter(blocks, [a[0] for a in arrays])
        assert [chunk.shape for chunk in chunks] == [(blocks.chunk_size(k),) for k in range(len(shapes))]
        return zero.gather(blocks, chunks)

    mesh = make_mesh(replicas, 1)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=False)
    for found, array in zip(jax.jit(mapped)(arrays), arrays, strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), array.astype(jnp.float32).sum(0))
