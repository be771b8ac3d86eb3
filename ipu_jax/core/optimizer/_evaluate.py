"""Compute one leaf's values of a traced update on demand."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from ipu_jax.base.jaxprs import bound
from ipu_jax.core.optimizer._analysis import UpdateAnalysis
from ipu_jax.core.optimizer.blocks import Blocks


class LeafEvaluator:
    """Compute the values of a traced update that one leaf's program reads.

    Args:
        analysis: the analysis of the update.
        blocks: where the weights are.
        leaf: number of the leaf.
        shape: update shape of the leaf's block.
        in_block: the values that are known at the start, in the update shape. Computed values are added.
        owned: the values that are known at the start, in their own shapes. Computed values are added.
        replicated: returns the value of a variable that every IPU knows.
    """

    def __init__(
        self,
        analysis: UpdateAnalysis,
        blocks: Blocks,
        leaf: int,
        shape: tuple[int, ...],
        *,
        in_block: dict[Any, Any],
        owned: dict[Any, Any],
        replicated: Callable[[Any], Any],
    ):
        self._analysis, self._blocks, self._leaf, self._shape = analysis, blocks, leaf, shape
        self._in_block, self._owned, self._replicated = in_block, owned, replicated

    def replace(self, v: Any, value: Any) -> None:
        """Replace a value in the block's update shape for later readers."""
        if not isinstance(v, core.Literal):
            self._in_block[v] = value

    def in_block(self, v: Any) -> Any:
        """Return a value of the leaf's shape, or a number, in the block's update shape."""
        analysis, values = self._analysis, self._in_block
        if isinstance(v, core.Literal):
            return jnp.broadcast_to(_literal(v), self._shape)
        if v in values:
            return values[v]
        if v in analysis.owned:
            values[v] = self._blocks.local_part(self._leaf, self.logical(v))
        elif v in analysis.leaf_of:
            eqn = analysis.made_by[v]
            (values[v],) = bound(eqn, [self.in_block(x) for x in eqn.invars])
        elif v in analysis.constant_fills or not v.aval.shape:
            # made from the number, so that leaves of different shapes in one block share one program
            number = self.logical(analysis.constant_fills.get(v, v))
            values[v] = jnp.broadcast_to(number.astype(v.aval.dtype), self._shape)
        else:
            leaf_shaped = jnp.broadcast_to(self._replicated(v), self._blocks.leaves[self._leaf].shape)
            values[v] = self._blocks.local_part(self._leaf, leaf_shaped)
        return values[v]

    def logical(self, v: Any) -> Any:
        """Return a value in its own shape. For a value of a leaf, only the owner of a local leaf can do this."""
        analysis = self._analysis
        if isinstance(v, core.Literal):
            return _literal(v)
        if v in analysis.owned:
            if v not in self._owned:
                eqn = analysis.made_by[v]
                self._owned.update(zip(eqn.outvars, bound(eqn, [self.logical(x) for x in eqn.invars]), strict=True))
            return self._owned[v]
        if v in analysis.leaf_of:
            return self._blocks.logical_leaf(self._leaf, self.in_block(v))
        if v in analysis.constant_fills:
            return jnp.broadcast_to(self.logical(analysis.constant_fills[v]), v.aval.shape)
        return self._replicated(v)


def _literal(v: Any) -> Any:
    return jnp.asarray(v.val, v.aval.dtype)
