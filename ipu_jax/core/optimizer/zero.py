"""Replicated tensor sharding (ZeRO-1): each replica updates a part of the weights, and keeps only this part's state.

    gradients     replica 0: a a a b b     replica 1: a a a b b     each replica has its own sums
    psum_scatter  replica 0: A A b'        replica 1: A - B         each replica has the total of a part of each array
    update        replica 0: its part      replica 1: its part      the optimizer's state is divided, too
    all_gather    every replica: all weights

An all-reduce is a reduce-scatter and an all-gather, so ZeRO-1 sends no more bytes. The update's work and the bytes of
the state are divided by the number of replicas. Small arrays are sent together, in buckets; an array that is split over
further mesh axes is sent alone, in its own shape, so that it stays split.

Source: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054: optimizer state partitioning, P_os.
"""

from collections.abc import Sequence
from typing import Final

import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Dtype, Value
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.mesh.collectives import reduced
from ipu_jax.core.mesh.devices import REPLICA_AXIS

BUCKET_BYTES: Final = 2**22
"""Arrays of at least this many bytes are sent alone, smaller arrays together in buckets of at most this many. A bucket
needs an extra copy, which for a large array costs more than a separate collective."""


def buckets(blocks: Blocks, dtypes: Sequence[Dtype]) -> list[list[int]]:
    """Return which blocks are sent together: small blocks of the same dtype."""
    filled_buckets: list[list[int]] = []
    open_: dict[Dtype, tuple[list[int], int]] = {}  # per dtype its last bucket, and the bytes in it
    for k, dtype in enumerate(map(jnp.dtype, dtypes)):
        size = blocks.chunk_size(k) * blocks.replicas * dtype.itemsize
        if size >= BUCKET_BYTES or blocks.chunk_dim(k) is not None:
            filled_buckets.append([k])
            continue
        bucket, filled = open_.get(dtype, (None, 0))
        if bucket is None or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            filled_buckets.append(bucket)
        bucket.append(k)
        open_[dtype] = (bucket, filled + size)
    return filled_buckets


def summed(blocks: Blocks, gradients: Sequence[Value]) -> Value:
    """Return the sums over the replicas: of this replica's chunk of each block, or of whole blocks if none is divided.

    Communicates as `scatter`, or one psum of all gradients.
    """
    return scatter(blocks, gradients) if blocks.is_divided else reduced(lax.psum, gradients, REPLICA_AXIS)


def scatter(blocks: Blocks, gradients: Sequence[Value]) -> list[Value]:
    """Return this replica's chunk of each block's sum over the replicas, in `Blocks.update_shape`.

    Communicates one psum_scatter over "replica" per bucket; each replica sends and receives (R-1)/R of its bytes.
    """
    chunks: list[Value] = [None] * len(blocks)
    for bucket in buckets(blocks, [g.dtype for g in gradients]):
        if blocks.chunk_dim(bucket[0]) is not None:
            (k,) = bucket
            chunks[k] = lax.psum_scatter(blocks.to_chunks(k, gradients[k]), REPLICA_AXIS, scatter_dimension=0)
            continue
        by_replica = jnp.concatenate([blocks.to_chunks(k, gradients[k]) for k in bucket], axis=1)
        own = lax.psum_scatter(by_replica, REPLICA_AXIS, scatter_dimension=0)
        start = 0
        for k in bucket:
            chunks[k] = lax.slice_in_dim(own, start, start + blocks.chunk_size(k))
            start += blocks.chunk_size(k)
    return chunks


def gather(blocks: Blocks, chunks: Sequence[Value]) -> list[Value]:
    """Return each block whole from the chunks of all replicas, which `scatter` has made.

    Communicates one all_gather over "replica" per bucket, or nothing if each replica has whole blocks.
    """
    if not blocks.is_divided:
        return list(chunks)
    arrays: list[Value] = [None] * len(blocks)
    for bucket in buckets(blocks, [chunk.dtype for chunk in chunks]):
        if blocks.chunk_dim(bucket[0]) is not None:
            (k,) = bucket
            arrays[k] = blocks.from_chunks(k, lax.all_gather(chunks[k], REPLICA_AXIS))
            continue
        by_replica = lax.all_gather(jnp.concatenate([chunks[k] for k in bucket]), REPLICA_AXIS)
        start = 0
        for k in bucket:
            size = blocks.chunk_size(k)
            arrays[k] = blocks.from_chunks(k, lax.slice_in_dim(by_replica, start, start + size, axis=1))
            start += size
    return arrays
