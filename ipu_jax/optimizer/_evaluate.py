"""Computing one leaf's part of a traced update, as far as it is asked for."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from ipu_jax.optimizer._analysis import Reading
from ipu_jax.optimizer.blocks import Cells


class Lookup:
    """Look up the values of a traced update that one leaf's program reads.

    Args:
        reading: of the update.
        cells: where the weights lie.
        leaf: the leaf.
        shape: in which its cell is shown.
        made: the values that are there, as the cell is shown.
        known: gives a variable that every IPU knows.
        owned: the values that are there in their own shape.
    """

    def __init__(
        self,
        reading: Reading,
        cells: Cells,
        leaf: int,
        shape: tuple[int, ...],
        made: dict[Any, Any],
        known: Callable[[Any], Any],
        owned: dict[Any, Any],
    ):
        self._reading, self._cells, self._leaf = reading, cells, leaf
        self._shape, self._made, self._known = shape, made, known
        self._owned = owned

    def __call__(self, v: Any) -> Any:
        """Return a value of the leaf's shape, or a number, in the cell's update shape."""
        reading, made = self._reading, self._made
        if isinstance(v, core.Literal):
            return jnp.full(self._shape, v.val, aval_of(v).dtype)
        if v in made:
            return made[v]
        if v in reading.owned:
            made[v] = self._cells.localize(self._leaf, self.logical(v))
        elif v in reading.like:
            eqn = reading.made_by[v]
            (made[v],) = bind(eqn, [self(x) for x in eqn.invars])
        elif v in reading.fills or not aval_of(v).shape:
            # by its number, so that leaves of different shapes in one cell have one program
            made[v] = jnp.broadcast_to(self.logical(reading.fills.get(v, v)).astype(aval_of(v).dtype), self._shape)
        else:
            whole = jnp.broadcast_to(self._known(v), self._cells.leaves[self._leaf].shape)
            made[v] = self._cells.localize(self._leaf, whole)
        return made[v]

    def logical(self, v: Any) -> Any:
        """Return a value in its own shape, on the owner of a leaf that is not chunked over replicas."""
        if isinstance(v, core.Literal):
            return jnp.asarray(v.val, aval_of(v).dtype)
        if v in self._reading.owned:
            if v not in self._owned:
                eqn = self._reading.made_by[v]
                self._owned.update(zip(eqn.outvars, bind(eqn, [self.logical(x) for x in eqn.invars]), strict=True))
            return self._owned[v]
        if v in self._reading.like:
            return self._cells.delocalize(self._leaf, self(v))
        if v in self._reading.fills:
            return jnp.broadcast_to(self.logical(self._reading.fills[v]), aval_of(v).shape)
        return self._known(v)


def bind(eqn: Any, inputs: list[Any]) -> Any:
    """Return the results of an equation on other values than those it was traced with."""
    found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return found if eqn.primitive.multiple_results else [found]


def aval_of(v: Any) -> Any:
    """Return the shape and dtype of a variable."""
    return v.aval
