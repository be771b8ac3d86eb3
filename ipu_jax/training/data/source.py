"""Read examples by their numbers: from arrays in memory, or from an object that returns one or several examples.

    {"images": (60000, 28, 28) uint8, "labels": (60000,) uint8}         a pytree of arrays, one example per row
    class Photos: __len__(self); __getitem__(self, indices)             indices (n,) intp -> a pytree of arrays (n, ...)
    class Photos: __len__(self); __getitem__(self, index)               an int -> one example, with items="examples"

Examples are always read into new memory. On a CPU `jax.device_put` does not copy a NumPy array but shares its memory,
so a reused buffer would change a batch that was returned before.
"""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ipu_jax.base.annotations import Dtype, Tree, Value
from ipu_jax.training.data.buckets import Buckets, checked_lengths
from ipu_jax.training.data.leaves import Form, check_alike, is_numeric, jax_dtype, on_host

_Indices = npt.NDArray[np.intp]
_MEND = "give arrays with an example a row, or an object with __len__ and __getitem__ of an index array"
_ITEMS = "items='examples' if it has one example after the other, items='batches' if it has batches"


class ArraySource:
    """Reads from arrays, or from an object that returns the examples of an index array.

    64-bit numbers are converted to 32-bit numbers unless `jax_enable_x64` is set.

    Attributes:
        examples: the number of examples.
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: the source is neither arrays nor an indexable, it is empty, or its leaves differ in length or have a
            dtype that is neither numeric nor bool.

    >>> source = ArraySource({"x": np.arange(6).reshape(3, 2)})
    >>> source.examples, source.read(np.array([2, 0]))["x"].tolist()
    (3, [[4, 5], [0, 1]])
    """

    padding = sizes = None

    def __init__(self, source: Any):
        is_tree = isinstance(source, dict | list | tuple | str | bytes | np.ndarray | jax.Array)
        self._copies = not is_tree and has_numbers(source)
        if hasattr(source, "__next__"):  # jax would flatten an iterator
            raise _no_arrays(source)
        self._source = source if self._copies else jax.tree.map(on_host, source)
        self.examples = len(source) if self._copies else _length(self._source)
        if self.examples < 1:
            raise ValueError(f"the source holds no examples: {_MEND}")
        one = self._examples(np.zeros(1, np.intp))
        self.like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], jax_dtype(leaf.dtype)), one)
        if not jax.tree.leaves(self.like):
            raise ValueError(f"the source has examples without any array: {_MEND}")

    def read(self, indices: _Indices) -> Tree:
        """Return the examples with these numbers: leaves (n, ...) in new memory, with the dtypes of `like`.

        Args:
            indices: (n,).

        Raises:
            ValueError: an indexable returned arrays unlike its first arrays, or an integer that 32 bits cannot hold.
        """
        examples = self._examples(indices)
        if jax.tree.structure(examples) != jax.tree.structure(self.like):
            raise ValueError(
                f"the source gave {jax.tree.structure(examples)} for {len(indices)} examples, and "
                f"{jax.tree.structure(self.like)} for the first one: give all alike"
            )
        return jax.tree.map_with_path(self._converted, self.like, examples)

    def _examples(self, indices: _Indices) -> Tree:
        """Return the examples with these numbers as arrays (n, ...), which are checked."""
        count = len(indices)
        if self._copies:
            examples = jax.tree.map(on_host, self._source[indices])
        else:
            examples = jax.tree.map(lambda leaf: leaf.take(indices, axis=0), self._source)
        for path, leaf in jax.tree.leaves_with_path(examples):
            if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != (count,):
                shape = f"shape {leaf.shape}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
                raise ValueError(
                    f"the source gave {shape} at {_name(path)} for {count} examples: give arrays ({count}, ...), or "
                    "items='examples' if it returns the one example of an int"
                )
            if not is_numeric(leaf.dtype):
                raise ValueError(f"the source holds {leaf.dtype} at {_name(path)}: IPUs hold numbers and bools only")
        return examples

    def _converted(self, path: Any, like: jax.ShapeDtypeStruct, rows: np.ndarray) -> np.ndarray:
        check_alike(like, rows, _name(path), lambda: "the source")
        # rows taken from arrays are in new memory already; rows that an indexable returns may not be
        return np.array(rows, like.dtype, order="C", copy=self._copies or None)


