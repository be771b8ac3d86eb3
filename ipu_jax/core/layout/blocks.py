"""Describe where an optimizer's weights are, in the same way for a pipeline's packed arrays and for plain trees.

optax sees the *logical* tree, leaf by leaf. An IPU holds *blocks*: arrays that have the same shape on every IPU. A
block contains at most one logical leaf on each IPU, and zeros where the leaf is smaller than the block.

    block 0   a slot       IPU 0: mlp/w, all of it     IPU 1: classifier/w, in the first elements
    block 1   a slot       IPU 0: mlp/b                IPU 1: nothing
    block 2   concurrent   IPU 0: table, rows 0-4      IPU 1: table, rows 5-9 (of 9: the last is padding)
    block 3   whole        the same leaf on every IPU

A replica's chunk of a block is a part of the flat block. Of a block that is split over further mesh axes it is some
rows along a dim that is not split, so that the chunk stays split.

Frozen leaves are not logical leaves: optax sees `optax.MaskedNode()` in their place, and never changes them.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Params, Tree, Value
from ipu_jax.core.layout.layout import WHOLE, Leaf, PackedLayout
from ipu_jax.core.layout.packing import Sharded, arrays_of
from ipu_jax.core.layout.place import Place, joined_chunks
from ipu_jax.core.layout.tree_parts import is_rows
from ipu_jax.core.mesh.axes import further_part, names_further, names_in
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS

_WORTH_A_PROGRAM = 2**16  # elements; their update takes about 100 us on a CPU core


@dataclasses.dataclass(frozen=True)
class Block:
    """Describe one array of an IPU.

    Attributes:
        shape, dtype: shape and dtype of the array on one IPU.
        leaves: per IPU, the number of the logical leaf in it, or None. A block of a concurrent leaf has one entry.
        split: for a concurrent leaf, the dim that is split over the IPUs, or None.
        is_slot: whether IPUs hold different leaves in it. If a replica has one IPU, no block is a slot.
        further: how it is split over further mesh axes. Then a leaf in a slot has the slot's shape.
    """

    shape: tuple[int, ...]
    dtype: str
    leaves: tuple[int | None, ...]
    split: int | None = None
    is_slot: bool = False
    further: PartitionSpec = WHOLE

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Return whether every IPU holds all of the leaf."""
        return not self.is_slot and self.split is None

    @property
    def chunk_dim(self) -> int | None:
        """Return the dim along which the chunks of replicas follow one another; None if the flat block is cut."""
        if not names_further(self.further):
            return None
        is_split = [bool(names_in(entry)) for entry in self.further] + [False] * len(self.shape)
        whole = [dim for dim in range(len(self.shape)) if not is_split[dim]]
        return max(whole, key=lambda dim: self.shape[dim], default=None)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Describe the blocks of a set of weights, and the logical leaves in them. `blocks[k]` is one block.

    Attributes:
        ipus: number of IPUs per replica.
        replicas: number of replicas over which the update of each block is divided; 1 if each replica updates all.
        blocks: in the order of `to_blocks`.
        leaves: the logical leaves, in the order of the logical tree.
        treedef: structure of the logical tree.
    """

    ipus: int
    replicas: int
    blocks: tuple[Block, ...]
    leaves: tuple[Leaf, ...]
    treedef: Any

    def __getitem__(self, k: int) -> Block:
        return self.blocks[k]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def is_divided(self) -> bool:
        """Return whether each replica updates a chunk of each block, not all of it."""
        return self.replicas > 1

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mapped axes along which the updates differ: numbers of all weights are combined over them."""
        return (IPU_AXIS,) * (self.ipus > 1) + (REPLICA_AXIS,) * self.is_divided

    def block_of(self, leaf: int) -> int:
        """Return the number of the block that contains a leaf."""
        return next(k for k, block in enumerate(self.blocks) if leaf in block.leaves)

    def ipu_of(self, leaf: int) -> int:
        """Return the IPU in whose slot a leaf is, or 0 if the leaf is in no slot."""
        block = self.blocks[self.block_of(leaf)]
        return block.leaves.index(leaf) if block.is_slot else 0

    def is_local(self, leaf: int) -> bool:
        """Return whether all of the leaf is on one IPU, and none of it on others."""
        return not self.is_divided and self.blocks[self.block_of(leaf)].is_slot

    def chunk_dim(self, k: int) -> int | None:
        """Return the dim along which the chunks of a block follow one another; None if it is cut flat, or not cut."""
        return self.blocks[k].chunk_dim if self.is_divided else None

    def chunk_size(self, k: int) -> int:
        """Return the number of elements of a block that one replica updates. The last chunk is padded with zeros."""
        return math.prod(self.update_shape(k))

    def update_shape(self, k: int) -> tuple[int, ...]:
        """Return the shape in which a block is updated: its own shape, or the shape of a replica's chunk."""
        block, dim = self.blocks[k], self.chunk_dim(k)
        if dim is not None:
            return (*block.shape[:dim], -(-block.shape[dim] // self.replicas), *block.shape[dim + 1 :])
        return (-(-block.size // self.replicas),) if self.is_divided else block.shape

    def global_shape(self, k: int) -> tuple[int, ...]:
        """Return the global shape of an array laid out like a block: (replicas, ipus, *update_shape).

        The first dim is 1 if all replicas hold the same, the second if all IPUs do.
        """
        block = self.blocks[k]
        return (self.replicas, self.ipus if block.is_slot or block.split is not None else 1, *self.update_shape(k))

    def spec(self, k: int) -> PartitionSpec:
        """Return the PartitionSpec of an array of `global_shape`."""
        replicas, ipus = self.global_shape(k)[:2]
        axes: tuple[Any, ...] = (REPLICA_AXIS if replicas > 1 else None, IPU_AXIS if ipus > 1 else None)
        if not self.is_divided or self.chunk_dim(k) is not None:
            axes += tuple(self.blocks[k].further)
        return PartitionSpec(*axes) if any(axes) else WHOLE

    def logical_tree(self, values: Sequence[Value]) -> Tree:
        """Return the logical tree with one value per leaf, and frozen leaves masked."""
        return jax.tree.unflatten(self.treedef, values)

    # on the host

    def write_leaf(self, leaf: int, value: np.ndarray, array: np.ndarray) -> None:
        """Write a leaf into an array of `global_shape`, which is 0 beside it. `place` says how to read it back."""
        k = self.block_of(leaf)
        padded, split = self._padded(k, value, np), self.blocks[k].split
        parts = [padded] if split is None else np.split(padded, self.ipus, split)
        for ipu, part in enumerate(parts, start=self.ipu_of(leaf)):
            array[:, ipu] = self.to_chunks(k, part, np)

    def place(self, leaf: int, array: str, at_least: Value = None) -> Place:
        """Return where a leaf is in the named array of `global_shape`, with the leaf's dtype promoted by `at_least`."""
        k, own = self.block_of(leaf), self.leaves[leaf]
        block, chunks = self.blocks[k], self.chunk_dim(k)
        dtype = own.dtype if at_least is None else jnp.promote_types(own.dtype, at_least).name
        if block.split is not None:
            return Place(own.path, own.shape, dtype, array, ipus=1, shard=block.shape, split=block.split, chunks=chunks)
        return Place(own.path, own.shape, dtype, array, ipus=1, ipu=self.ipu_of(leaf), rows=own.rows, chunks=chunks)

    def _padded(self, k: int, value: Value, numpy: Any) -> Any:
        """Return a leaf with the shape of its slot, or padded so that all IPUs get shards of the same size."""
        block, split = self.blocks[k], self.blocks[k].split
        if block.is_slot and value.shape != block.shape:
            return numpy.pad(value.reshape(-1), (0, block.size - value.size)).reshape(block.shape)
        if split is None:
            return value
        missing = block.shape[split] * self.ipus - value.shape[split]
        return numpy.pad(value, [(0, missing if d == split else 0) for d in range(value.ndim)])

    # inside the program

    def chunks_of(self, params: Params) -> list[Value]:
        """Return this replica's chunk of each block of the weights. Communicates nothing."""
        return [self.replica_chunk(k, array) for k, array in enumerate(to_blocks(params))]

    def replica_chunk(self, k: int, array: Value) -> Value:
        """Return this replica's chunk of an IPU's block. Communicates nothing."""
        if not self.is_divided:
            return array
        return lax.dynamic_index_in_dim(self.to_chunks(k, array), self._chunk_number(), keepdims=False)

    def _chunk_number(self) -> Value:
        return lax.axis_index(REPLICA_AXIS) if self.is_divided else 0

    def to_chunks(self, k: int, array: Value, numpy: Any = jnp) -> Value:
        """Return a block as (replicas, *update_shape), padded with zeros."""
        if not self.is_divided:
            return array[None]
        dim = self.chunk_dim(k)
        if dim is None:
            missing = self.replicas * self.chunk_size(k) - self.blocks[k].size
            return numpy.pad(array.reshape(-1), (0, missing)).reshape(self.replicas, -1)
        rows = self.update_shape(k)[dim]
        widths = [(0, self.replicas * rows - size if d == dim else 0) for d, size in enumerate(array.shape)]
        divided = numpy.pad(array, widths).reshape(*array.shape[:dim], self.replicas, rows, *array.shape[dim + 1 :])
        return numpy.moveaxis(divided, dim, 0)

    def from_chunks(self, k: int, chunks: Value) -> Value:
        """Return a block from its chunks; the inverse of `to_chunks`."""
        return joined_chunks(chunks, self.blocks[k].shape, self.blocks[k].chunk_dim, jnp)

    def local_part(self, leaf: int, value: Value) -> Value:
        """Return this IPU's part of a leaf-shaped array, in the block's update shape. Communicates nothing."""
        k = self.block_of(leaf)
        block = self.blocks[k]
        value = self._padded(k, value, jnp)
        if block.split is not None:
            local = block.shape[block.split]
            value = lax.dynamic_slice_in_dim(value, lax.axis_index(IPU_AXIS) * local, local, block.split)
        return self.replica_chunk(k, value)

    def counts(self, k: int) -> np.ndarray:
        """Return the number of elements of a slot, in its update shape, that belong to a leaf: (replicas, ipus).

        They are the first elements of the slot. The number is 0 where an IPU has no leaf. Rows that pad a slot which is
        split over further axes count, too.
        """
        sizes = np.array([0 if leaf is None else self.leaves[leaf].size for leaf in self.blocks[k].leaves])
        if self.chunk_dim(k) is not None:
            return np.tile(np.where(sizes > 0, self.chunk_size(k), 0), (self.replicas, 1))
        starts = np.arange(self.replicas)[:, None] * self.chunk_size(k)
        return np.clip(sizes - starts, 0, self.chunk_size(k))

    def own_count(self, k: int) -> Value:
        """Return this IPU's entry of `counts`. XLA does not know its value, even if all entries are equal."""
        counts = jnp.asarray(self.counts(k), jnp.int32)
        is_ipu = (jnp.arange(self.ipus) == lax.axis_index(IPU_AXIS))[None]
        is_chunk = (jnp.arange(self.replicas) == self._chunk_number())[:, None]
        return jnp.sum(jnp.where(is_ipu & is_chunk, counts, 0))

    def lengths(self, k: int) -> list[int]:
        """Return the lengths to which a slot is updated: the largest of `counts`, and smaller ones that save much.

        Each IPU uses the smallest length that contains its leaf. Each length is at most half of the next one, because
        an update is compiled for each.
        """
        lengths: list[int] = []
        for count in sorted({*self.counts(k).flat}, reverse=True):
            if not lengths or (0 < 2 * count <= lengths[-1] and lengths[-1] - count >= _WORTH_A_PROGRAM):
                lengths.append(int(count))
        return lengths[::-1]

    def leaf_mask(self, k: int, zero: Value = 0) -> Value:
        """Return which elements of a block, in its update shape, belong to a leaf; None if all do on every IPU.

        A `Fence.zero` keeps XLA from computing the mask before the guard.
        """
        if (dim := self.chunk_dim(k)) is not None:
            return self._row_mask(k, dim, zero)
        block, shape, size, local = self.blocks[k], self.update_shape(k), 1, 1
        if block.split is not None:
            size, local = self.leaves[block.leaves[0] or 0].shape[block.split], block.shape[block.split]
        if block.is_slot:
            is_padded = bool((self.counts(k) < math.prod(shape)).any())
        else:
            is_padded = self.replicas * self.chunk_size(k) > block.size
            is_padded |= block.split is not None and size < local * self.ipus
        if not is_padded:
            return None
        position = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape) + zero
        if block.is_slot:
            return position < self.own_count(k)
        position += self._chunk_number() * self.chunk_size(k)
        mask = position < block.size
        if block.split is not None:
            stride = math.prod(block.shape[block.split + 1 :])
            mask &= lax.axis_index(IPU_AXIS) * local + position // stride % local < size
        return mask

    def _row_mask(self, k: int, dim: int, zero: Value) -> Value:
        """Return `leaf_mask` of a block whose chunks are rows along a dim."""
        block, shape = self.blocks[k], self.update_shape(k)
        mask = None
        if block.is_slot and None in block.leaves:
            mask = jnp.broadcast_to(self.own_count(k) > zero, shape)
        rows = jnp.arange(shape[dim], dtype=jnp.int32) + zero
        sizes = [(dim, self._chunk_number() * shape[dim] + rows, block.shape[dim], self.replicas * shape[dim])]
        if block.split is not None:
            size, local = self.leaves[block.leaves[0] or 0].shape[block.split], block.shape[block.split]
            of_shard = jnp.arange(shape[block.split], dtype=jnp.int32) + zero
            if block.split == dim:
                of_shard = sizes[0][1]
            sizes.append((block.split, lax.axis_index(IPU_AXIS) * local + of_shard, size, local * self.ipus))
        for along, position, size, padded in sizes:
            if size < padded:
                inside = (position < size).reshape([-1 if d == along else 1 for d in range(len(shape))])
                mask = jnp.broadcast_to(inside, shape) if mask is None else mask & inside
        return mask


def blocks_of_layout(layout: PackedLayout, *, replicas: int) -> Blocks:
    """Return the blocks of a pipeline's weights."""
    leaves, masked = layout.trained, optax.MaskedNode()
    tree = layout.tree_of(lambda leaf: masked if leaf.frozen else leaf)
    # a frozen leaf is masked once, also if its rows are on several IPUs
    tree = jax.tree.map(
        lambda node: masked if is_rows(node) and not jax.tree.leaves(node) else node, tree, is_leaf=is_rows
    )
    at, blocks = {leaf: number for number, leaf in enumerate(leaves)}, []
    for k in _block_arrays(layout):
        array, held = layout.arrays[k], [leaf for leaf in leaves if leaf.array == k]
        owned: list[int | None] = [None] * (layout.ipus if array.is_slot else 1)
        for leaf in held:
            owned[leaf.ipu or 0] = at[leaf]
        split, further = (None, array.spec) if array.is_slot else (held[0].split, further_part(array.spec))
        is_split = {"split": split if layout.ipus > 1 else None, "is_slot": array.is_slot and layout.ipus > 1}
        blocks.append(Block(array.shape, array.dtype, tuple(owned), **is_split, further=further))
    return Blocks(layout.ipus, replicas, tuple(blocks), leaves, jax.tree.structure(tree))


def _block_arrays(layout: PackedLayout) -> list[int]:
    """Return the numbers of the arrays that are blocks: of slots, and then of single leaves in the order of groups."""
    trained = [leaf.array for leaf in layout.leaves if not leaf.frozen]
    return sorted(dict.fromkeys(trained), key=lambda k: (not layout.arrays[k].is_slot, k * layout.arrays[k].is_slot))


def blocks_of_tree(params: Params, *, replicas: int) -> Blocks:
    """Return the blocks of a plain tree, which every replica of one IPU holds whole."""
    return blocks_of_layout(PackedLayout.of_one_ipu("params", params), replicas=replicas)


def to_blocks(params: Params) -> list[Value]:
    """Return this IPU's weights, or their gradients, as one array per block. Call it inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.leaves(params)
    arrays = arrays_of(params)
    return [arrays[k] for k in _block_arrays(params.layout)]


def from_blocks(params: Params, arrays: Sequence[Value]) -> Params:
    """Return the weights with these arrays in place of the arrays of `to_blocks`. Call it inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.unflatten(jax.tree.structure(params), arrays)
    layout, found = params.layout, list(params.arrays)
    for k, array in zip(_block_arrays(layout), arrays, strict=True):
        found[k] = array[None] if layout.arrays[k].is_slot else array
    return Sharded(found, layout)
