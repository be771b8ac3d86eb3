"""Describe an array on the IPUs, and a leaf in it, as plain data that outlives the program.

    array (ipus, ...)            a slot: the leaf is in one IPU's row, from its start
    array (replicas, ipus, ...)  kept by an optimizer: the same, in chunks of the replicas; or a shard in each IPU's row
    any other array              the leaf itself, perhaps padded at the ends of its dims

It lets a program find the leaves of a saved array, also on other IPUs than the IPUs that wrote it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Dtype, Json, Value
from ipu_jax.core.layout.tree_parts import Part, along, resized
from ipu_jax.core.mesh.devices import IPU_AXIS

WHOLE: Final = PartitionSpec()
_ALL: Final = Part(0)
_SAVED: Final = ("path", "shape", "dtype", "ipus", "ipu", "shard", "split", "chunks")
"""The fields of a leaf in a file, besides its array's name and its rows."""


@dataclasses.dataclass(frozen=True)
class PackedArray:
    """An array on the IPUs.

    Attributes:
        shape: the shape of an IPU's part; its dims that are split over replicas or further mesh axes are whole.
        dtype: its dtype.
        spec: how the dims of `shape` are split over further mesh axes and, unless it is a slot, over the IPUs.
        is_slot: whether each IPU has a row of its own, which `shape` leaves out. Other arrays are a leaf, or an
            optimizer's.
        name: its name in files, after the name of the tree.
        memory: the kind of memory that holds it; None: the device's own.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = WHOLE
    is_slot: bool = True
    name: str = ""
    memory: str | None = None

    @property
    def spec_on_mesh(self) -> PartitionSpec:
        """Return how the whole array is split over the mesh."""
        return PartitionSpec(IPU_AXIS, *self.spec) if self.is_slot else self.spec

    def sharding_on(self, mesh: Mesh) -> NamedSharding:
        """Return where the whole array is."""
        return NamedSharding(mesh, self.spec_on_mesh, memory_kind=self.memory)

    def shape_on_mesh(self, ipus: int) -> tuple[int, ...]:
        """Return the shape of the whole array: with a row per IPU, or padded where it is split over them.

        >>> columns = PackedArray((3, 5), "float32", PartitionSpec(None, "ipu"), is_slot=False)
        >>> PackedArray((4,), "float32").shape_on_mesh(2), columns.shape_on_mesh(2)
        ((2, 4), (3, 10))
        """
        if self.is_slot:
            return (ipus, *self.shape)
        axes = (*self.spec, *[None] * len(self.shape))
        return tuple(size * ipus if axis == IPU_AXIS else size for size, axis in zip(self.shape, axes, strict=False))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a user's tree, or rows of one, and where it is.

    Attributes:
        path: where the user's leaf is in the tree, such as "params['mlp']['w']".
        shape, dtype: of the leaf, or of its rows.
        part: the number of the user's leaf, and its rows.
        size_of_rows: the number of rows of the user's leaf; None if this is all of it.
        array: the number of its array; -1 before it is placed, or if no array has it.
        ipus: the dim of the array that counts IPUs, 0 or 1; None if the array is the leaf itself.
        ipu: the IPU in whose row it is, from the row's start. In an array of an optimizer it is 0 if all IPUs share the
            row. None if there are no rows, or each has a shard.
        split, shard: the dim that is split over the IPUs, and the shape of a shard; None if it is whole.
        chunks: the dim along which the replicas' chunks follow one another; None: they are parts of the flat leaf.
        frozen: whether it gets no gradient.

    >>> Leaf("w", (3,), "float32", ipus=0, ipu=1).in_array(np.arange(8).reshape(2, 4)).tolist()
    [4, 5, 6]
    >>> Leaf("w", (3,), "float32", ipus=1, shard=(2,), split=0).in_array(np.arange(4).reshape(1, 2, 2)).tolist()
    [0, 1, 2]
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    part: Part = _ALL
    size_of_rows: int | None = None
    array: int = -1
    ipus: int | None = None
    ipu: int | None = None
    split: int | None = None
    shard: tuple[int, ...] | None = None
    chunks: int | None = None
    frozen: bool = False

    def __str__(self) -> str:
        rows, axis = self.part.rows, self.part.axis
        return self.path if rows is None else f"{self.path}[{':, ' * axis}{rows[0]}:]"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def held(self) -> tuple[int, ...]:
        """Return the shape of what its IPU has of it, or each IPU."""
        return self.shape if self.shard is None else self.shard

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the user's leaf, of which this may be a part."""
        return self.shape if self.size_of_rows is None else resized(self.shape, self.part.axis, self.size_of_rows)

    @property
    def place(self) -> tuple[slice, ...]:
        """Return which block of the user's leaf this is: a start and a stop per dim."""
        first = 0 if self.part.rows is None else self.part.rows[0]
        starts = [first * (dim == self.part.axis) for dim in range(len(self.shape))]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def of_whole(self, value: Value) -> Value:
        """Return this leaf's rows of the user's leaf, an array or its shape."""
        if self.size_of_rows is None:
            return value
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, value.dtype)
        return value[self.part.index]

    # in a whole array

    def region(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the region of its array, which has this shape, that contains the leaf."""
        if self.ipus is None:
            return tuple(slice(0, size) for size in self.shape)
        region = [slice(0, size) for size in shape]
        if self.ipu is not None:
            region[self.ipus] = slice(self.ipu, self.ipu + 1)
        return tuple(region)

    def in_region(self, region: Value) -> Value:
        """Return the leaf from its region of the array."""
        if self.ipus is None:
            return region
        rows = region if self.ipus == 1 else region[None]  # (replicas, ipus, ...)
        if self.shard is None or self.split is None:
            return joined_chunks(rows[:, 0], self.shape, self.chunks)
        shards = [joined_chunks(rows[:, ipu], self.shard, self.chunks) for ipu in range(rows.shape[1])]
        return np.concatenate(shards, self.split)[tuple(map(slice, self.shape))]

    def in_array(self, array: Value) -> Value:
        """Return the leaf from the whole array."""
        return self.in_region(array[self.region(array.shape)])

    def is_at(self, index: Sequence[slice]) -> bool:
        """Return whether a block of its array, with one row of IPUs, contains the leaf, or a part of it."""
        return self.ipus is None or self.ipu is None or self.ipu == index[self.ipus].start

    def pieces(self) -> "list[tuple[tuple[slice, ...], Leaf]]":
        """Return this leaf, or each IPU's shard of it with its padding, and which block of the user's leaf it has.

        >>> [block[1] for block, _ in Leaf("w", (3, 5), "int8", ipus=1, split=1, shard=(3, 2)).pieces()]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        """
        block, split = self.place, self.split
        if self.ipus is None or self.shard is None or split is None:
            return [(block, self)]
        first, stop, size = block[split].start, block[split].stop, max(self.shard[split], 1)
        found = list[tuple[tuple[slice, ...], Leaf]]()
        for ipu, start in enumerate(range(first, stop, size)):
            own = (*block[:split], slice(start, min(start + size, stop)), *block[split + 1 :])
            found.append((own, dataclasses.replace(self, shape=self.shard, ipu=ipu, shard=None)))
        return found

    def block_in(self, array: Value, index: Sequence[slice]) -> np.ndarray:
        """Return a block of the leaf from the whole array, of which little more is read than the block's rows.

        Args:
            array: the array, or a file of which `np.asarray(array[region])` reads a region.
            index: where the block is in the leaf: a start and a stop per dim.
        """
        if self.ipus is None:
            return np.asarray(array[tuple(index)])
        region = self.region(array.shape)
        row, sizes = region[: self.ipus + 1], tuple(array.shape[self.ipus + 1 :])
        if sizes == self.shape and (self.ipus == 0 or array.shape[0] == 1):
            return np.asarray(array[(*row, *index)])[(0,) * len(row)]
        if len(sizes) != 1 or not self.shape:
            return self.in_region(np.asarray(array[region]))[tuple(index)]
        # the elements of the block's rows in the flat leaf, and the replicas' chunks that have them
        start, stop = (row * math.prod(self.shape[1:]) for row in (index[0].start, index[0].stop))
        first, last = start // max(sizes[0], 1), -(-stop // max(sizes[0], 1))
        start, stop = start - first * sizes[0], stop - first * sizes[0]
        chunks = (slice(first, last), row[-1]) if self.ipus == 1 else row
        is_in_one = last == first + 1
        flat = np.asarray(array[(*chunks, slice(start, stop) if is_in_one else slice(0, sizes[0]))]).reshape(-1)
        own = flat if is_in_one else flat[start:stop]
        return own.reshape(index[0].stop - index[0].start, *self.shape[1:])[(slice(None), *index[1:])]

    def block(self, value: Value, shape: Sequence[int], index: Sequence[slice], numpy: Any = np) -> Value:
        """Return what a device holds of its array: the leaf, or a part of it, with zeros beside it.

        Args:
            value: the leaf. No more of it is read than the block's rows, or of a shard in chunks the shard.
            shape: the shape of the array.
            index: where the block is in the array. It has a start and a stop per dim, and one row of IPUs: the leaf's,
                if the leaf is in one.
            numpy: `numpy` or `jax.numpy`.

        >>> held = Leaf("w", (3,), "float32", ipus=0, ipu=1)
        >>> held.block(np.arange(1, 4), (2, 4), (slice(1, 2), slice(0, 4))).tolist()
        [[1, 2, 3, 0]]
        """
        if self.ipus is None:
            return padded(value[tuple(index)], [part.stop - part.start for part in index], numpy)
        rows, sizes = tuple(index[self.ipus + 1 :]), tuple(shape[self.ipus + 1 :])
        if self.shard is not None and self.split is not None:
            first = index[self.ipus].start * self.shard[self.split]
            own = value[along(self.split, first, first + self.shard[self.split])]
            value = padded(own, self.shard, numpy)
        replicas, own = (shape[0], index[0]) if self.ipus == 1 else (1, slice(0, 1))
        if replicas == 1 and value.shape == sizes:
            chunks = value[rows][None]
        elif own.stop - own.start == 1:
            chunks = chunk_of(value, sizes, own.start, self.chunks, numpy)[rows][None]
        else:
            chunks = in_chunks(numpy.asarray(value), (replicas, *sizes), self.chunks, numpy)[(own, *rows)]
        return chunks[:, None] if self.ipus == 1 else chunks

    # in files

    def plain(self, array: str) -> dict[str, Json]:
        """Return the leaf as data for JSON, in the array of this name.

        >>> of_leaf = {"ipus": 0, "ipu": 1, "size_of_rows": 9}
        >>> layers, columns = (Leaf("w", (2, 3), "float32", Part(0, (4, 4 + n), n - 2), **of_leaf) for n in (2, 3))
        >>> layers.plain("a")["rows"], columns.plain("a")["rows"]
        ([4, 9], [4, 9, 1])
        >>> Leaf.of_plain(layers.plain("a")) == layers, Leaf.of_plain(columns.plain("a")) == columns
        (True, True)
        """
        names = _SAVED[:3] if self.ipus is None else _SAVED
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        plain = {name: [*value] if isinstance(value, tuple) else value for name, value in found.items()}
        if self.part.rows is not None:  # axis 0 is left out, as in files from before rows could be along other axes
            plain["rows"] = [self.part.rows[0], self.size_of_rows, *([self.part.axis] if self.part.axis else [])]
        return plain | {"array": array}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Json]) -> "Leaf":
        """Return the leaf from the result of `plain`, after a round trip through JSON, but for its array's number."""
        own = {name: value for name, value in plain.items() if name not in ("array", "rows")}
        if unknown := own.keys() - {*_SAVED}:
            raise KeyError(f"a leaf has {sorted(unknown)}")
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        if "rows" in plain:
            first, count, axis = (*plain["rows"], 0)[:3]
            fields |= {"part": Part(0, (first, first + fields["shape"][axis]), axis), "size_of_rows": count}
        return cls(**fields)


def padded(array: Value, shape: Sequence[int], numpy: Any = np) -> Value:
    """Return an array with zeros at the ends of its dims, so that it has this shape; itself, if it has it already."""
    missing = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return numpy.pad(array, missing) if any(map(any, missing)) else array


def in_chunks(array: Value, shape: Sequence[int], dim: int | None, numpy: Any = np) -> Value:
    """Return an array as chunks of this shape, (replicas, ...), padded with zeros: the inverse of `joined_chunks`.

    >>> in_chunks(np.arange(6).reshape(2, 3), (2, 2, 2), 1).tolist()
    [[[0, 1], [3, 4]], [[2, 0], [5, 0]]]
    """
    if dim is None:
        return numpy.pad(array.reshape(-1), (0, math.prod(shape) - array.size)).reshape(shape)
    replicas, rows = shape[0], shape[1 + dim]
    widths = [(0, replicas * rows - size if d == dim else 0) for d, size in enumerate(array.shape)]
    divided = numpy.pad(array, widths).reshape(*array.shape[:dim], replicas, rows, *array.shape[dim + 1 :])
    return numpy.moveaxis(divided, dim, 0)


def chunk_of(value: Value, shape: tuple[int, ...], number: int, dim: int | None, numpy: Any = np) -> Value:
    """Return one chunk of `in_chunks`, of this shape; no more is read of the array than its rows.

    >>> chunk_of(np.arange(6).reshape(2, 3), (2, 2), 1, 1).tolist(), chunk_of(np.arange(6).reshape(2, 3), (4,), 1, None)
    ([[2, 0], [5, 0]], array([4, 5, 0, 0]))
    """
    if dim is not None:
        return padded(value[along(dim, number * shape[dim], (number + 1) * shape[dim])], shape, numpy)
    size, stride = math.prod(shape), max(math.prod(value.shape[1:]), 1)
    start, first = number * size, number * size // stride
    value = value if value.shape else numpy.asarray(value).reshape(1)
    rows = value[along(0, first, -(-(start + size) // stride))]
    flat = numpy.asarray(rows).reshape(-1)[start - first * stride :][:size]
    return padded(flat, (size,), numpy).reshape(shape)


def joined_chunks(chunks: Value, shape: tuple[int, ...], dim: int | None, numpy: Any = np) -> Value:
    """Return the array of this shape whose chunks, (replicas, ...), are parts of it flat, or along a dim.

    >>> joined_chunks(np.arange(4).reshape(2, 2, 1), (2, 2), 1).tolist()
    [[0, 2], [1, 3]]
    """
    if dim is None:
        return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)
    size = chunks.shape[0] * chunks.shape[1 + dim]
    padded = numpy.moveaxis(chunks, 0, dim).reshape(*shape[:dim], size, *shape[dim + 1 :])
    return padded[tuple(map(slice, shape))]


_REPLACED: Final = "_overwrite_with_gradient"


def check_array(where: str, value: Value) -> None:
    """Raise `ValueError` unless `value` is an array that IPUs can hold, or has the shape and dtype of one."""
    dtype = getattr(value, "dtype", None)
    is_number = isinstance(dtype, np.dtype) and dtype.isnative and jnp.issubdtype(dtype, jnp.number)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or is_number or dtype == np.bool_:
        return
    if isinstance(value, (str, bytes)):
        raise ValueError(
            f"{where} is {value!r:.60}, a text, and must be an array of numbers: give the numbers of its tokens, or "
            "leave it out"
        )
    if dtype is None and callable(value):
        raise ValueError(f"{where} is a function, {value!r:.60}: leave it out, and let the function name it itself")
    if isinstance(value, (bool, int, float, complex)):
        # a list is a tree of its numbers
        array = f"np.asarray({where.partition('[0]')[0]})"
        raise ValueError(f"{where} is {value!r:.60}, and must be an array of numbers: give {array}")
    if isinstance(dtype, np.dtype):
        raise ValueError(f"{where} has dtype {dtype}: IPUs hold numbers and bools, in native byte order: convert it")
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    mend = "tensor.numpy()" if hasattr(value, "numpy") else "np.asarray(...), or batch.data of a FeedBatch"
    raise ValueError(f"{where} is a {kind}, and must be a NumPy or jax array: give {mend}")


def check_weight(where: str, dtype: Dtype, frozen: bool = False) -> None:
    """Raise `ValueError` unless a leaf of this dtype can be trained, or is frozen and can be held."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ValueError(
            f"{where} is {dtype}: a key is not held among numbers; hold jax.random.key_data(...) of it, or let the "
            "function take a key"
        )
    if frozen:
        return
    if _REPLACED in where:
        raise ValueError(
            f"{where} is in Flax's collection {_REPLACED!r}: its gradient is its new value, which an optimizer would "
            "take for a gradient. Freeze it, and the scales stay as they are (of a cut function, frozen={'params': "
            f"False, {_REPLACED!r}: True}}), or compute in bfloat16"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"{where} is {dtype}: weights must be real; hold two real leaves, and join them in the function, "
            "jax.lax.complex(re, im)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where} is {dtype}: weights must be floating; freeze it, or carry other data in the batch")
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{where} is {dtype}: weights that are trained must have at least 16 bits; hold it in bfloat16 and cast "
            "it in the function, or freeze it"
        )
