"""Where the weights that an optimizer sees lie: the one picture of a pipeline's packed arrays and of plain trees.

What optax is shown is the *logical* tree, leaf by leaf. What an IPU holds are *cells*: arrays of one shape on every
IPU, each with at most one logical leaf on an IPU, and zeros where the leaf is smaller.

    cell 0   a slot       IPU 0: mlp/w, all of it     IPU 1: classifier/w, the first elements
    cell 1   a slot       IPU 0: mlp/b                IPU 1: nothing
    cell 2   concurrent   IPU 0: table, rows 0-4      IPU 1: table, rows 5-9 (of 9: the last is padding)
    cell 3   whole        the same leaf on every IPU

Frozen leaves are no logical leaves: optax sees `optax.MaskedNode()` in their place, and never touches them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.weights.packing import WHOLE, Layout, Leaf, Sharded, local_shape


@dataclasses.dataclass(frozen=True)
class Cell:
    """Describe one array of an IPU.

    Attributes:
        shape, dtype: what an IPU holds.
        leaves: per IPU, the number of the logical leaf in it, or None. One entry where all hold it (a concurrent leaf).
        split: of a concurrent leaf, the dim that is split over the IPUs.
        is_slot: whether IPUs hold different leaves. On a replica of one IPU all cells are whole.
    """

    shape: tuple[int, ...]
    dtype: str
    leaves: tuple[int | None, ...]
    split: int | None = None
    is_slot: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Return whether every IPU holds all of the leaf."""
        return not self.is_slot and self.split is None


