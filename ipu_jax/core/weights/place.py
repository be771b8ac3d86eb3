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

from ipu_jax.core.weights.packed_layout import PackedLayout


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
        rows: if the array has only some rows of the leaf at `path`, the first of them, and how many the leaf has;
            `shape` is the shape of these rows.

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
    rows: tuple[int, int] | None = None
    chunks: int | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.rows is None else (self.rows[1], *self.shape[1:])

    def leaf(self, array: np.ndarray) -> np.ndarray:
        """Return the leaf from the whole array."""
        within = tuple(map(slice, self.shape))
        if self.ipus is None:
            return array[within]
        rows = array if self.ipus == 1 else array[None]  # (replicas, ipus, ...)
        if self.shard is None or self.split is None:
            return joined_chunks(rows[:, self.ipu], self.shape, self.chunks)
        shards = [joined_chunks(rows[:, ipu], self.shard, self.chunks) for ipu in range(rows.shape[1])]
        return np.concatenate(shards, self.split)[within]

    def plain(self) -> dict[str, Any]:
        """Return the place as data for JSON."""
        as_list = lambda value: list(value) if isinstance(value, tuple) else value  # noqa: E731
        return {name: as_list(value) for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Place":
        """Return the place from the result of `plain`, after a round trip through JSON."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        return cls(**fields)


def joined_chunks(chunks: Any, shape: tuple[int, ...], dim: int | None, numpy: Any = np) -> Any:
    """Return the array of this shape whose chunks, (replicas, ...), are parts of it flat, or along a dim.

    >>> joined_chunks(np.arange(4).reshape(2, 2, 1), (2, 2), 1).tolist()
    [[0, 2], [1, 3]]
    """
    if dim is None:
        return chunks.reshape(-1)[: math.prod(shape)].reshape(shape)
    padded = numpy.moveaxis(chunks, 0, dim).reshape(*shape[:dim], -1, *shape[dim + 1 :])
    return padded[tuple(map(slice, shape))]


def places_of_layout(layout: PackedLayout, prefix: str) -> list[Place]:
    """Return the places of all leaves of a `Sharded`, group by group; its arrays are named as by `array_names`."""
    places = []
    for g, group in enumerate(layout.groups):
        for i, leaf in enumerate(group.leaves):
            if group.ipu is None:
                places.append(Place(leaf.path, leaf.shape, leaf.dtype, f"{prefix}.concurrent.{g}.{i}", rows=leaf.rows))
            else:
                array = f"{prefix}.slots.{leaf.slot}"
                places.append(Place(leaf.path, leaf.shape, leaf.dtype, array, ipus=0, ipu=group.ipu, rows=leaf.rows))
    return places


def array_names(layout: PackedLayout, prefix: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the arrays of a `Sharded`: of its slots, and of its concurrent leaves by group."""
    concurrent = {
        group.name: [f"{prefix}.concurrent.{g}.{i}" for i in range(len(group.leaves))]
        for g, group in enumerate(layout.groups)
        if group.ipu is None
    }
    return [f"{prefix}.slots.{k}" for k in range(len(layout.slots))], concurrent
