"""Keep a moving average of the weights, laid out like optimizer state: e' = e + (1 - decay) (w - e), e starts at w.

The average is in float32 at least, because half would lose (1 - decay) (w - e). Under `shard_optimizer` each replica
keeps its part of it. Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging".
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Params, Value
from ipu_jax.core.layout.blocks import Blocks, from_blocks
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.optimizer import zero


def next_average(decay: float, averages: Sequence[Value], weights: Sequence[Value]) -> list[Value]:
    """Return the averages after an update. Communicates nothing.

    Args:
        decay: the fraction of the old average that stays.
        averages: per block, (1, 1, *update_shape).
        weights: the new weights per block, (*update_shape).

    >>> next_average(0.75, [jnp.full((1, 1, 2), 4.0)], [jnp.zeros(2)])[0].tolist()
    [[[3.0, 3.0]]]
    """
    return [e + (1 - decay) * (w.astype(e.dtype)[None, None] - e) for e, w in zip(averages, weights, strict=True)]


def with_average(blocks: Blocks, params: Params, averages: Sequence[Value]) -> Params:
    """Return the weights with the trained ones replaced by their averages, in the weights' dtypes.

    Call it inside the program. Under `shard_optimizer` it communicates one all_gather over "replica" per bucket.
    """
    arrays = []
    for k, (average, own) in enumerate(zip(averages, blocks.chunks_of(params), strict=True)):
        array, mask = average[0, 0].astype(own.dtype), blocks.leaf_mask(k)
        # a slot may hold frozen weights of this IPU
        arrays.append(array if mask is None else jnp.where(mask, array, own))
    return from_blocks(params, zero.gather(blocks, arrays))


def divided_average(blocks: Blocks, leaves: Sequence[Value]) -> list[np.ndarray]:
    """Split the averages of whole leaves into blocks: host arrays of `Blocks.global_shape`."""
    averages = []
    for k, block in enumerate(blocks):
        averages.append(np.zeros(blocks.global_shape(k), jnp.promote_types(block.dtype, jnp.float32)))
        for leaf in {leaf for leaf in block.leaves if leaf is not None}:
            blocks.write_leaf(leaf, np.asarray(leaves[leaf], averages[k].dtype), averages[k])
    return averages


def whole_average(blocks: Blocks, averages: Sequence[Value]) -> list[jax.Array]:
    """Return copies of the averages as whole leaves: the inverse of `divided_average`.

    Communicates one all-gather per array that is split over several instances.
    """
    arrays = [on_host(average) for average in averages]
    leaves = range(len(blocks.leaves))
    return [jnp.array(blocks.place(leaf, "").leaf(arrays[blocks.block_of(leaf)])) for leaf in leaves]
