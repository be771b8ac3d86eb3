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

With ZeRO-1 each replica updates a part of the weights, and keeps only this part's state:

    gradients     replica 0: a a a b b     replica 1: a a a b b     each replica has its own sums
    psum_scatter  replica 0: A A b'        replica 1: A - B         each replica has the total of a part of each array
    update        replica 0: its part      replica 1: its part      the optimizer's state is divided, too
    all_gather    every replica: all weights

An all-reduce is a reduce-scatter and an all-gather, so this sends no more bytes. Small arrays are sent together, in
buckets; an array that is split over further mesh axes is sent alone, in its own shape, so that it stays split.

Source: Rajbhandari et al. 2019, "ZeRO", arXiv:1910.02054: optimizer state partitioning, P_os.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Dtype, Params, Tree, Value
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf, PackedArray, in_chunks, joined_chunks
from ipu_jax.core.layout.packing import Sharded, arrays_of
from ipu_jax.core.layout.tree_parts import resized
from ipu_jax.core.mesh.axes import further_part, names_further, names_in, reduced
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.host_memory import stored

_WORTH_A_PROGRAM = 2**16  # elements; their update takes about 100 us on a CPU core


class Blocks:
    """The arrays of a layout that are trained, and the logical leaves in them.

    Args:
        layout: where the weights are.
        replicas: the number of replicas over which the update of each block is divided; 1 if each replica updates all.
        memory: the kind of memory of the arrays that are kept with blocks; None: the devices' own.

    Attributes:
        ipus: the number of IPUs per replica.
        arrays: the blocks, in the order of `to_blocks`. If a replica has one IPU, none is a slot.
        leaves: the logical leaves, in the order of the logical tree.
        leaves_in: per block, the number of the logical leaf in it on each IPU, or None; of a block that is not a slot,
            one entry.
        treedef: the structure of the logical tree.
    """

    def __init__(self, layout: PackedLayout, *, replicas: int, memory: str | None = None):
        self.layout, self.replicas, self.ipus, self.leaves = layout, replicas, layout.ipus, layout.trained
        self.memory = memory
        self._at = {leaf: number for number, leaf in enumerate(self.leaves)}
        arrays = [layout.arrays[k] for k in layout.trained_arrays]
        self.arrays = [dataclasses.replace(array, is_slot=array.is_slot and self.ipus > 1) for array in arrays]
        self._blocks = {k: number for number, k in enumerate(layout.trained_arrays)}
        self.leaves_in: list[list[int | None]] = [[None] * (self.ipus if a.is_slot else 1) for a in self.arrays]
        for number in range(len(self.leaves)):
            self.leaves_in[self.block_of(number)][self.ipu_of(number)] = number
        self.treedef = jax.tree.structure(self.logical_tree([0] * len(self.leaves)))

    def __getitem__(self, k: int) -> PackedArray:
        return self.arrays[k]

    def __len__(self) -> int:
        return len(self.arrays)

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
        return self._blocks[self.leaves[leaf].array]

    def ipu_of(self, leaf: int) -> int:
        """Return the IPU in whose slot a leaf is, or 0 if the leaf is in no slot."""
        return (self.leaves[leaf].ipu or 0) if self.ipus > 1 else 0

    def split(self, k: int) -> int | None:
        """Return the dim of a block's leaf that is split over the IPUs, or None."""
        return None if self.arrays[k].is_slot or self.ipus == 1 else self._leaf_of_all(k).split

    def _leaf_of_all(self, k: int) -> Leaf:
        """Return the leaf of a block that is not a slot."""
        return self.leaves[self.leaves_in[k][0] or 0]

    def is_whole(self, k: int) -> bool:
        """Return whether every IPU holds all of the leaf."""
        return not self.arrays[k].is_slot and self.split(k) is None

    def is_local(self, leaf: int) -> bool:
        """Return whether an IPU has all of the leaf and of what is kept with it, and no other IPU has a part of it."""
        k = self.block_of(leaf)
        return not self.is_divided and (self.arrays[k].is_slot or (self.memory is not None and self.is_whole(k)))

    def chunk_dim(self, k: int) -> int | None:
        """Return the dim along which the chunks of a block follow one another; None if it is cut flat, or not cut."""
        further, shape = further_part(self.arrays[k].spec), self.arrays[k].shape
        if not self.is_divided or not names_further(further):
            return None
        is_split = [bool(names_in(entry)) for entry in further] + [False] * len(shape)
        return max((dim for dim in range(len(shape)) if not is_split[dim]), key=lambda dim: shape[dim], default=None)

    def chunk_size(self, k: int) -> int:
        """Return the number of elements of a block that one replica updates. The last chunk is padded with zeros."""
        return math.prod(self.update_shape(k))

    def update_shape(self, k: int) -> tuple[int, ...]:
        """Return the shape in which a block is updated: its own shape, or the shape of a replica's chunk."""
        shape, dim = self.arrays[k].shape, self.chunk_dim(k)
        if dim is not None:
            return resized(shape, dim, -(-shape[dim] // self.replicas))
        return (-(-math.prod(shape) // self.replicas),) if self.is_divided else shape

    def logical_tree(self, values: Sequence[Value]) -> Tree:
        """Return the logical tree with one value per leaf, and frozen leaves masked."""
        of_leaf = lambda leaf: values[self._at[leaf]] if leaf in self._at else None
        return self.layout.tree_of(of_leaf, masked=optax.MaskedNode())

    # arrays that are kept with blocks

    def kept(self, k: int, name: str, dtype: Dtype, size: int | None = None) -> PackedArray:
        """Return an array to keep with a block: (replicas, ipus, *update_shape), or flat with `size` elements.

        The first dim is 1 if all replicas hold the same, the second if all IPUs do.
        """
        axes: tuple[Any, ...] = (REPLICA_AXIS if self.is_divided else None,)
        axes += (IPU_AXIS if self.ipus > 1 and not self.is_whole(k) else None,)
        if size is None and (not self.is_divided or self.chunk_dim(k) is not None):
            axes += tuple(further_part(self.arrays[k].spec))
        shape = (self.replicas, 1, *(self.update_shape(k) if size is None else (size,)))
        spec = PartitionSpec(*axes) if any(axes) else WHOLE
        return PackedArray(shape, str(dtype), spec, is_slot=False, name=name, memory=self.memory)

    def kept_leaf(self, number: int, array: int, **own: Any) -> Leaf:
        """Return the place of a leaf in an array that is kept with its block, the array with this number."""
        k = self.block_of(number)
        where = {"array": array, "ipus": 1, "ipu": self.ipu_of(number), "chunks": self.chunk_dim(k)}
        where |= {"split": self.split(k), "shard": None}
        if where["split"] is not None:
            where |= {"ipu": None, "shard": self.arrays[k].shape}
        return dataclasses.replace(self.leaves[number], **where, **own)

    @functools.cached_property
    def averages(self) -> PackedLayout:
        """Return the layout of copies of the weights, in float32 at least, that are kept with the blocks."""
        dtypes = [jnp.promote_types(array.dtype, jnp.float32) for array in self.arrays]

        def of_leaf(leaf: Leaf) -> Leaf:
            if leaf not in self._at:
                return dataclasses.replace(leaf, array=-1)
            k = self._blocks[leaf.array]
            return self.kept_leaf(self._at[leaf], k, dtype=str(dtypes[k]))

        arrays = tuple(self.kept(k, f"{k}", dtype) for k, dtype in enumerate(dtypes))
        return dataclasses.replace(self.layout.changed(of_leaf), arrays=arrays)

    # inside the program

    def first_average(self, params: Params) -> Sharded:
        """Return the weights as their own average: this IPU's arrays of `averages`. Communicates nothing."""
        arrays = []
        for k, (own, kept) in enumerate(zip(self.chunks_of(params), self.averages.arrays, strict=True)):
            mask, value = self.leaf_mask(k), own.astype(kept.dtype)
            arrays.append((value if mask is None else jnp.where(mask, value, 0))[None, None])
        return Sharded(arrays if self.memory is None else stored(arrays), self.averages)

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

    def to_chunks(self, k: int, array: Value) -> Value:
        """Return a block as (replicas, *update_shape), padded with zeros."""
        if not self.is_divided:
            return array[None]
        return in_chunks(array, (self.replicas, *self.update_shape(k)), self.chunk_dim(k), jnp)

    def from_chunks(self, k: int, chunks: Value) -> Value:
        """Return a block from its chunks; the inverse of `to_chunks`."""
        return joined_chunks(chunks, self.arrays[k].shape, self.chunk_dim(k), jnp)

    def local_part(self, leaf: int, value: Value) -> Value:
        """Return this IPU's part of a leaf-shaped array, in the block's update shape. Communicates nothing."""
        k = self.block_of(leaf)
        shape, split = self.arrays[k].shape, self.split(k)
        if self.arrays[k].is_slot and value.shape != shape:
            value = jnp.pad(value.reshape(-1), (0, math.prod(shape) - value.size)).reshape(shape)
        elif split is not None:
            missing = shape[split] * self.ipus - value.shape[split]
            value = jnp.pad(value, [(0, missing if d == split else 0) for d in range(value.ndim)])
            value = lax.dynamic_slice_in_dim(value, lax.axis_index(IPU_AXIS) * shape[split], shape[split], split)
        return self.replica_chunk(k, value)

    def counts(self, k: int) -> np.ndarray:
        """Return the number of elements of a slot, in its update shape, that belong to a leaf: (replicas, ipus).

        They are the first elements of the slot. The number is 0 where an IPU has no leaf. Rows that pad a slot which is
        split over further axes count, too.
        """
        sizes = np.array([0 if leaf is None else self.leaves[leaf].size for leaf in self.leaves_in[k]])
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
        block, split, shape, size, local = self.arrays[k], self.split(k), self.update_shape(k), 1, 1
        if split is not None:
            size, local = self._leaf_of_all(k).shape[split], block.shape[split]
        if block.is_slot:
            is_padded = bool((self.counts(k) < math.prod(shape)).any())
        else:
            is_padded = self.replicas * self.chunk_size(k) > math.prod(block.shape)
            is_padded |= split is not None and size < local * self.ipus
        if not is_padded:
            return None
        position = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape) + zero
        if block.is_slot:
            return position < self.own_count(k)
        position += self._chunk_number() * self.chunk_size(k)
        mask = position < math.prod(block.shape)
        if split is not None:
            stride = math.prod(block.shape[split + 1 :])
            mask &= lax.axis_index(IPU_AXIS) * local + position // stride % local < size
        return mask

    def _row_mask(self, k: int, dim: int, zero: Value) -> Value:
        """Return `leaf_mask` of a block whose chunks are rows along a dim."""
        block, split, shape, mask = self.arrays[k], self.split(k), self.update_shape(k), None
        if block.is_slot and None in self.leaves_in[k]:
            mask = jnp.broadcast_to(self.own_count(k) > zero, shape)
        rows = jnp.arange(shape[dim], dtype=jnp.int32) + zero
        sizes = [(dim, self._chunk_number() * shape[dim] + rows, block.shape[dim], self.replicas * shape[dim])]
        if split is not None:
            size, local = self._leaf_of_all(k).shape[split], block.shape[split]
            of_shard = sizes[0][1] if split == dim else jnp.arange(shape[split], dtype=jnp.int32) + zero
            sizes.append((split, lax.axis_index(IPU_AXIS) * local + of_shard, size, local * self.ipus))
        for along, position, size, padded in sizes:
            if size < padded:
                inside = (position < size).reshape([-1 if d == along else 1 for d in range(len(shape))])
                mask = jnp.broadcast_to(inside, shape) if mask is None else mask & inside
        return mask


def to_blocks(params: Params) -> list[Value]:
    """Return this IPU's weights, or their gradients, as one array per block. Call it inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.leaves(params)
    arrays = arrays_of(params)
    return [arrays[k] for k in params.layout.trained_arrays]


def from_blocks(params: Params, arrays: Sequence[Value]) -> Params:
    """Return the weights with these arrays in place of the arrays of `to_blocks`. Call it inside the program."""
    if not isinstance(params, Sharded):
        return jax.tree.unflatten(jax.tree.structure(params), arrays)
    layout, found = params.layout, list(params.arrays)
    for k, array in zip(layout.trained_arrays, arrays, strict=True):
        found[k] = array[None] if layout.arrays[k].is_slot else array
    return Sharded(found, layout)


BUCKET_BYTES: Final = 2**22
"""Arrays of at least this many bytes are sent alone, smaller arrays together in buckets of at most this many. A bucket
needs an extra copy, which for a large array costs more than a separate collective."""


def buckets(blocks: Blocks, dtypes: Sequence[Dtype]) -> list[list[int]]:
    """Return which blocks are sent together: small blocks of the same dtype."""
    filled_buckets: list[list[int]] = []
    open_: dict[Dtype, tuple[list[int], int]] = {}  # per dtype its last bucket, and the bytes in it
    for k, dtype in enumerate(map(jnp.dtype, dtypes)):
        size = blocks.chunk_size(k) * blocks.replicas * dtype.itemsize
        if size >= BUCKET_BYTES or blocks.chunk_dim(k) is not None:
            filled_buckets.append([k])
            continue
        bucket, filled = open_.get(dtype, (None, 0))
        if bucket is None or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            filled_buckets.append(bucket)
        bucket.append(k)
        open_[dtype] = (bucket, filled + size)
    return filled_buckets


def summed(blocks: Blocks, gradients: Sequence[Value]) -> Value:
    """Return the sums over the replicas: of this replica's chunk of each block, or of whole blocks if none is divided.

    Communicates as `scatter`, or one psum of all gradients.
    """
    return scatter(blocks, gradients) if blocks.is_divided else reduced(lax.psum, gradients, REPLICA_AXIS)


def scatter(blocks: Blocks, gradients: Sequence[Value]) -> list[Value]:
    """Return this replica's chunk of each block's sum over the replicas, in `Blocks.update_shape`.

    Communicates one psum_scatter over "replica" per bucket; each replica sends and receives (R-1)/R of its bytes.
    """
    chunks: list[Value] = [None] * len(blocks)
    for bucket in buckets(blocks, [g.dtype for g in gradients]):
        if blocks.chunk_dim(bucket[0]) is not None:
            (k,) = bucket
            chunks[k] = lax.psum_scatter(blocks.to_chunks(k, gradients[k]), REPLICA_AXIS, scatter_dimension=0)
            continue
        by_replica = jnp.concatenate([blocks.to_chunks(k, gradients[k]) for k in bucket], axis=1)
        own = lax.psum_scatter(by_replica, REPLICA_AXIS, scatter_dimension=0)
        start = 0
        for k in bucket:
            chunks[k] = lax.slice_in_dim(own, start, start + blocks.chunk_size(k))
            start += blocks.chunk_size(k)
    return chunks


def gather(blocks: Blocks, chunks: Sequence[Value]) -> list[Value]:
    """Return each block whole from the chunks of all replicas, which `scatter` has made.

    Communicates one all_gather over "replica" per bucket, or nothing if each replica has whole blocks.
    """
    if not blocks.is_divided:
        return list(chunks)
    arrays: list[Value] = [None] * len(blocks)
    for bucket in buckets(blocks, [chunk.dtype for chunk in chunks]):
        if blocks.chunk_dim(bucket[0]) is not None:
            (k,) = bucket
            arrays[k] = blocks.from_chunks(k, lax.all_gather(chunks[k], REPLICA_AXIS))
            continue
        by_replica = lax.all_gather(jnp.concatenate([chunks[k] for k in bucket]), REPLICA_AXIS)
        start = 0
        for k in bucket:
            size = blocks.chunk_size(k)
            arrays[k] = blocks.from_chunks(k, lax.slice_in_dim(by_replica, start, start + size, axis=1))
            start += size
    return arrays
