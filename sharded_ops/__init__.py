"""Tensor-parallel ops to call inside any `jax.shard_map`: they only need the name of a mesh axis."""

from sharded_ops._collectives import from_all, reduce_scatter_tokens, reduce_to, reduce_to_all, scatter_tokens, to_all
from sharded_ops._debug import debug_sharding
from sharded_ops._embedding import embedding, take_along_last_dim
from sharded_ops._matmul import matmul, tied_projection
from sharded_ops._norm import layer_norm, rms_norm
from sharded_ops._sampling import sample
from sharded_ops._softmax import log_softmax, softmax
from sharded_ops._split import Split
from sharded_ops._top_k import argmax, top_k
from sharded_ops._tree_layout import Layout
from sharded_ops.losses import linear_cross_entropy, log_softmax_cross_entropy

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
    "take_along_last_dim",
    "tied_projection",
    "to_all",
    "top_k",
]
