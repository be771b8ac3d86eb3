"""Cross-entropies over a split vocabulary, from logits or from hidden states and the table."""

from sharded_ops.losses._cross_entropy import log_softmax_cross_entropy
from sharded_ops.losses._linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy", "log_softmax_cross_entropy"]