class ExampleSource:
    """Reads one example at a time from an object with `__len__()` and `__getitem__(int)`, such as a list of dicts.

    Args:
        source: the object.
        buckets: how examples of unlike lengths are padded; None if all have one length.
        fill: the values that pad them, as of `Feed`.

    Attributes:
        examples: the number of examples.
        like: the pytree of one example, with leaves `jax.ShapeDtypeStruct`, of the length of the largest bucket.
        padding: the `Padding` of the examples, or None.
        sizes: the bucket of each example, (examples,), or None.

    Raises:
        ValueError: there are no examples, the first example has no arrays or contains anything but numbers, or an
            example does not fit the buckets.

    >>> source = ExampleSource([{"x": [0.5, 1.0], "label": 3}, {"x": [1.5, 2.0], "label": 4}])
    >>> source.examples, source.read(np.array([1, 0, 1]))["label"].tolist()
    (2, [4, 3, 4])
    """

    def __init__(self, source: Any, buckets: Buckets | None = None, fill: Tree = 0):
        self._source, self.examples = source, len(source)
        if self.examples < 1:
            raise ValueError(f"the source, a {type(source).__name__}, holds no examples: give at least one")
        self._form = Form(source[0], batched=False, what="example 0", buckets=buckets, fill=fill)
        self.like, self.padding, self.sizes = self._form.like, self._form.padding, None
        if buckets is not None and self.padding is not None:
            lengths = checked_lengths(buckets, self.examples)
            if lengths is None:
                named = lambda index: lambda: f"example {index}"
                lengths = [self._form.length(source[index], named(index)) for index in range(self.examples)]
            self.sizes = self.padding.size(lengths)

    def read(self, indices: _Indices) -> Tree:
        """Return the examples with these numbers: leaves (n, ...) in new memory, with the dtypes of `like`.

        Args:
            indices: (n,).

        Raises:
            ValueError: an example is not like the first one, or longer than its bucket; the message contains its
                number.
        """
        leaves = self._form.empty(len(indices))
        for row, index in enumerate(indices.tolist()):
            example = self._form.rows(self._source[index], lambda index=index: f"example {index}")
            for filled, read in zip(leaves, example, strict=True):
                filled[row] = read[0]
            if self.sizes is not None and example[-1][0] > self.sizes[index]:
                raise ValueError(
                    f"example {index} has length {example[-1][0]}, and its bucket is {self.sizes[index]} by the length "
                    "that the feed was given or read first: give Buckets(lengths=...) the lengths of the examples"
                )
        return self._form.tree(leaves)


def normalise(values: Value, *, mean: Value = 0.0, std: Value = 1.0, dtype: Dtype = np.float32) -> Value:
    """Scale bytes for a network: map 0...255 to 0...1, subtract `mean` and divide by `std`.

    A `jax.Array` is scaled on the IPU, inside a step, so that only bytes are sent from the host; a NumPy array is
    scaled on the host. Both results are the same except for rounding.

    Args:
        values: uint8, of any shape.
        mean, std: numbers, or arrays that broadcast against the last dims, such as (channels,).
        dtype: the dtype of the result and of the computation.

    Raises:
        ValueError: the values are not uint8.

    >>> normalise(np.array([0, 51, 255], np.uint8), mean=0.5, std=0.5).tolist()
    [-1.0, -0.6000000238418579, 1.0]
    """
    if values.dtype != np.uint8:
        raise ValueError(f"values are {values.dtype}: give bytes, uint8 of 0 to 255")
    scaled = values.astype(dtype) / np.asarray(255, dtype)
    return (scaled - np.asarray(mean, dtype)) / np.asarray(std, dtype)


def has_numbers(source: Any) -> bool:
    """Return whether the source's examples can be read by their numbers, and not only one after the other."""
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _length(source: Any) -> int:
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(source):
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            raise _no_arrays(leaf, path)
        lengths[_name(path)] = len(leaf)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} at {name}" for name, length in lengths.items())
        raise ValueError(f"the source's arrays differ in length: {listed}; give a row of each for every example")
    return next(iter(lengths.values()), 0)


def _no_arrays(leaf: Value, path: Any = ()) -> ValueError:
    is_stream = not path and (callable(leaf) or hasattr(leaf, "__iter__")) and not isinstance(leaf, str | bytes)
    mend = f"say {_ITEMS}, or {_MEND}" if is_stream else _MEND
    return ValueError(f"{_name(path)} is of type {type(leaf).__name__}: {mend}")


def _name(path: Any) -> str:
    return f"source{jax.tree_util.keystr(path)}"
