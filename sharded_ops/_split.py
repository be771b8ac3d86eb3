"""Split a dim of any size over the n IPUs of a mesh axis.

Every IPU of a mesh axis must hold a shard of the same shape. So a dim is split into n parts of ceil(size / n) rows, and
the last parts are filled up with padding. Here is `Split(10, 4)`; x is a row of padding:

    IPU            0          1          2          3
    global row   0  1  2    3  4  5    6  7  8    9  x  x      local=3  padded=12  padding=2
                 offset 0   offset 3   offset 6   offset 9

If there are more IPUs than rows, the last IPUs hold only padding: `Split(2, 8)` puts row 0 on IPU 0, row 1 on IPU 1,
and padding on the other six.

`Split` itself is plain data. Outside a `shard_map`, it pads whole arrays and returns their `PartitionSpec`. Inside, the
functions below determine which rows of this IPU's shard are real (not padding), and raise for a shard that does not
fit. `_tree_layout.Layout` combines Splits for whole trees, and saves them for other numbers of IPUs.
"""

import dataclasses
import numbers
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from sharded_ops._arguments import array_like, one_axis, whole_number

_Index = TypeVar("_Index", int, jax.Array)

# Indices are int32 inside the ops, and so is the offset that is subtracted from them.
_LARGEST_PADDED = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim of `size` rows, split over `parts` IPUs as evenly as equal shards allow.

    Args:
        size: rows of the dim without padding. Here and below, NumPy ints are accepted as well.
        parts: IPUs on the mesh axis, at least 1.

    Raises:
        ValueError: `size` is not an int of at least 0, or `parts` is not an int of at least 1.

    Example:
        >>> split = Split(10, 4)
        >>> split.local, split.padded, split.padding
        (3, 12, 2)
        >>> [split.count(index) for index in range(4)]
        [3, 3, 3, 1]
        >>> split.pad(jnp.ones((2, 10)), dim=1).shape
        (2, 12)
        >>> split.spec(dim=1, ndim=2, axis="ipu")
        P(None, 'ipu')
    """

    size: int
    parts: int

    def __post_init__(self) -> None:
        for name, least in (("size", 0), ("parts", 1)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=least))

    @property
    def local(self) -> int:
        """Rows in each IPU's shard, padding included: ceil(size / parts)."""
        return -(-self.size // self.parts)

    @property
    def padded(self) -> int:
        """Rows of all shards together: parts * local, at least `size`."""
        return self.parts * self.local

    @property
    def padding(self) -> int:
        """Rows of padding, all at the end of the padded dim; always fewer than `parts`."""
        return self.padded - self.size

    def offset(self, index: _Index) -> _Index:
        """Return the global row at which IPU `index` starts. `index` may be traced, such as `lax.axis_index(axis)`.

        Raises:
            ValueError: `index` is an int, but not from 0 to parts - 1.
        """
        if isinstance(index, numbers.Integral):
            whole_number("index", index)
            if not 0 <= index < self.parts:
                raise ValueError(f"index={index} names no IPU of {self.parts}: give 0 to {self.parts - 1}")
        return index * self.local

    def count(self, index: int) -> int:
        """Return how many real rows IPU `index` holds: from `local`, before padding starts, down to 0.

        Raises:
            ValueError: `index` is not from 0 to parts - 1.
        """
        return min(max(self.size - self.offset(index), 0), self.local)

    def pad(self, array: ArrayLike, dim: int) -> jax.Array:
        """Pad the end of `dim` with zeros to `padded` rows, ready to be sharded with `spec`.

        Args:
            array: (.., size, ..) globally, with `size` rows in `dim`.
            dim: the dim that is split; a negative dim counts from the end.

        Returns:
            (.., padded, ..) globally. Differentiable; the transpose is `unpad`.

        Raises:
            ValueError: there is no such dim, or it does not have `size` rows.
        """
        array = array_like("array", array)
        dim = self._checked_dim("pad", np.shape(array), dim, self.size)
        widths = [(0, self.padding if d == dim else 0) for d in range(np.ndim(array))]
        return jnp.pad(array, widths)

    def unpad(self, array: ArrayLike, dim: int) -> jax.Array:
        """Remove the padding of `dim`: the inverse of `pad`.

        Args:
            array: (.., padded, ..) globally.
            dim: the dim that is split; a negative dim counts from the end.

        Returns:
            (.., size, ..) globally. Differentiable; the transpose is `pad`.

        Raises:
            ValueError: there is no such dim, or it does not have `padded` rows.
        """
        array = array_like("array", array)
        dim = self._checked_dim("unpad", np.shape(array), dim, self.padded)
        return lax.slice_in_dim(jnp.asarray(array), 0, self.size, axis=dim)

    def spec(self, dim: int, ndim: int, axis: str) -> PartitionSpec:
        """Return the `PartitionSpec` of a padded array of `ndim` dims, with `dim` split over mesh axis `axis`.

        Raises:
            ValueError: an array of `ndim` dims has no such dim, or `axis` is not one name.
        """
        dim, name = _normalised_dim("spec", dim, ndim), one_axis(axis)
        return PartitionSpec(*(name if d == dim else None for d in range(ndim)))

    def _checked_dim(self, method: str, shape: tuple[int, ...], dim: int, rows: int) -> int:
        normalised = _normalised_dim(method, dim, len(shape))
        if shape[normalised] != rows:
            raise ValueError(
                f"{method}: dim {dim} of an array of shape {shape} has {shape[normalised]} rows, but {self} takes "
                f"{rows}: give the array whose dim {dim} has {rows}, or the Split of this one"
            )
        return normalised


def split_over(size: int, axis: str, *, option: str = "size", at_least: int = 1) -> Split:
    """Return the `Split` of `size` rows over the IPUs of mesh axis `axis`. Call it inside a `shard_map` with that axis.

    Args:
        size: rows without padding.
        axis: the mesh axis.
        option: the name of `size` in the op that the user calls, for messages.
        at_least: the smallest allowed `size`: 0 for tokens, 1 for columns.

    Raises:
        ValueError: the enclosing `shard_map` has no axis `axis`, `size` is not an int of at least `at_least`, or the
            padded dim is too long for int32 indices.
    """
    parts = axis_size(axis)
    split = Split(whole_number(option, size, at_least=at_least), parts)
    if split.padded > _LARGEST_PADDED:
        raise ValueError(f"{option}={size} does not fit the int32 indices of the ops: use at most 2**31 - {parts}")
    return split


def axis_size(axis: str) -> int:
    """Return how many IPUs mesh axis `axis` has. Call it inside a `shard_map` with that axis.

    Raises:
        ValueError: the enclosing `shard_map` has no axis `axis`, or `axis` is not a single name.
    """
    try:
        return lax.axis_size(one_axis(axis))
    except NameError:
        raise ValueError(
            f"axis={axis!r} is not an axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh with "
            f"this axis, or give the axis that its mesh has"
        ) from None


def is_typed(axis: str) -> bool:
    """Return whether the enclosing `shard_map` has check_vma=True, so that types express what varies over `axis`.

    An IPU's index is typed as varying in this case and in no other, whatever the ops' inputs are.
    """
    return axis in varying_axes(lax.axis_index(axis))


def varying_axes(x: ArrayLike) -> frozenset[str]:
    """Return the mesh axes over which `x` varies by its type; empty under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def check_apart(name: str, shard: jax.Array, axis: str) -> None:
    """Raise for a value that is typed as replicated over several IPUs, if the op needs a shard from each.

    Under check_vma=False types say nothing, and this check does nothing.

    Raises:
        ValueError: names the value, and says how to split it.
    """
    parts = axis_size(axis)
    if parts > 1 and is_typed(axis) and axis not in varying_axes(shard):
        raise ValueError(
            f"{name} of shape {shard.shape} is the same on all {parts} IPUs of axis {axis!r}, but must be split over "
            f"them: shard the whole array with in_specs that name {axis!r}, or lax.pcast({name}, {axis!r}, "
            f"to='varying') if the shards are alike"
        )


def check_shard(name: str, shard: jax.Array, dim: int, split: Split, axis: str, *, option: str = "size") -> None:
    """Raise for an array that is not a shard, has no `dim`, or does not have `split.local` rows in it.

    Raises:
        ValueError: names the array and both sizes, and says how to shard it.
    """
    if not -shard.ndim <= dim < shard.ndim:
        raise ValueError(
            f"{name} has shape {shard.shape} on each IPU, without a dim {dim} to split: give an array that has one"
        )
    if shard.shape[dim] != split.local:
        raise ValueError(
            f"{name} has shape {shard.shape} on each IPU, with {shard.shape[dim]} rows in dim {dim}, but {option}="
            f"{split.size} over the {split.parts} IPUs of axis {axis!r} takes {split.local}: pad the whole array with "
            f"{split}.pad(array, {dim}) and shard it with in_specs={split}.spec({dim}, {shard.ndim}, {axis!r})"
        )
    check_apart(name, shard, axis)


def mask_padding(shard: jax.Array, dim: int, split: Split, axis: str, fill: float) -> jax.Array:
    """Return the shard with `fill` instead of padding in `dim`. The padding is not read and gets no gradient.

    If the split has no padding, the shard itself is returned, at no cost. Sends nothing.
    """
    if not split.padding:
        return shard
    others = [d for d in range(shard.ndim) if d != dim % shard.ndim]
    is_real = split.offset(lax.axis_index(axis)) + jnp.arange(split.local) < split.size
    return jnp.where(jnp.expand_dims(is_real, others), shard, jnp.asarray(fill, shard.dtype))


def as_int32(name: str, indices: ArrayLike, size: int) -> jax.Array:
    """Return indices of any integer dtype as int32, with -1 for each index outside [0, size).

    The bounds are checked in the indices' own dtype, before the conversion, so that 2**32 + 3 does not turn into 3.

    Raises:
        ValueError: the indices are not integers.
    """
    own = array_like(name, indices)
    if not jnp.issubdtype(own.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {own.dtype}, but indices must be integers: use int32")
    if own.dtype.itemsize < 4:
        # Widened first, since `size` may not fit into 8 or 16 bits.
        own = own.astype(np.int32)
    inside = (own >= 0) & (own < own.dtype.type(size))
    return jnp.where(inside, own.astype(np.int32), jnp.int32(-1))


def local_rows(indices: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return the local row of each global index, or `split.local` for an index that this IPU does not hold.

    `split.local` is the first index out of bounds: a gather with mode="fill" reads no row for it, and the transposed
    scatter writes none. Sends nothing.

    Args:
        indices: any shape, from `as_int32`.
        split: how the indexed dim is split.
        axis: the mesh axis.

    Returns:
        int32 in the shape of `indices`, in [0, split.local].
    """
    rows = indices - split.offset(lax.axis_index(axis))
    return jnp.where((rows >= 0) & (rows < split.local), rows, split.local)


def check_one_per_row(name: str, indices: ArrayLike, shard: jax.Array) -> None:
    """Raise for indices that don't have the shard's shape without its last dim: one index for each row.

    Raises:
        ValueError: names both shapes.
    """
    indices = array_like(name, indices)
    if np.shape(indices) != shard.shape[:-1]:
        raise ValueError(
            f"{name} has shape {np.shape(indices)}, but a shard of shape {shard.shape} takes one index for each of its "
            f"rows: give shape {shard.shape[:-1]}"
        )


def _normalised_dim(method: str, dim: int, ndim: int) -> int:
    dim = whole_number("dim", dim)
    if not -ndim <= dim < ndim:
        raise ValueError(f"{method}: dim={dim} is not a dim of an array of {ndim} dims: give {-ndim} to {ndim - 1}")
    return dim % ndim
