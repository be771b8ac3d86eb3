"""Describe one whole leaf of a tree and which of its dims is split, check leaves, and copy them to the host.

`_tree_layout` combines these functions for whole trees.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sharded_ops._arguments import whole_number
from sharded_ops._split import Split


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The shape and dtype of a whole leaf, and which of its dims is split.

    Args:
        shape: of the whole leaf, without padding.
        dtype: the name of its dtype, such as "bfloat16".
        dim: the dim that is split, not negative; None for a leaf that every IPU holds whole.

    Raises:
        ValueError: `dtype` is not the name of a dtype, or `shape` has no dim `dim` of at least one row.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None

    def __post_init__(self) -> None:
        try:
            jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype={self.dtype!r} is not a dtype: give one such as 'float32'") from None
        if self.dim is None:
            return
        object.__setattr__(self, "dim", whole_number("dim", self.dim, instead="None for a leaf that is not split"))
        if not 0 <= self.dim < len(self.shape):
            mend = f"give 0 to {len(self.shape) - 1}, or None" if self.shape else "give None"
            raise ValueError(f"dim={self.dim!r} is not a dim of shape {self.shape}: {mend}")
        if not self.shape[self.dim]:
            raise ValueError(f"dim={self.dim} of shape {self.shape} has no rows to split: give dim=None")

    def padded_shape(self, parts: int) -> tuple[int, ...]:
        """Return the global shape on `parts` IPUs: `shape`, with `Split.padded` rows in `dim`."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], Split(self.shape[self.dim], parts).padded, *self.shape[self.dim + 1 :])

    def spec(self, axis: str) -> PartitionSpec:
        """Return the `PartitionSpec` of the padded leaf."""
        if self.dim is None:
            return PartitionSpec()
        return Split(self.shape[self.dim], 1).spec(self.dim, len(self.shape), axis)


def leaf_layout_of(path: str, leaf: Any, dim: Any) -> LeafLayout:
    """Return the layout of a whole leaf; a negative `dim` counts from the end.

    Raises:
        ValueError: the leaf is not an array, or is a random key, or has no such dim. The message names the leaf.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ValueError(f"leaf {path!r} is {leaf!r}, which is not an array: make it one, with a dtype of its own")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"leaf {path!r} has dtype {leaf.dtype}, which cannot be saved: give jax.random.key_data of it")
    try:
        if dim is not None:
            dim = whole_number("dim", dim, instead="None for a leaf that is not split")
            dim += len(leaf.shape) if -len(leaf.shape) <= dim < 0 else 0
        return LeafLayout(tuple(leaf.shape), jnp.dtype(leaf.dtype).name, dim)
    except ValueError as error:
        raise ValueError(f"leaf {path!r}: {error}") from None


def check_leaf(method: str, path: str, leaf: Any, leaf_layout: LeafLayout, *, padded: bool = False) -> None:
    """Raise for a leaf that does not have the shape and dtype of `leaf_layout`.

    With `padded`, the leaf may have any number of rows of padding in its split dim.

    Raises:
        ValueError: names the leaf, its shape or dtype, and the expected one.
    """
    shape, dim = tuple(np.shape(leaf)), leaf_layout.dim
    fits = shape == leaf_layout.shape
    if padded and dim is not None and len(shape) == len(leaf_layout.shape):
        fits = shape[dim] >= leaf_layout.shape[dim]
        fits &= shape[:dim] + shape[dim + 1 :] == leaf_layout.shape[:dim] + leaf_layout.shape[dim + 1 :]
    if not fits:
        takes = f"{leaf_layout.shape}" + (f" with any padding in dim {dim}" if padded and dim is not None else "")
        raise ValueError(
            f"{method}: leaf {path!r} has shape {shape}, but the layout takes {takes}: give the leaf that it describes"
        )
    name = getattr(getattr(leaf, "dtype", None), "name", type(leaf).__name__)
    if name != leaf_layout.dtype:
        raise ValueError(
            f"{method}: leaf {path!r} has dtype {name}, but the layout says {leaf_layout.dtype}: convert it, or make "
            f"a layout of the converted leaf"
        )


def real_part(leaf_layout: LeafLayout) -> tuple[slice, ...]:
    """Return the slices that remove a leaf's padding."""
    return tuple(slice(0, size) for size in leaf_layout.shape)


def restore_dtype(array: np.ndarray, leaf_layout: LeafLayout) -> np.ndarray:
    """Return `array` in the dtype of the layout, if numpy has loaded it as plain bytes.

    numpy saves a dtype that is not its own, such as bfloat16, as bytes without the name of the dtype.
    """
    dtype = jnp.dtype(leaf_layout.dtype)
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array


def leaf_to_host(path: str, leaf: Any, leaf_layout: LeafLayout) -> np.ndarray:
    """Return the whole leaf as a new array on the host. Shards are copied into it one after the other.

    Raises:
        ValueError: the leaf does not fit the layout, or some of its rows are only on other processes' IPUs.
    """
    if not isinstance(leaf, jax.Array):
        leaf = restore_dtype(np.asarray(leaf), leaf_layout)
        check_leaf("whole", path, leaf, leaf_layout, padded=True)
        return np.array(leaf[real_part(leaf_layout)])
    check_leaf("whole", path, leaf, leaf_layout, padded=True)
    # Shards with the same index are equal, such as shards along other mesh axes: one of each is enough.
    shards = {tuple((part.start, part.stop) for part in shard.index): shard for shard in leaf.addressable_shards}
    if sum(shard.data.size for shard in shards.values()) < leaf.size:
        raise ValueError(
            f"whole: rows of leaf {path!r} lie on IPUs of other processes alone, where they cannot be read: gather it "
            f"first, with jax.experimental.multihost_utils.process_allgather(leaf, tiled=True)"
        )
    whole = np.empty(leaf_layout.shape, leaf.dtype)
    for shard in shards.values():
        # A slice that extends beyond the end takes only the existing rows, which are the real rows of this shard.
        rows = whole[(*shard.index, ...)]
        rows[...] = _on_host(shard.data)[tuple(slice(0, size) for size in rows.shape)]
    return whole


def _on_host(shard: jax.Array) -> np.ndarray:
    # jax keeps the host copy of an array as long as the array lives. The copy of a temporary array is freed soon.
    temporary = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return np.asarray(temporary)
