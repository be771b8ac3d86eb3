"""Replicated tensor sharding: each replica updates its own part of the weights, and keeps that part's state alone.

    gradients     replica 0: a a a b b     replica 1: a a a b b     each its own sums
    psum_scatter  replica 0: A A b'        replica 1: A - B         sums of both, each replica a part of each array
    update        replica 0: its part      replica 1: its part      the optimizer's state is a part, too
    all_gather    every replica: all weights

An all-reduce is such a reduce-scatter and an all-gather in one, so nothing more is sent, while the update's work and
the state's bytes fall by the number of replicas. Small arrays travel together, in buckets.

Source: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054: optimizer state partitioning, P_os.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from ipu_jax.devices import REPLICA_AXIS
from ipu_jax.optimizer.blocks import Cells

BUCKET_BYTES: Final = 2**22
"""Arrays of so many bytes travel alone, smaller ones together in buckets of up to so many: a bucket is one more copy,
which costs a large array more than a collective of its own does."""


def buckets(cells: Cells, dtypes: Sequence[Any]) -> list[list[int]]:
    """Return which cells are sent together: small ones of one dtype."""
    found: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}  # per dtype its last bucket, and the bytes in it
    for k, dtype in enumerate(map(jnp.dtype, dtypes)):
        size = cells.chunk(k) * cells.replicas * dtype.itemsize
        if size >= BUCKET_BYTES:
            found.append([k])
            continue
        bucket, filled = open_.get(dtype, (None, 0))
        if bucket is None or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(k)
        open_[dtype] = (bucket, filled + size)
    return found


def scatter(cells: Cells, gradients: Sequence[Any]) -> list[Any]:
    """Return this replica's chunk of each cell's sum over the replicas, as `Cells.shown`.

    Communicates one psum_scatter over "replica" a bucket; each replica sends and gets (R-1)/R of its bytes.
    """
    chunks: list[Any] = [None] * len(cells.cells)
    for bucket in buckets(cells, [g.dtype for g in gradients]):
        rows = jnp.concatenate([cells.rows(k, gradients[k]) for k in bucket], axis=1)
        mine = lax.psum_scatter(rows, REPLICA_AXIS, scatter_dimension=0)
        start = 0
        for k in bucket:
            chunks[k] = lax.slice_in_dim(mine, start, start + cells.chunk(k))
            start += cells.chunk(k)
    return chunks


def gather(cells: Cells, chunks: Sequence[Any]) -> list[Any]:
    """Return each cell whole, from every replica's chunk of it: the inverse of `scatter`.

    Communicates one all_gather over "replica" a bucket.
    """
    whole: list[Any] = [None] * len(cells.cells)
    for bucket in buckets(cells, [chunk.dtype for chunk in chunks]):
        rows = lax.all_gather(jnp.concatenate([chunks[k] for k in bucket]), REPLICA_AXIS)
        start = 0
        for k in bucket:
            whole[k] = cells.unrows(k, lax.slice_in_dim(rows, start, start + cells.chunk(k), axis=1))
            start += cells.chunk(k)
    return whole
