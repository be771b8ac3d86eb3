"""Pad examples of unlike lengths to a few sizes.

    buckets=(8, 16)     a batch of lengths 5, 7 and 8 is (3, 8), and of 5, 7 and 9 (3, 16)

Examples are padded to the largest bucket where they are read, and a batch is cut to its bucket before it is sent.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
import numpy.typing as npt

from ipu_jax.base.annotations import Tree
from ipu_jax.base.checks import as_int, check_bool, in_line
from ipu_jax.base.decorators import public


@public
@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    """Say to which sizes a `Feed` pads examples of unlike lengths.

    All examples of a batch are padded, by the feed's `fill`, to the smallest size that holds the longest of them. A
    training step compiles one program per size.

    Args:
        sizes: the sizes, ascending.
        dim: the dim of an example's leaves that has its length. Leaves without this dim have no length, and the others
            must agree on it. Or a pytree of dims like an example, with None for a leaf without a length: the longest
            leaf then decides how long an example is.
        truncate: whether longer examples are cut off at the largest size. Otherwise they are an error.
        lengths: the length of each example, (examples,). Without it, a feed of examples with numbers reads each example
            once when it is made. Not for a stream.

    Raises:
        ValueError: the sizes are not ascending counts.

    >>> from ipu_jax import Feed, make_mesh
    >>> examples = [{"tokens": list(range(1, n + 1))} for n in (2, 4, 3, 1)]
    >>> options = {"items": "examples", "mesh": make_mesh(1, 1), "micro_batch": 2, "shuffle": False}
    >>> with Feed(examples, buckets=(2, 4), **options) as feed:
    ...     [batch.data["tokens"].tolist() for batch in feed.epoch()]
    [[[[1, 2, 3, 4], [1, 2, 3, 0]]], [[[1, 2], [1, 0]]]]
    """

    sizes: Sequence[int]
    dim: Tree = 0
    truncate: bool = False
    lengths: npt.ArrayLike | None = None

    def __post_init__(self):
        sizes = [as_int(size) or 0 for size in self.sizes] if isinstance(self.sizes, Sequence) else []
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ValueError(f"buckets={self.sizes!r} are not sizes: give ascending ints, such as (128, 256, 512)")
        object.__setattr__(self, "sizes", tuple(sizes))
        check_bool("truncate", self.truncate)


class Padding:
    """Pads examples to the largest bucket, and cuts batches to theirs.

    Args:
        buckets: the buckets.
        like: the pytree of the first example, with leaves `jax.ShapeDtypeStruct` of its own length.
        names: the names of the leaves for messages.

    Attributes:
        dims: the dim of each leaf that has the length, or None.
        likes: the leaves of an example that is padded to the largest bucket.

    Raises:
        ValueError: `dim` does not fit the example.
    """

    def __init__(self, buckets: Buckets, like: Tree, names: Sequence[str]):
        leaves, self._structure = jax.tree.flatten(like)
        self._sizes, self._largest = np.array(buckets.sizes), buckets.sizes[-1]
        self._buckets, self._names, self._is_one = buckets, names, as_int(buckets.dim) is not None
        if self._is_one:
            self.dims = [buckets.dim if 0 <= buckets.dim < leaf.ndim else None for leaf in leaves]
        else:
            self.dims, structure = jax.tree.flatten(buckets.dim, is_leaf=lambda dim: dim is None)
            if structure != self._structure:
                raise ValueError(f"dim={buckets.dim!r} is neither an int nor a pytree like an example: {_DIMS}")
        for name, dim, leaf in zip(names, self.dims, leaves, strict=True):
            if dim is not None and not 0 <= (-1 if as_int(dim) is None else dim) < leaf.ndim:
                raise ValueError(f"dim={dim!r} at {name} is not a dim of {leaf.shape}: {_DIMS}")
        if set(self.dims) == {None}:
            raise ValueError(f"dim={buckets.dim!r} is a dim of no leaf of an example, so there is no length: {_DIMS}")
        self.likes = [
            leaf if dim is None else jax.ShapeDtypeStruct(_resized(leaf.shape, dim, self._largest), leaf.dtype)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]

    def length(self, shapes: Sequence[tuple[int, ...]], what: Callable[[], str]) -> int:
        """Return the length of an example, at most the largest bucket, from the shapes of its leaves.

        Raises:
            ValueError: it is longer than the largest bucket, or its leaves do not agree; the message names the leaf.
        """
        named = zip(self._names, self.dims, shapes, strict=True)
        found = {name: shape[dim] for name, dim, shape in named if dim is not None and dim < len(shape)}
        longest = max(found, key=lambda name: found[name], default=None)
        if longest is None:
            return 0  # such an example is refused when it is read
        if self._is_one and len(set(found.values())) > 1:
            listed = ", ".join(f"{length} at {name}" for name, length in found.items())
            raise ValueError(f"{what()} has several lengths, {listed}: {_DIMS}")
        if found[longest] > self._largest and not self._buckets.truncate:
            raise _too_long(f"{what()} has length {found[longest]} at {longest}", self._largest)
        return min(found[longest], self._largest)

    def padded(self, rows: Sequence[np.ndarray], fills: Sequence[float]) -> list[np.ndarray]:
        """Return the leaves of examples of one length, (n, ...), padded to the largest bucket, in new memory."""
        padded: list[np.ndarray] = []
        for leaf, like, dim, fill in zip(rows, self.likes, self.dims, fills, strict=True):
            whole = leaf
            if dim is not None:
                whole = np.full((len(leaf), *like.shape), fill, like.dtype)
                part = leaf[_first(dim + 1, self._largest)]
                whole[_first(dim + 1, part.shape[dim + 1])] = part
            padded.append(whole)
        return padded

    def size(self, lengths: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return the smallest bucket that holds each of these lengths."""
        return self._sizes[np.searchsorted(self._sizes, lengths)]

    def cut(self, rows: Tree, size: int) -> Tree:
        """Return examples (n, ...) that are padded to the largest bucket, cut to another one."""
        leaves = [
            leaf if dim is None else np.ascontiguousarray(leaf[_first(dim + 1, size)])
            for leaf, dim in zip(jax.tree.leaves(rows), self.dims, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


_DIMS = "give the dim of the length, such as dim=0, or a dim for each leaf, None for a leaf without a length"


def checked_buckets(given: Buckets | Sequence[int] | None, items: str | None) -> Buckets | None:
    """Return the buckets of a feed, or None, from its arguments.

    Raises:
        ValueError: they are not sizes, or the source has one shape only.
    """
    if given is None:
        return None
    buckets = given if isinstance(given, Buckets) else Buckets(given)
    if items is None:
        raise ValueError(
            f"buckets={buckets.sizes}, but the source is arrays, whose rows have one length: give a list of examples "
            "of unlike lengths, with items='examples'"
        )
    return buckets


def checked_lengths(buckets: Buckets, examples: int) -> npt.NDArray[np.intp] | None:
    """Return `lengths` as an array, at most the largest bucket; None if they are not given.

    Raises:
        ValueError: they are not a length for each example, or one is longer than the largest bucket.
    """
    if buckets.lengths is None:
        return None
    lengths, largest = np.asarray(buckets.lengths), buckets.sizes[-1]
    if lengths.dtype.kind not in "iu" or lengths.shape != (examples,) or lengths.min() < 0:
        raise ValueError(
            f"lengths={in_line(buckets.lengths)} are {lengths.dtype} {lengths.shape}, and there are {examples} "
            "examples: give an int of at least 0 for each"
        )
    if lengths.max() > largest and not buckets.truncate:
        raise _too_long(f"example {lengths.argmax()} has length {lengths.max()} in lengths", largest)
    return np.minimum(lengths, largest).astype(np.intp)


def _too_long(what: str, largest: int) -> ValueError:
    mend = "give a larger one, leave the example out, or say Buckets(..., truncate=True)"
    return ValueError(f"{what}, and the largest bucket is {largest}: {mend}")


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _first(dim: int, size: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(size))
