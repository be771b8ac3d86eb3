"""Summaries of leaves: what each IPU finds of one, and what they make of it together.

|table|^2    IPU 0: sum of its rows    IPU 1: sum of its rows, padding left out    together: the sum of both
|mlp/w|^2    IPU 0: the sum            IPU 1: that of another leaf                 together: IPU 0's
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipu_jax.optimizer._analysis import Summary
from ipu_jax.optimizer._evaluate import aval_of
from ipu_jax.optimizer.blocks import Cells


def partial_shape(cells: Cells, s: Summary, v: Any) -> tuple[int, ...]:
    """Return the shape of one IPU's part of a summary's output `v`."""
    cell = cells.cells[cells.cell_of(s.leaf)]
    if s.eqn is None:
        return aval_of(v).shape
    if cells.replicas > 1:
        return ()
    return tuple(size for d, size in enumerate(cell.shape) if d not in s.eqn.params["axes"])


def partial(cells: Cells, s: Summary, lookup: Any, valid: Any) -> list[Any]:
    """Return one IPU's part of a summary's outputs, from its leaf, shard or chunk. Communicates nothing.

    Args:
        cells: where the weights lie.
        s: the summary.
        lookup: gives the values that it reads.
        valid: `Cells.valid` of the leaf's cell.
    """
    cell = cells.cells[cells.cell_of(s.leaf)]
    if s.eqn is None:
        (v,) = s.outputs
        own = cell.is_slot and cells.replicas == 1
        return [lookup.logical(v) if own else lookup(v).reshape(-1)[:1].reshape(aval_of(v).shape)]
    name, x = s.eqn.primitive.name, lookup(s.eqn.invars[0])
    if valid is not None:
        x = jnp.where(valid, x, _identity(name, x.dtype))
    axes = tuple(range(x.ndim)) if cells.replicas > 1 else tuple(s.eqn.params["axes"])
    return [_reduce(name, x, axes)]


def whole_of(cells: Cells, s: Summary, v: Any, k: int, found: Any) -> Any:
    """Return a summary's output `v` from every IPU's part of it, (replicas, ipus, *partial shape)."""
    cell, dtype = cells.cells[k], aval_of(v).dtype
    if s.eqn is None:
        ipu = cell.leaves.index(s.leaf) if cell.is_slot else 0
        return found[0, ipu].reshape(aval_of(v).shape).astype(dtype)
    name = s.eqn.primitive.name
    if cell.is_slot:
        found = found[:, cell.leaves.index(s.leaf)][:, None]
    elif cell.is_whole:
        found = found[:, :1]
    if cells.replicas > 1 or (cell.split is not None and cell.split in s.eqn.params["axes"]):
        whole = _reduce(name, found, (0, 1))
    else:  # split over the IPUs by a dim that stays
        left = [d for d in range(len(cell.shape)) if d not in s.eqn.params["axes"]]
        at = left.index(cell.split)
        whole = lax.slice_in_dim(jnp.concatenate(list(found[0]), axis=at), 0, aval_of(v).shape[at], axis=at)
    return whole.astype(dtype)


def size_of(shape: tuple[int, ...]) -> int:
    """Return how many elements an array of this shape has."""
    return int(np.prod(shape))


def _reduce(name: str, x: Any, axes: tuple[int, ...]) -> Any:
    if name == "reduce_sum":
        return jnp.sum(x, axes, dtype=jnp.promote_types(x.dtype, jnp.float32))  # a part of a sum is not rounded to half
    return jnp.max(x, axes) if name in ("reduce_max", "reduce_or") else jnp.min(x, axes)


def _identity(name: str, dtype: Any) -> Any:
    if name == "reduce_sum":
        return jnp.zeros((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(name == "reduce_and")
    return jnp.asarray(-jnp.inf if name == "reduce_max" else jnp.inf, dtype)
