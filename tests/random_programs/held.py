"""Put weights on devices by a layout, and work out in NumPy what each device must hold.

Of the product's layout this uses only which array contains a leaf, and the shape of that array.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.arrays import placed
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded
from random_programs.closeness import assert_same_bits
from random_programs.trees import Spread, Weights


class Item(NamedTuple):
    """A part that the layout places: its group and leaf there, and what was drawn for it."""

    group: Group
    leaf: Leaf
    owner: int | None
    spec: P
    value: np.ndarray
    number: int  # of the user's leaf


class Side:
    """Weights on the devices by one layout, and what they must hold: `rows[k]`, (ipus, ...), is array k of each IPU."""

    def __init__(self, weights: Weights, spread: Spread, layout: PackedLayout | None = None):
        self.weights, self.spread, self.mesh = weights, spread, mesh_of(spread)
        self.layout = layout = layout_of(weights, spread) if layout is None else layout
        self.sharded = packing.shard_tree(weights.given, layout, self.mesh)
        self.rows = [np.zeros((spread.ipus, *array.shape), array.dtype) for array in layout.arrays]
        self.specs, owned = [P() for _ in self.rows], [list[Any]() for _ in self.rows]
        for _, leaf, owner, spec, value, _ in self.items():
            rows, dim = self.rows[leaf.array], [*spec].index("ipu") if "ipu" in spec else None
            assert (leaf.shape, leaf.dtype, rows.dtype) == (value.shape, value.dtype.name, value.dtype), f"{leaf}"
            assert layout.arrays[leaf.array].is_slot == (owner is not None), f"{leaf}"
            self.specs[leaf.array] = spec
            owned[leaf.array].append(owner)
            if owner is not None:
                rows.reshape(spread.ipus, -1)[owner, : value.size] = value.reshape(-1)
                continue
            for ipu, own in enumerate(rows):
                size = 0 if dim is None else own.shape[dim]
                part = value if dim is None else np.split(value, [ipu * size, (ipu + 1) * size], dim)[1]
                rows[(ipu, *map(slice, part.shape))] = part
        assert all(of and len({*of}) == len(of) for of in owned), f"arrays have leaves of IPUs {owned}"
        self.wholes = [
            rows if array.is_slot else np.concatenate([*rows], [*spec].index("ipu")) if "ipu" in spec else rows[0]
            for rows, array, spec in zip(self.rows, layout.arrays, self.specs, strict=True)
        ]

    def items(self) -> Iterator[Item]:
        spread = self.spread
        assert sorted(group.name for group in self.layout.groups) == sorted(spread.held)
        for group in self.layout.groups:
            of_group = zip(group.leaves, spread.held[group.name], spread.specs[group.name], strict=True)
            for leaf, part, spec in of_group:
                yield Item(group, leaf, spread.owners[group.name], spec, self.weights.part(part), part.leaf)

    def check_held(self, sharded: Sharded) -> None:
        """Check what each device holds of each array."""
        for array, rows, spec, whole, like in zip(
            sharded.arrays, self.rows, self.specs, self.wholes, self.layout.arrays, strict=True
        ):
            held = {shard.device: shard.data for shard in array.addressable_shards}
            assert len(held) == self.mesh.size
            for at, device in np.ndenumerate(self.mesh.devices):
                where = dict(zip(self.mesh.axis_names, at, strict=True))
                own = rows[where["ipu"]]
                for dim, entry in enumerate(spec):
                    for axis in (entry,) if isinstance(entry, str) else entry or ():
                        own = own if axis == "ipu" else np.split(own, 2, dim)[where[axis]]
                assert_same_bits(held[device], own[None] if like.is_slot else own)
            assert_same_bits(array, whole)


def layout_of(weights: Weights, spread: Spread) -> PackedLayout:
    if spread.by_group:
        layout = PackedLayout.by_group("params", weights.given, [*spread.owners])
    else:
        both = [zip(spread.held[name], spread.specs[name], strict=True) for name in spread.held]
        split = {part: [*spec].index("ipu") for of in both for part, spec in of if "ipu" in spec}
        layout = PackedLayout.of("params", weights.given, spread.held, split=split if spread.splits else None)
    return placed(layout, spread.owners, ipus=spread.ipus, axes=spread.axes, **spread.given)


def mesh_of(spread: Spread) -> jax.sharding.Mesh:
    axes: Any = spread.axes
    return make_mesh(spread.replicas, spread.ipus, **axes)
