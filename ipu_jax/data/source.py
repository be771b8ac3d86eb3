"""Read examples by their numbers, from arrays in memory or from an object that returns those of an index array.

    {"images": (60000, 28, 28) uint8, "labels": (60000,) uint8}         a pytree of arrays, one example per row
    class Photos: __len__(self); __getitem__(self, indices)             indices (n,) intp -> a pytree of arrays (n, ...)

Examples are always read into new memory. On a CPU `jax.device_put` does not copy a NumPy array but shares its memory,
so a buffer that is used again would change a batch that was handed out before.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

_Indices = npt.NDArray[np.intp]
_MEND = "give arrays with an example a row, or an object with __len__ and __getitem__ of an index array"


class Source:
    """Reads examples by their numbers, from anything that `Feed` takes.

    64-bit numbers are converted to 32-bit ones unless `jax_enable_x64` is set.

    Attributes:
        examples: the number of examples.
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: the source is neither arrays nor an indexable, it is empty, or its leaves differ in length or have a
            dtype that is neither a number nor bool.

    >>> source = Source({"x": np.arange(6).reshape(3, 2)})
    >>> source.examples, source.read(np.array([2, 0]))["x"].tolist()
    (3, [[4, 5], [0, 1]])
    """

    def __init__(self, source: Any):
        self.examples = _length(source)
        self._read = _reader(source)
        self._copies = _is_indexable(source)
        if self.examples < 1:
            raise ValueError(f"the source holds no examples: {_MEND}")
        one = self._checked(self._read(np.zeros(1, np.intp)), 1)
        self.like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], _jax_dtype(leaf.dtype)), one)
        if not jax.tree.leaves(self.like):
            raise ValueError(f"the source has examples without any array: {_MEND}")

    def read(self, indices: _Indices) -> Any:
        """Return the examples with these numbers: leaves (n, ...) in new memory, with the dtypes of `like`.

        Args:
            indices: (n,).

        Raises:
            ValueError: an indexable returned other arrays than the first time, or an integer that 32 bits cannot hold.
        """
        examples = self._checked(self._read(indices), len(indices))
        if jax.tree.structure(examples) != jax.tree.structure(self.like):
            raise ValueError(
                f"the source gave {jax.tree.structure(examples)} for {len(indices)} examples, and "
                f"{jax.tree.structure(self.like)} for the first one: give all alike"
            )
        return jax.tree.map_with_path(functools.partial(_converted, self._copies), self.like, examples)

    def filling(self, fill: Any) -> Any:
        """Return `fill`, a number or a pytree of numbers, as a pytree with the structure of `like`.

        Raises:
            ValueError: `fill` has another structure, or the dtype of an array cannot hold its number.
        """
        if jax.tree.structure(fill) != jax.tree.structure(self.like):
            if jax.tree.structure(fill) != jax.tree.structure(0):
                raise ValueError(f"fill={fill!r} is neither a number nor a pytree of numbers as the source's")
            fill = jax.tree.map(lambda _: fill, self.like)
        return jax.tree.map_with_path(_check_fill, self.like, fill)

    def _checked(self, examples: Any, count: int) -> Any:
        for path, leaf in jax.tree.leaves_with_path(examples):
            if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (count,):
                shape = f"shape {leaf.shape}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
                raise ValueError(
                    f"the source gave {shape} at {_name(path)} for {count} examples: give NumPy arrays ({count}, ...)"
                )
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_):
                raise ValueError(f"the source holds {leaf.dtype} at {_name(path)}: IPUs hold numbers and bools only")
        return examples


def normalise(values: Any, *, mean: Any = 0.0, std: Any = 1.0, dtype: Any = np.float32) -> Any:
    """Scale bytes for a network: map 0 to 255 to 0 to 1, subtract `mean` and divide by `std`.

    A `jax.Array` is scaled on the IPU, inside a step, so that only bytes are sent from the host; a NumPy array is
    scaled on the host. Both results are the same except for rounding.

    Args:
        values: uint8, of any shape.
        mean, std: numbers, or arrays that broadcast against the last dims, such as (channels,).
        dtype: of the result and of the computation.

    Raises:
        ValueError: the values are not uint8.

    >>> normalise(np.array([0, 51, 255], np.uint8), mean=0.5, std=0.5).tolist()
    [-1.0, -0.6000000238418579, 1.0]
    """
    if values.dtype != np.uint8:
        raise ValueError(f"values are {values.dtype}: give bytes, uint8 of 0 to 255")
    scaled = values.astype(dtype) / np.asarray(255, dtype)
    return (scaled - np.asarray(mean, dtype)) / np.asarray(std, dtype)


def _reader(source: Any) -> Callable[[_Indices], Any]:
    if _is_indexable(source):
        return lambda indices: jax.tree.map(_on_host, source[indices])
    arrays = jax.tree.map(_on_host, source)
    return lambda indices: jax.tree.map(lambda leaf: leaf.take(indices, axis=0), arrays)


def _is_indexable(source: Any) -> bool:
    is_tree = isinstance(source, dict | list | tuple | str | bytes | np.ndarray | jax.Array)
    return not is_tree and hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _length(source: Any) -> int:
    if _is_indexable(source):
        return len(source)
    if hasattr(source, "__next__"):
        raise ValueError(f"the source is a {type(source).__name__}, whose examples have no numbers: {_MEND}")
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(source):
        if not isinstance(leaf, np.ndarray | jax.Array) or not leaf.ndim:
            raise ValueError(f"the source has {type(leaf).__name__} at {_name(path)}: {_MEND}")
        lengths[_name(path)] = len(leaf)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} at {name}" for name, length in lengths.items())
        raise ValueError(f"the source's arrays differ in length: {listed}; give a row of each for every example")
    return next(iter(lengths.values()), 0)


def _on_host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _name(path: Any) -> str:
    return f"source{jax.tree_util.keystr(path)}"


def _jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to which jax converts numbers of this dtype."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype if dtype.isnative else dtype.newbyteorder("=")))


def _converted(copies: bool, path: Any, like: jax.ShapeDtypeStruct, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if (rows.shape[1:], _jax_dtype(rows.dtype)) != (like.shape, like.dtype):
        raise ValueError(
            f"the source gave {rows.dtype} {rows.shape[1:]} at {_name(path)}, and {like.dtype} {like.shape} for the "
            "first example: give all alike"
        )
    if rows.dtype.kind in "iu" and rows.dtype != like.dtype and rows.size:
        low, high, limits = rows.min(), rows.max(), np.iinfo(like.dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"the source holds {low if low < limits.min else high} at {_name(path)}, which {like.dtype} cannot: "
                "set jax_enable_x64, or give smaller numbers"
            )
    # rows taken from arrays are in new memory already; those that an indexable returns may not be
    return np.array(rows, like.dtype, order="C", copy=copies or None)


def _check_fill(path: Any, like: jax.ShapeDtypeStruct, value: Any) -> Any:
    try:
        converted = np.asarray(value, like.dtype)
    except (OverflowError, TypeError, ValueError):
        converted = None
    if converted is None or converted.ndim or (like.dtype.kind in "iub" and converted != value):
        raise ValueError(f"fill={value!r} at {_name(path)} is no {like.dtype}: give a number that it holds")
    return value
