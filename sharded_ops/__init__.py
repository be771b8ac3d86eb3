"""Tensor-parallel ops for the inside of any `jax.shard_map`: they know the name of a mesh axis, and nothing else."""

from sharded_ops.choice import argmax, sample, top_k
from sharded_ops.collectives import from_all, reduce_to_all, to_all
from sharded_ops.cross_entropy import log_softmax_cross_entropy
from sharded_ops.embedding import embedding, take_last
from sharded_ops.layout import Split
from sharded_ops.matmul import matmul
from sharded_ops.projection import linear_cross_entropy
from sharded_ops.resplit import Layout
from sharded_ops.softmax import log_softmax, softmax

__all__ = [
    "Layout",
    "Split",
    "argmax",
    "embedding",
    "from_all",
    "linear_cross_entropy",
    "log_softmax",
    "log_softmax_cross_entropy",
    "matmul",
    "reduce_to_all",
    "sample",
    "softmax",
    "take_last",
    "to_all",
    "top_k",
]