@dataclasses.dataclass(frozen=True)
class Cells:
    """Describe the cells of a set of weights, and which logical leaves are in them.

    Attributes:
        ipus: of a replica.
        replicas: over how many each cell is cut for the update; 1 where each replica updates all of it.
        cells: in the order of `take`.
        leaves: the logical leaves, in the order of the logical tree.
        treedef: the logical tree.
    """

    ipus: int
    replicas: int
    cells: tuple[Cell, ...]
    leaves: tuple[Leaf, ...]
    treedef: Any

    def cell_of(self, leaf: int) -> int:
        return next(k for k, cell in enumerate(self.cells) if leaf in cell.leaves)

    def chunk(self, k: int) -> int:
        """Return how many elements of a cell one replica updates; the last chunk is padded with zeros."""
        return -(-self.cells[k].size // self.replicas)

    def shown(self, k: int) -> tuple[int, ...]:
        """Return the shape in which a cell is updated: its own, or a chunk's."""
        return self.cells[k].shape if self.replicas == 1 else (self.chunk(k),)

    def logical(self, values: Sequence[Any]) -> Any:
        """Return the logical tree of these leaves, frozen ones masked."""
        return jax.tree.unflatten(self.treedef, values)

    # on the host

    def host_blocks(self, leaf: int, value: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return, for each IPU that holds part of a leaf, that part as (replicas, *shown)."""
        k = self.cell_of(leaf)
        cell = self.cells[k]
        blocks = {cell.leaves.index(leaf) if cell.is_slot else 0: value}
        if cell.split is not None:
            size, local = value.shape[cell.split], cell.shape[cell.split]
            widths = [(0, local * self.ipus - size if d == cell.split else 0) for d in range(value.ndim)]
            blocks = dict(enumerate(np.split(np.pad(value, widths), self.ipus, cell.split)))
        found = []
        for ipu, block in blocks.items():
            flat = np.zeros(self.replicas * self.chunk(k) if self.replicas > 1 else cell.size, value.dtype)
            flat[: block.size] = block.reshape(-1)
            found.append((ipu, flat.reshape(self.replicas, *self.shown(k))))
        return found

    def host_leaf(self, leaf: int, array: np.ndarray) -> np.ndarray:
        """Return the leaf from (replicas, ipus, *shown), the inverse of `host_blocks`."""
        k = self.cell_of(leaf)
        cell, shape = self.cells[k], self.leaves[leaf].shape
        of_ipu = lambda ipu: array[:, ipu].reshape(-1)[: cell.size]  # noqa: E731
        if cell.split is None:
            return of_ipu(cell.leaves.index(leaf) if cell.is_slot else 0)[: math.prod(shape)].reshape(shape)
        whole = np.concatenate([of_ipu(ipu).reshape(cell.shape) for ipu in range(self.ipus)], cell.split)
        return whole[tuple(map(slice, shape))]

    # inside the program

    def cut(self, k: int, whole: Any) -> Any:
        """Return this replica's chunk of an IPU's cell. Communicates nothing."""
        if self.replicas == 1:
            return whole
        return lax.dynamic_index_in_dim(self.rows(k, whole), lax.axis_index(REPLICA_AXIS), keepdims=False)

    def rows(self, k: int, whole: Any) -> Any:
        """Return a cell as (replicas, chunk), padded with zeros."""
        fill = self.replicas * self.chunk(k) - self.cells[k].size
        return jnp.pad(whole.reshape(-1), (0, fill)).reshape(self.replicas, -1)

    def unrows(self, k: int, rows: Any) -> Any:
        """Return a cell from its chunks, the inverse of `rows`."""
        return rows.reshape(-1)[: self.cells[k].size].reshape(self.cells[k].shape)

    def localize(self, leaf: int, value: Any) -> Any:
        """Return this IPU's part of a replicated array of the leaf's size, in the cell's update shape."""
        k = self.cell_of(leaf)
        cell = self.cells[k]
        if cell.is_slot:
            if value.shape != cell.shape:
                flat = jnp.pad(value.reshape(-1), (0, cell.size - value.size))
                value = flat.reshape(cell.shape)
        elif cell.split is not None:
            size, local = value.shape[cell.split], cell.shape[cell.split]
            widths = [(0, local * self.ipus - size if d == cell.split else 0) for d in range(value.ndim)]
            start = lax.axis_index(IPU_AXIS) * local
            value = lax.dynamic_slice_in_dim(jnp.pad(value, widths), start, local, cell.split)
        return self.cut(k, value)

    def delocalize(self, leaf: int, value: Any) -> Any:
        """Return the logical leaf, on the owner of a slot that is not chunked over replicas."""
        shape = self.leaves[leaf].shape
        return value if value.shape == shape else value.reshape(-1)[: math.prod(shape)].reshape(shape)

    def has_leaf(self, k: int) -> Any:
        """Return whether a leaf is in this IPU's part of a slot."""
        return jnp.asarray([leaf is not None for leaf in self.cells[k].leaves])[lax.axis_index(IPU_AXIS)]

    def valid(self, k: int) -> Any:
        """Return which elements of a cell in its update shape belong to a leaf, or None if all do on every IPU."""
        cell = self.cells[k]
        sizes = [0 if leaf is None else self.leaves[leaf].size for leaf in cell.leaves]
        if cell.split is not None:
            size, local = self.leaves[cell.leaves[0] or 0].shape[cell.split], cell.shape[cell.split]
            filled = size < local * self.ipus
        else:
            size, local, filled = 0, 1, any(size < cell.size for size in sizes)
        cut_filled = self.replicas * self.chunk(k) > cell.size
        if not filled and not cut_filled:
            return None
        position = jnp.arange(math.prod(self.shown(k)), dtype=jnp.int32).reshape(self.shown(k))
        if self.replicas > 1:
            position += lax.axis_index(REPLICA_AXIS) * self.chunk(k)
        if cell.is_slot:
            of_ipu = jnp.asarray(sizes, jnp.int32)[lax.axis_index(IPU_AXIS)]
            return position < of_ipu
        found = position < cell.size
        if cell.split is not None:
            stride = math.prod(cell.shape[cell.split + 1 :])
            found &= lax.axis_index(IPU_AXIS) * local + position // stride % local < size
        return found


def of_layout(layout: Layout, *, replicas: int) -> Cells:
    """Return the cells of a pipeline's weights."""
    tree: dict[str, Any] = {}
    leaves: list[tuple[Any, Leaf]] = []
    for group in layout.groups:
        numbers = [optax.MaskedNode() if leaf.frozen else (group.name, i) for i, leaf in enumerate(group.leaves)]
        tree[group.name] = jax.tree.unflatten(group.treedef, numbers)
    is_pair = lambda node: isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], str)  # noqa: E731
    named, treedef = jax.tree.flatten(tree, is_leaf=is_pair)
    for name, i in named:
        leaves.append(((name, i), layout.group(name).leaves[i]))
    at = {key: number for number, (key, _) in enumerate(leaves)}
    cells = []
    for k, slot in enumerate(layout.slots):
        owned: list[int | None] = [None] * layout.ipus
        for group in layout.groups:
            for i, leaf in enumerate(group.leaves):
                if group.ipu is not None and leaf.slot == k and not leaf.frozen:
                    owned[group.ipu] = at[group.name, i]
        if any(number is not None for number in owned):
            cells.append(Cell(slot.shape, slot.dtype, tuple(owned), is_slot=layout.ipus > 1))
    for group in layout.groups:
        for i, leaf in enumerate(group.leaves):
            if group.ipu is None and not leaf.frozen:
                dims = [d for d, axis in enumerate(leaf.spec) if axis is not None]
                split = dims[0] if dims and layout.ipus > 1 else None
                cells.append(Cell(local_shape(leaf, layout.ipus), leaf.dtype, (at[group.name, i],), split))
    return Cells(layout.ipus, replicas, tuple(cells), tuple(leaf for _, leaf in leaves), treedef)


