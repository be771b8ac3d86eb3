"""Communicate between IPUs or replicas: the collectives that the engine and training share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS


def from_source(source: int, tree: Any, axis: str = IPU_AXIS) -> Any:
    """Broadcast the values of `source` over the axis. Communicates one psum per leaf; values elsewhere are not read."""
    own_index = lax.axis_index(axis)

    def one(leaf: jax.Array) -> jax.Array:
        bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        return lax.psum(jnp.where(own_index == source, bits, jnp.zeros_like(bits)), axis).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def state_over_replicas(tree: Any) -> Any:
    """Return the state of stages for all replicas: the mean of floats, and replica 0's value of everything else.

    Communicates one all-reduce per leaf over the axis "replica".
    """

    def one(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return lax.pmean(leaf, REPLICA_AXIS) if is_float else from_source(0, leaf, REPLICA_AXIS)

    return jax.tree.map(one, tree)
