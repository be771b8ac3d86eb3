"""Convert users' data to NumPy arrays, and check that all examples are alike.

    np.ndarray, jax.Array, tensors of torch and TensorFlow, images of Pillow     an array each
    Python's and NumPy's numbers, lists of numbers (also nested)                 an array each, in an example only
    dict, tuple, any other list                                                  a structure of arrays

The libraries are not imported: anything that NumPy can convert is an array.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.training.data.buckets import Buckets, Padding

_NUMBERS = (bool, int, float, complex, np.generic)


class Form:
    """The structure, shapes and dtypes of all examples, taken from the first item.

    64-bit numbers are converted to 32-bit numbers unless `jax_enable_x64` is set.

    Args:
        item: one example, or if `batched`, several examples, one per row of every leaf.
        batched: whether items contain several examples.
        what: the name of `item` for messages.
        buckets: how examples of unlike lengths are padded; None if all have one length.
        fill: the values that pad them, as of `Feed`.

    Attributes:
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`, of the length of the largest bucket.
        padding: pads the examples, or None.

    Raises:
        ValueError: the item has no arrays, an array whose dtype is neither numeric nor bool, or does not fit `buckets`.

    >>> form = Form({"x": [1, 2], "label": 3}, batched=False, what="example 0")
    >>> form.like["x"].shape, [leaf.tolist() for leaf in form.rows({"x": [4, 5], "label": 6}, lambda: "example 1")]
    ((2,), [[6], [[4, 5]]])
    """

    def __init__(self, item: Tree, *, batched: bool, what: str, buckets: Buckets | None = None, fill: Tree = 0):
        self._batched = batched
        with_paths, self._structure = jax.tree.flatten_with_path(_plain(item), is_leaf=_is_array)
        if not with_paths:
            raise ValueError(f"{what} has no arrays: give a dict, a tuple or an array of numbers")
        self._names = [_name(path) for path, _ in with_paths]
        likes: list[jax.ShapeDtypeStruct] = []
        for name, (_, leaf) in zip(self._names, with_paths, strict=True):
            array = _array_of(leaf, name, what)
            if batched and not array.ndim:
                raise ValueError(
                    f"{what} has one {array.dtype} at {name}, without a dim of examples: give a row per example, or "
                    "items='examples' if each item is one"
                )
            shape = array.shape[1:] if batched else array.shape
            likes.append(jax.ShapeDtypeStruct(shape, jax_dtype(array.dtype)))
        self.like = jax.tree.unflatten(self._structure, likes)
        self.padding = None if buckets is None else Padding(buckets, self.like, self._names)
        self._likes, self._dims = likes, [None] * len(likes)
        if self.padding is not None:
            self._likes, self._dims = self.padding.likes, self.padding.dims
            self.like = jax.tree.unflatten(self._structure, self._likes)
            self._fills = jax.tree.leaves(filling(fill, self.like))

    def rows(self, item: Tree, what: Callable[[], str]) -> list[np.ndarray]:
        """Return the leaves of an item, each with one example per row: (n, ...), with n = 1 if not batched.

        They may share memory with the item, and have its dtypes. With buckets, they are padded to the largest one, and
        the lengths of the examples follow, (n,).

        Args:
            item: an item like the first one.
            what: returns the name of the item for messages.

        Raises:
            ValueError: the item is not like the first one, or longer than the largest bucket; the message names the
                leaf.
        """
        rows: list[np.ndarray] = []
        for name, like, dim, leaf in zip(self._names, self._likes, self._dims, self._leaves(item, what), strict=True):
            array = _array_of(leaf, name, what)
            array = array if self._batched and array.ndim else array[None]
            if dim is not None and array.ndim > dim + 1:
                shape = (*like.shape[:dim], array.shape[dim + 1], *like.shape[dim + 1 :])
                like = jax.ShapeDtypeStruct(shape, like.dtype)
            check_alike(like, array, name, what)
            rows.append(array)
        if self._batched and len({len(leaf) for leaf in rows}) > 1:
            listed = ", ".join(f"{len(leaf)} at {name}" for name, leaf in zip(self._names, rows, strict=True))
            raise ValueError(
                f"{what()} has arrays of different lengths, {listed}: give a row of each for every example"
            )
        if self.padding is None:
            return rows
        length = self.padding.length([leaf.shape[1:] for leaf in rows], what)
        return [*self.padding.padded(rows, self._fills), np.full(len(rows[0]), length)]

    def length(self, item: Tree, what: Callable[[], str]) -> int:
        """Return the length of an example, without reading its numbers, if there are buckets."""
        assert self.padding is not None, "there are buckets"
        return self.padding.length([np.shape(leaf) for leaf in self._leaves(item, what)], what)

    def empty(self, count: int) -> list[np.ndarray]:
        """Return new memory for the `rows` of `count` examples, (count, ...) each."""
        lengths = [np.empty(count, np.intp)] * (self.padding is not None)
        return [*[np.empty((count, *like.shape), like.dtype) for like in self._likes], *lengths]

    def tree(self, leaves: list[np.ndarray]) -> Tree:
        """Return leaves, in the order of `rows`, as a pytree with the structure of the examples."""
        return jax.tree.unflatten(self._structure, leaves[: len(self._likes)])

    def _leaves(self, item: Tree, what: Callable[[], str]) -> list[Value]:
        leaves, structure = jax.tree.flatten(_plain(item), is_leaf=_is_array)
        if structure != self._structure:
            raise ValueError(f"{what()} {self._structure_error(item)}: give all alike")
        return leaves

    def _structure_error(self, item: Tree) -> str:
        found = [_name(path) for path, _ in jax.tree.leaves_with_path(_plain(item), is_leaf=_is_array)]
        missing = [name for name in self._names if name not in found]
        added = [name for name in found if name not in self._names]
        if missing:
            return f"lacks {', '.join(missing)}, which the first example has"
        if added:
            return f"has {', '.join(added)}, which the first example lacks"
        structure = jax.tree.structure(_plain(item), is_leaf=_is_array)
        return f"has the structure {structure}, and the first example {self._structure}"


def on_host(leaf: Value) -> Value:
    """Return a NumPy array for a leaf that is an array of another library, and any other leaf as it is.

    Raises:
        ValueError: the library refuses to convert, such as torch for a tensor on a GPU or with a gradient.

    >>> on_host(jnp.arange(3)).tolist(), on_host("text")
    ([0, 1, 2], 'text')
    """
    if isinstance(leaf, (np.ndarray, *_NUMBERS)):
        return leaf
    try:
        if hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__"):
            return np.asarray(leaf)
        return np.asarray(leaf.numpy()) if hasattr(leaf, "numpy") else leaf
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"a {type(leaf).__name__} cannot be read as a NumPy array, convert it first: {error}"
        ) from error


def jax_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype to which jax converts numbers of this dtype."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype if dtype.isnative else dtype.newbyteorder("=")))


def is_numeric(dtype: np.dtype) -> bool:
    """Return whether IPUs can hold this dtype: numbers and bools."""
    return jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_


def check_alike(like: jax.ShapeDtypeStruct, rows: np.ndarray, name: str, what: Callable[[], str]) -> None:
    """Raise if rows are not like the first example, or contain integers that 32 bits cannot hold.

    Args:
        like: the leaf of the first example.
        rows: (n, ...).
        name: the name of the leaf.
        what: returns the name of the item for messages.

    Raises:
        ValueError: the message names the item and the leaf.
    """
    if (rows.shape[1:], jax_dtype(rows.dtype)) != (like.shape, like.dtype):
        raise ValueError(
            f"{what()} has {rows.dtype} {rows.shape[1:]} at {name}, and the first example {like.dtype} {like.shape}: "
            "give all alike"
        )
    if rows.dtype.kind in "iu" and rows.dtype != like.dtype and rows.size:
        low, high, limits = rows.min(), rows.max(), np.iinfo(like.dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{what()} has {low if low < limits.min else high} at {name}, which {like.dtype} cannot hold: set "
                "jax_enable_x64, or give smaller numbers"
            )


def filling(fill: Tree, like: Tree) -> Tree:
    """Return `fill`, a number or a pytree of numbers, as a pytree with the structure of `like`.

    Raises:
        ValueError: `fill` has another structure, or the dtype of an array cannot hold its number.
    """
    if jax.tree.structure(fill) != jax.tree.structure(like):
        if jax.tree.structure(fill) != jax.tree.structure(0):
            raise ValueError(f"fill={fill!r} is neither a number nor a pytree of numbers like the source's")
        fill = jax.tree.map(lambda _: fill, like)
    return jax.tree.map_with_path(_check_fill, like, fill)


def _check_fill(path: Any, like: jax.ShapeDtypeStruct, value: Value) -> Value:
    try:
        converted = np.asarray(value, like.dtype)
    except (OverflowError, TypeError, ValueError):
        converted = None
    if converted is None or converted.ndim or (like.dtype.kind in "iub" and converted != value):
        keys = jax.tree_util.keystr(path)
        raise ValueError(f"fill={value!r} at source{keys} is not of dtype {like.dtype}: give a number that it holds")
    return value


def _array_of(leaf: Value, name: str, what: Callable[[], str] | str) -> np.ndarray:
    """Return the leaf as an array of numbers or bools."""

    def error(problem: str) -> ValueError:
        return ValueError(f"{what if isinstance(what, str) else what()} {problem}")

    try:
        array = np.asarray(leaf) if isinstance(leaf, (list, *_NUMBERS)) else on_host(leaf)
    except ValueError as refused:
        raise error(f"has no array at {name}: {refused}") from refused
    if not isinstance(array, np.ndarray):
        kind = type(leaf).__name__
        raise error(f"has {kind} at {name}: IPUs hold numbers and bools only, so leave it out, or turn it into numbers")
    if not is_numeric(array.dtype):
        raise error(f"has {array.dtype} at {name}: IPUs hold numbers and bools only")
    return array


def _is_array(item: Tree) -> bool:
    """Return whether this is a list of numbers, possibly nested, which counts as an array and not as a structure."""
    return isinstance(item, list) and all(isinstance(value, _NUMBERS) or _is_array(value) for value in item)


def _plain(item: Any) -> Any:
    """Convert any other mapping, such as the `BatchEncoding` of Hugging Face, to a dict."""
    return dict(item) if isinstance(item, Mapping) and not isinstance(item, dict) else item


def _name(path: Any) -> str:
    return f"example{jax.tree_util.keystr(path)}"