def of_tree(params: Any, *, replicas: int) -> Cells:
    """Return the cells of a plain tree that every replica of one IPU holds whole."""
    paths, treedef = jax.tree.flatten_with_path(params)
    leaves = tuple(
        Leaf(f"params{jax.tree_util.keystr(path)}", tuple(leaf.shape), np.dtype(leaf.dtype).name)
        for path, leaf in paths
    )
    cells = tuple(Cell(leaf.shape, leaf.dtype, (i,)) for i, leaf in enumerate(leaves))
    return Cells(1, replicas, cells, leaves, treedef)


def take(params: Any) -> list[Any]:
    """Return the arrays of this IPU's weights that are cells, in their order. To be called inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.leaves(params)
    layout = params.layout
    trained = layout.trained_slots
    return [slot[0] for k, slot in enumerate(params.slots) if k in trained] + [
        value
        for group in layout.groups
        if group.ipu is None
        for leaf, value in zip(group.leaves, params.concurrent[group.name], strict=True)
        if not leaf.frozen
    ]


def put(params: Any, arrays: Sequence[Any]) -> Any:
    """Return the weights with these arrays in place of those of `take`. To be called inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.unflatten(jax.tree.structure(params), arrays)
    layout, following = params.layout, iter(arrays)
    trained = layout.trained_slots
    slots = [next(following)[None] if k in trained else slot for k, slot in enumerate(params.slots)]
    concurrent = {
        group.name: [
            value if leaf.frozen else next(following)
            for leaf, value in zip(group.leaves, params.concurrent[group.name], strict=True)
        ]
        for group in layout.groups
        if group.ipu is None
    }
    return Sharded(slots, {**params.concurrent, **concurrent}, layout)


def block_shape(cells: Cells, k: int) -> tuple[int, ...]:
    """Return the global shape of an array laid out as a cell: (replicas, ipus, *shown), 1 where all hold the same."""
    cell = cells.cells[k]
    return (cells.replicas, cells.ipus if cell.is_slot or cell.split is not None else 1, *cells.shown(k))


def block_spec(cells: Cells, k: int) -> PartitionSpec:
    """Return the PartitionSpec of such an array."""
    of_replica, of_ipu = block_shape(cells, k)[:2]
    axes = (REPLICA_AXIS if of_replica > 1 else None, IPU_AXIS if of_ipu > 1 else None)
    return PartitionSpec(*axes) if any(axes) else WHOLE
