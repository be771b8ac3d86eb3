"""Hold the arguments of a step as one record, in which no dim is left out.

    a user gives              a door makes of it                          an IPU's program gets
    (M, B, ...)               (R=1, M, B, ...)                            (M, B, ...) of its replica
    (R, M, B, ...)            the same
    (K, R, M, B, ...)         the same, for a call of K updates

Users leave out R, the replicas, and K, the updates of a call, where these are 1, and get results without them. *Doors*
add and remove such dims. A door is the first and the last line of a program that Pipeline, Replicas or TrainStep jits,
so that no array is copied for it. Behind a door no dim is missing, and nothing asks for a size of 1.
"""

from typing import NamedTuple

import jax

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value


class StepArgs(NamedTuple):
    """The arguments of one weight update, or of the micro-batches of a prediction. A pytree.

    Attributes:
        params: the weights on the IPUs.
        batch: leaves (R, M, micro-batch, ...); as a user gives it, without the first dim if R is 1.
        state: the state of stages on the IPUs, or None.
        key: a typed key, or None.
    """

    params: Params
    batch: Batch
    state: Tree = None
    key: Key = None

    def entered(self, replicas: int) -> "StepArgs":
        """Return the record with all dims, from arguments as a user gives them."""
        return self._replace(batch=with_dims(self.batch, replicas))

    def of_replica(self) -> "StepArgs":
        """Return a replica's part in its mapped program: batch leaves are (M, micro-batch, ...)."""
        return self._replace(batch=jax.tree.map(lambda leaf: leaf[0], self.batch))


def given_dims(*sizes: int) -> int:
    """Return how many dims of these sizes users see.

    >>> given_dims(1, 1), given_dims(1, 4), given_dims(2, 4)
    (0, 1, 2)
    """
    return sum(size > 1 for size in sizes)


def with_dims(tree: Tree, *sizes: int) -> Tree:
    """Add the leading dims of size 1 to arrays, or to their shapes, whose other leading dims have these sizes."""
    for at, size in enumerate(sizes):
        tree = tree if size > 1 else jax.tree.map(lambda leaf, at=at: _expanded(leaf, at), tree)
    return tree


def without_dims(tree: Tree, *sizes: int) -> Tree:
    """Remove the dims of size 1 from arrays with leading dims of these sizes: the inverse of `with_dims`."""
    ones = tuple(at for at, size in enumerate(sizes) if size == 1)
    return jax.tree.map(lambda leaf: leaf.squeeze(ones), tree) if ones else tree


def _expanded(leaf: Value, at: int) -> Tree:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*leaf.shape[:at], 1, *leaf.shape[at:]), leaf.dtype)
    return leaf[(slice(None),) * at + (None,)]
