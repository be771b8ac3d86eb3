"""Tensor-parallel ops for the inside of any `jax.shard_map`: they know the name of a mesh axis, and nothing else."""

from sharded_ops.choice import argmax, sample, top_k
from sharded_ops.collectives import (
    from_all,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    scatter_tokens,
    to_all,
)
from sharded_ops.cross_entropy import log_softmax_cross_entropy
from sharded_ops.debug import debug_sharding
from sharded_ops.embedding import embedding, take_last
from sharded_ops.layout import Split
from sharded_ops.matmul import matmul, tied_projection
from sharded_ops.norm import layer_norm, rms_norm
from sharded_ops.projection import linear_cross_entropy
from sharded_ops.resplit import Layout
from sharded_ops.softmax import log_softmax, softmax

__all__ = [
    "Layout",
    "Split",
    "argmax",
    "debug_sharding",
    "embedding",
    "from_all",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "log_softmax_cross_entropy",
    "matmul",
    "reduce_scatter_tokens",
    "reduce_to",
    "reduce_to_all",
    "rms_norm",
    "sample",
    "scatter_tokens",
    "softmax",
    "take_last",
    "tied_projection",
    "to_all",
    "top_k",
]
