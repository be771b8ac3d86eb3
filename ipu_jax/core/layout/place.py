"""Say where a logical leaf is in an array that the IPUs hold, as plain data that outlives the program.

    array (ipus, ...)            a slot: the leaf is in one IPU's row, from its start
    array (replicas, ipus, ...)  an optimizer's block: the same, in chunks of the replicas; or a shard in each IPU's row
    any other array              the leaf itself, perhaps padded at the ends of its dims

It lets a program find the leaves of a saved array, also on other IPUs than the IPUs that wrote it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ipu_jax.base.annotations import Json, Value
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.layout.tree_parts import Within


@dataclasses.dataclass(frozen=True)
class Place:
    """Say where a leaf is.

    Attributes:
        path: the leaf's path, such as "params['mlp']['w']".
        shape, dtype: the leaf's shape and dtype.
        array: the name of the array.
        ipus: the dim of the array that counts IPUs, 0 or 1; None if it has none.
        ipu: the IPU in whose row the leaf is; None if each has a shard.
        shard: the shape of a shard.
        split: the dim of the leaf that is split over the IPUs.
        chunks: the dim along which the replicas' chunks follow one another; None: they are parts of the flat leaf.
        rows: if the array has only some rows of the leaf at `path`, where they are in it; `shape` is their shape.

    >>> Place("w", (3,), "float32", "a", ipus=0, ipu=1).leaf(np.arange(8).reshape(2, 4)).tolist()
    [4, 5, 6]
    >>> Place("w", (3,), "float32", "a", ipus=1, shard=(2,), split=0).leaf(np.arange(4).reshape(1, 2, 2)).tolist()
    [0, 1, 2]
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    array: str
    ipus: int | None = None
    ipu: int | None = None
    shard: tuple[int, ...] | None = None
    split: int | None = None
    rows: Within | None = None
    chunks: int | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the leaf at `path`, of which this may be only some rows."""
        return self.shape if self.rows is None else self.rows.whole_shape(self.shape)

    @property
    def within(self) -> Any:
        """Return the index of these rows in the leaf at `path`."""
        return ... if self.rows is None else self.rows.slices(self.shape)

    def region(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the region of the array, which has this shape, that contains the leaf."""
        if self.ipus is None:
            return tuple(slice(0, size) for size in self.shape)
        region = [slice(0, size) for size in shape]
        if self.ipu is not None:
            region[self.ipus] = slice(self.ipu, self.ipu + 1)
        return tuple(region)

    def in_region(self, region: np.ndarray) -> np.ndarray:
        """Return the leaf from its region of the array."""
        if self.ipus is None:
            return region
        rows = region if self.ipus == 1 else region[None]  # (replicas, ipus, ...)
        if self.shard is None or self.split is None:
            return joined_chunks(rows[:, 0], self.shape, self.chunks)
        shards = [joined_chunks(rows[:, ipu], self.shard, self.chunks) for ipu in range(rows.shape[1])]
        return np.concatenate(shards, self.split)[tuple(map(slice, self.shape))]

    def leaf(self, array: np.ndarray) -> np.ndarray:
        """Return the leaf from the whole array."""
        return self.in_region(array[self.region(array.shape)])

    def write(self, leaf: np.ndarray, block: np.ndarray, index: tuple[slice, ...]) -> None:
        """Write the leaf into a contiguous block of a slot or of an array that is the leaf itself.

        Args:
            leaf: the leaf, of this place's shape.
            block: the block of the array at `index`. It contains the row of the leaf, if the array has rows of IPUs.
            index: where the block is in the array; it has a start and a stop per dim.
        """
        if self.ipu is None:
            part = leaf[index]  # a slice beyond the end takes the rows that exist
            block[tuple(map(slice, part.shape))] = part
        else:
            row, of_row = self.ipu - index[0].start, index[1:]
            part = leaf[of_row] if len(of_row) == leaf.ndim else leaf  # a slot of another rank is flat, and not split
            block[row : row + 1].reshape(-1)[: part.size].reshape(part.shape)[...] = part

    def plain(self) -> dict[str, Json]:
        """Return the place as data for JSON.

        >>> layers, columns = (Place("w", (2, 3), "float32", "a", rows=Within(4, 9, axis)) for axis in (0, 1))
        >>> layers.plain()["rows"], columns.plain()["rows"]
        ([4, 9], [4, 9, 1])
        >>> Place.of_plain(layers.plain()) == layers, Place.of_plain(columns.plain()) == columns
        (True, True)
        """
        as_list = lambda value: list(value) if isinstance(value, tuple) else value
        plain = {name: as_list(value) for name, value in dataclasses.asdict(self).items() if value is not None}
        if self.rows is not None and not self.rows.axis:
            plain["rows"].pop()  # as files have it from before rows could be along other axes
        return plain

    @classmethod
    def of_plain(cls, plain: Mapping[str, Json]) -> "Place":
        """Return the place from the result of `plain`, after a round trip through JSON."""
        fields: dict[str, Json] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        if "rows" in fields:
            fields["rows"] = Within(*fields["rows"])
        return cls(**fields)


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


def places_of_layout(layout: PackedLayout, prefix: str) -> list[Place]:
    """Return the places of all leaves of a `Sharded`, group by group; its arrays are named as by `array_names`."""
    names, places = array_names(layout, prefix).arrays, []
    for leaf in layout.leaves:
        ipus = 0 if layout.arrays[leaf.array].is_slot else None
        places.append(Place(leaf.path, leaf.shape, leaf.dtype, names[leaf.array], ipus, leaf.ipu, rows=leaf.rows))
    return places


def array_names(layout: PackedLayout, prefix: str) -> Sharded:
    """Return the names of the arrays of a `Sharded`, as a `Sharded` of names, as saved files have them."""
    names = [f"{prefix}.slots.{k}" for k in range(len(layout.arrays))]
    for g, group in enumerate(layout.groups):
        for i, leaf in enumerate(group.leaves):
            if leaf.ipu is None:
                names[leaf.array] = f"{prefix}.concurrent.{g}.{i}"
    return Sharded(names, layout)


def arrays_by_name(sharded: Sharded, prefix: str) -> dict[str, Value]:
    """Return the arrays of a `Sharded` by their names."""
    return dict(zip(array_names(sharded.layout, prefix).arrays, sharded.arrays, strict=True))
