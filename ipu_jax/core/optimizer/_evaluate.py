"""Compute one leaf's values of a traced update on demand, and reduce leaves that are in several parts.

Of a reduction, each IPU computes the partial result of its own part, and every IPU combines the partial results:

|table|^2    IPU 0: sum over its rows    IPU 1: sum over its rows, without padding    together: the sum of both
|mlp/w|^2    IPU 0: the sum              IPU 1: another leaf's sum                    together: IPU 0's
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Dtype, Value, Var
from ipu_jax.base.jaxprs import bound
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.packing import leaf_in
from ipu_jax.core.optimizer._analysis import LeafReduction, UpdateAnalysis


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
        in_block: dict[Var, Value],
        owned: dict[Var, Value],
        replicated: Callable[[Var], Value],
    ):
        self._analysis, self._blocks, self._leaf, self._shape = analysis, blocks, leaf, shape
        self._in_block, self._owned, self._replicated = in_block, owned, replicated

    def replace(self, v: Var, value: Value) -> None:
        """Replace a value in the block's update shape for later readers."""
        if not isinstance(v, core.Literal):
            self._in_block[v] = value

    def in_block(self, v: Var) -> Value:
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

    def logical(self, v: Var) -> Value:
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
            return leaf_in(self.in_block(v), self._blocks.leaves[self._leaf])
        if v in analysis.constant_fills:
            return jnp.broadcast_to(self.logical(analysis.constant_fills[v]), v.aval.shape)
        return self._replicated(v)


def _literal(v: Var) -> Value:
    return jnp.asarray(v.val, v.aval.dtype)


def sent_together(reductions: Sequence[LeafReduction]) -> list[tuple[Dtype, list[LeafReduction]]]:
    """Return the dtype and the reductions of each gathered vector: one of floats and bools, one per integer dtype.

    >>> sent_together([])
    []
    """
    kinds: dict[str, list[LeafReduction]] = {}
    for reduction in reductions:
        dtype = reduction.outputs[0].aval.dtype
        kinds.setdefault(str(dtype) if jnp.issubdtype(dtype, jnp.integer) else "float", []).append(reduction)
    dtypes_of = lambda together: [v.aval.dtype for r in together for v in r.outputs]
    return [
        (jnp.result_type(*dtypes_of(together), *([jnp.float32] if kind == "float" else [])), together)
        for kind, together in kinds.items()
    ]


def partial_shape(blocks: Blocks, reduction: LeafReduction, v: Var) -> tuple[int, ...]:
    """Return the shape of one IPU's partial result for the output `v` of a reduction."""
    if reduction.eqn is None:
        return v.aval.shape
    shape = blocks[blocks.block_of(reduction.leaf)].shape
    return tuple(shape[d] for d in _kept_dims(blocks, reduction))


def partial_result(blocks: Blocks, reduction: LeafReduction, evaluator: LeafEvaluator, mask: Value) -> Value:
    """Return one IPU's partial result, from its leaf, shard or chunk. Communicates nothing.

    Args:
        blocks: where the weights are.
        reduction: the reduction, with one output like every reduction.
        evaluator: computes the values that it reads.
        mask: `Blocks.leaf_mask` of the leaf's block.
    """
    if reduction.eqn is None:
        (v,) = reduction.outputs
        if blocks.is_local(reduction.leaf):
            return evaluator.logical(v)
        return evaluator.in_block(v).reshape(-1)[:1].reshape(v.aval.shape)  # a leaf of one element
    name, x = reduction.eqn.primitive.name, evaluator.in_block(reduction.eqn.invars[0])
    if mask is not None:
        x = jnp.where(mask, x, _identity(name, x.dtype))
    kept_dims = _kept_dims(blocks, reduction)
    return _reduce(name, x, tuple(d for d in range(x.ndim) if d not in kept_dims))


def combined(blocks: Blocks, reduction: LeafReduction, v: Var, partials: Value) -> Value:
    """Return the output `v` of a reduction from all IPUs' partial results, (replicas, ipus, *partial_shape)."""
    split, dtype = blocks.split(blocks.block_of(reduction.leaf)), v.aval.dtype
    ipu = blocks.ipu_of(reduction.leaf)
    if reduction.eqn is None:
        return partials[0, ipu].astype(dtype)
    if split is None:  # one IPU has the leaf, or all IPUs have the same
        partials = partials[:, ipu : ipu + 1]
    kept_dims = _kept_dims(blocks, reduction)
    if split not in kept_dims:
        return _reduce(reduction.eqn.primitive.name, partials, (0, 1)).astype(dtype)
    at = kept_dims.index(split)
    padded = jnp.concatenate(list(partials[0]), axis=at)
    return lax.slice_in_dim(padded, 0, v.aval.shape[at], axis=at).astype(dtype)


def _kept_dims(blocks: Blocks, reduction: LeafReduction) -> list[int]:
    """Return the dims of a leaf that a reduction keeps: none if the leaf is in flat chunks."""
    dims = range(len(blocks.leaves[reduction.leaf].shape))
    return [d for d in dims if d not in reduction.eqn.params["axes"]]


def _reduce(name: str, x: Value, axes: tuple[int, ...]) -> Value:
    if name == "reduce_sum":
        # a partial sum is not rounded to half
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.sum(x, axes, dtype=jnp.promote_types(x.dtype, jnp.float32) if is_float else x.dtype)
    return jnp.max(x, axes) if name in ("reduce_max", "reduce_or") else jnp.min(x, axes)


def _identity(name: str, dtype: Dtype) -> Value:
    if name == "reduce_sum":
        return jnp.zeros((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(name == "reduce_and")
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(jnp.iinfo(dtype).min if name == "reduce_max" else jnp.iinfo(dtype).max, dtype)
    return jnp.asarray(-jnp.inf if name == "reduce_max" else jnp.inf, dtype)
