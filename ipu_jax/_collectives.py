"""Communicate between IPUs or replicas: the collectives that the engine and training share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from sharded_ops import to_all


def broadcast(source: int, tree: Any, axis: str = IPU_AXIS) -> Any:
    """Return on every device of the axis the tree that `source` holds; the others' is not read.

    Communicates one psum per leaf.
    """
    return jax.tree.map(lambda leaf: to_all(leaf, source, axis), tree)


def state_over_replicas(tree: Any) -> Any:
    """Return the state that all replicas continue with: the mean of floating leaves, replica 0's of the others.

    Communicates one all-reduce per leaf over the axis "replica".
    """

    def one(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return lax.pmean(leaf, REPLICA_AXIS) if is_float else broadcast(0, leaf, REPLICA_AXIS)

    return jax.tree.map(one, tree)
