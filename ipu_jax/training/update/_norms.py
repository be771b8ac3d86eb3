"""Compute norms over the weights of all IPUs where they are, clip by them, and find the learning rate to report."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey, GetAttrKey

from ipu_jax.base.annotations import Params, Tree, Value
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.optimizer.update import ShardedUpdate
from ipu_jax.training.update._precision import widened


def clip(largest: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of `largest`. Unlike optax's own, this squares half types in float32."""

    def update(updates: Tree, state: Tree, params: Params = None) -> tuple[Tree, Tree]:
        squares = [_sum_of_squares(g) for g in jax.tree.leaves(updates)]
        norm = jnp.sqrt(sum(squares, jnp.float32(0)))
        factor = jnp.where(norm > largest, largest / norm, 1)
        return jax.tree.map(lambda g: (widened(g) * factor).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def norms(blocks: Blocks, *trees: Sequence[Value]) -> list[Value]:
    """Return the norms of trees that are laid out like the blocks, the same on all IPUs, in float32 at least.

    Communicates one psum of one float per tree. A leaf that is on every IPU counts once, and padding does not count.

    Args:
        blocks: where the weights are.
        trees: this IPU's arrays of each tree, one per block, in the block's update shape.
    """
    squares = jnp.stack([_own_squares(blocks, arrays) for arrays in trees])
    return list(jnp.sqrt(lax.psum(squares, blocks.axes)))


def learning_rate_in(update: ShardedUpdate) -> int | None:
    """Return which replicated part of the optimizer's state is the learning rate; None if none or several are."""
    analysis = update.analysis
    numbers = jax.tree.unflatten(analysis.state_treedef, range(analysis.state_treedef.num_leaves))
    ends = (GetAttrKey("hyperparams"), DictKey("learning_rate"))
    found = [number for path, number in jax.tree.leaves_with_path(numbers) if tuple(path[-2:]) == ends]
    replicated = [number for number in range(analysis.state_treedef.num_leaves) if number not in analysis.leaf_of_state]
    return replicated.index(found[0]) if len(found) == 1 and found[0] in replicated else None


def _own_squares(blocks: Blocks, arrays: Sequence[Value]) -> Value:
    """Return this IPU's part of the sum of squares."""
    total = jnp.float32(0)
    for k, array in enumerate(arrays):
        mask = blocks.leaf_mask(k)
        square = _sum_of_squares(array if mask is None else jnp.where(mask, array, 0))
        if IPU_AXIS in blocks.axes and blocks[k].is_whole:
            square = jnp.where(lax.axis_index(IPU_AXIS) == 0, square, 0)
        total += square
    return total


def _sum_of_squares(array: Value) -> Value:
    return jnp.sum(jnp.square(widened(array)))
