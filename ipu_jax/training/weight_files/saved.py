"""Define how a leaf is made from saved arrays: by names, and by changes that are checked before anything is read.

Saved("fc.weight").transpose()                                  torch's Linear: (out, in) -> (in, out)
Saved("conv.weight").transpose(2, 3, 1, 0)                      torch's Conv2d: OIHW -> HWIO
Saved("attention.in_proj_weight").part(0, of=3).transpose()     the queries of a joint projection
Saved("q.weight", "k.weight", "v.weight").join(0).transpose()   a joint projection of three
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Dtype, Value
from ipu_jax.base.checks import as_int
from ipu_jax.core.layout.tree_parts import resized
from ipu_jax.core.mesh.instances import PiecedArray
from ipu_jax.training.weight_files._tensors import TensorInfo


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of arrays.

    Attributes:
        text: the call, for messages.
        make: makes the result of `(numpy, *arrays)`. It gets jax.numpy and traced arrays to find the result's shape.
        is_stack: whether this dim is a new one.
        dim: the dim along which it joins arrays; None for a change of each array.
        dtype: the dtype that it makes; None: the one that it gets.
        is_function: whether it is a user's function, whose result is known only after it has run.
    """

    text: str
    make: Callable[..., Any]
    dim: int | None = None
    is_stack: bool = False
    dtype: np.dtype | None = None
    is_function: bool = False

    def taken(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return the arrays, or their shapes, that are changed together."""
        return [[value] for value in values] if self.dim is None else [values]

    def joined(self, arrays: Sequence[np.ndarray]) -> PiecedArray:
        """Return the joined arrays, which fit: an array of which only the rows that an IPU needs are read."""
        dim = self.dim or 0
        arrays = [np.expand_dims(array, dim) for array in arrays] if self.is_stack else arrays
        dim, stop, pieces = dim % arrays[0].ndim, 0, []
        for array in arrays:
            start, stop = stop, stop + array.shape[dim]
            place = [slice(0, size) for size in array.shape]
            pieces.append(((*place[:dim], slice(start, stop), *place[dim + 1 :]), array.__getitem__))
        return PiecedArray(resized(arrays[0].shape, dim, stop), arrays[0].dtype, pieces)

    def info(self, *infos: TensorInfo) -> TensorInfo | None:
        """Return the shape and dtype of the result, None if they are not known, or raise `ValueError`."""
        if self.is_function or self.dtype is not None:
            return None if self.dtype is None else TensorInfo(infos[0].shape, self.dtype)
        shapes = [jax.ShapeDtypeStruct(info.shape, np.int8) for info in infos]
        try:
            made = jax.eval_shape(lambda *arrays: self.make(jnp, *arrays), *shapes)
            if len({info.dtype for info in infos}) > 1:
                raise ValueError("they have several dtypes: convert them first, by astype")
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{self.text}: {', '.join(map(str, infos))}: {error}") from None
        return TensorInfo(tuple(made.shape), infos[0].dtype)


class Saved:
    """Name the saved arrays that a leaf is made of, and the changes that make it.

    Each method returns a new `Saved` with one more change. Changes before `join` or `stack` apply to each array. A
    change is a view if possible, and so is a `join` or `stack` at the end, so that only the rows that an IPU needs are
    read from a file. Other joins, `astype` and `apply` read the arrays whole.

    Args:
        names: the names of arrays in the file. `join` or `stack` must make one array of several.

    Raises:
        ValueError: there is no name, or an argument of a change has the wrong type.

    >>> Saved("q.weight", "k.weight").transpose().join(1).astype("bfloat16")
    Saved('q.weight', 'k.weight').transpose().join(1).astype('bfloat16')
    """

    def __init__(self, *names: str):
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Saved{names!r} does not name arrays: give their names in the file, Saved('fc.weight')")
        self.names = names
        self._changes: tuple[Change, ...] = ()

    def __repr__(self) -> str:
        return f"Saved({', '.join(map(repr, self.names))})" + "".join(f".{change.text}" for change in self._changes)

    def transpose(self, *dims: int) -> "Saved":
        """Reorder the dims like `numpy.transpose`; without `dims`, reverse them."""
        order = _ints("transpose", dims)
        return self._with(f"transpose({', '.join(map(str, order))})", lambda _, array: array.transpose(*order))

    def reshape(self, *shape: int) -> "Saved":
        """Give the elements another shape, in C order; one size may be -1."""
        sizes = _ints("reshape", shape)
        return self._with(f"reshape({', '.join(map(str, sizes))})", lambda _, array: array.reshape(sizes))

    def part(self, number: int, *, of: int | Sequence[int], dim: int = 0) -> "Saved":
        """Take one of the parts into which a dim is split.

        Args:
            number: the number of the part, from 0.
            of: the number of parts of equal size, or the sizes of all parts.
            dim: the dim that is split.
        """
        (index, along) = _ints("part", (number, dim))
        sizes = as_int(of) or _ints("part", of if isinstance(of, Sequence) else (of,))

        def cut(_: Any, array: Any) -> Any:
            if not -array.ndim <= along < array.ndim:
                raise ValueError(f"there is no dim {along}")
            size = array.shape[along]
            parts = [size // sizes] * sizes if isinstance(sizes, int) else list(sizes)
            if sum(parts) != size or not 0 <= index < len(parts):
                raise ValueError(f"dim {along} has no part {index} of {sizes}")
            rows = slice(sum(parts[:index]), sum(parts[: index + 1]))
            return array[(slice(None),) * (along % array.ndim) + (rows,)]

        of_text = sizes if isinstance(sizes, int) else list(sizes)
        return self._with(f"part({index}, of={of_text}, dim={along})", cut)

    def join(self, dim: int) -> "Saved":
        """Concatenate the arrays along a dim, like `numpy.concatenate`."""
        (along,) = _ints("join", (dim,))
        return self._with(f"join({along})", lambda numpy, *arrays: numpy.concatenate(arrays, along), dim=along)

    def stack(self, dim: int = 0) -> "Saved":
        """Stack the arrays along a new dim, like `numpy.stack`: for example layers that a scan goes over."""
        (along,) = _ints("stack", (dim,))
        make = lambda numpy, *arrays: numpy.stack(arrays, along)
        return self._with(f"stack({along})", make, dim=along, is_stack=True)

    def astype(self, dtype: Dtype) -> "Saved":
        """Convert to a dtype, also to a dtype that holds fewer values. Numbers are rounded with `rounded`."""
        try:
            target = jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype={dtype!r} is not a dtype: give one such as 'float32'") from None
        return self._with(f"astype({target.name!r})", lambda _, array: rounded(array, target), dtype=target)

    def apply(self, function: Callable[[np.ndarray], np.ndarray]) -> "Saved":
        """Apply a function of a NumPy array. Its result is checked only after it has run."""
        text = f"apply({getattr(function, '__name__', repr(function))})"
        return self._with(text, lambda _, array: np.asarray(function(array)), is_function=True)

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
        """Return the result's shape and dtype, or None if a function makes it.

        Raises:
            ValueError: a change cannot be made, or several arrays remain; the message names the change.
        """
        infos: list[TensorInfo | None] = [tensors[name] for name in self.names]
        for change in self._changes:
            infos = [None if None in taken else change.info(*taken) for taken in change.taken(infos)]
        if len(infos) > 1:
            raise ValueError(f"{len(infos)} arrays remain: add .join(dim) or .stack(dim)")
        return infos[0]

    def array(self, read: Callable[[str], np.ndarray]) -> np.ndarray | PiecedArray:
        """Return the result, made of the arrays that `read` returns. `info` was asked before."""
        arrays = [read(name) for name in self.names]
        is_known = not any(change.is_function for change in self._changes)
        for change in self._changes:
            if is_known and change.dim is not None and change is self._changes[-1]:
                return change.joined(arrays)
            arrays = [change.make(np, *taken) for taken in change.taken(arrays)]
        (array,) = arrays
        return array

    def _with(self, text: str, make: Callable[..., Any], **kind: Any) -> "Saved":
        extended = Saved(*self.names)
        extended._changes = (*self._changes, Change(text, make, **kind))
        return extended


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in another dtype, with each number rounded to the nearest.

    Raises:
        ValueError: an integer dtype does not hold the numbers exactly, or a finite number would become infinite.

    >>> rounded(np.array([1.0, 300.0]), np.dtype("uint8"))
    Traceback (most recent call last):
    ...
    ValueError: float64[2] has numbers that uint8 does not hold: choose a dtype that does
    """
    with np.errstate(over="ignore", invalid="ignore"):  # both are checked below
        found = array.astype(dtype)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    lost = np.isfinite(array) & ~np.isfinite(found) if is_float else found != array
    if np.any(lost):
        raise ValueError(
            f"{TensorInfo(array.shape, array.dtype)} has numbers that {dtype} does not hold: choose a dtype that does"
        )
    return found


def _ints(method: str, values: Sequence[Value]) -> tuple[int, ...]:
    found = tuple(map(as_int, values))
    if None in found:
        raise ValueError(f"{method}{tuple(values)!r} has an entry that is not an int: give ints")
    return tuple(value for value in found if value is not None)
