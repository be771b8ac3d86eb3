"""Define how a leaf is made from saved arrays: by names, and by changes that are checked before anything is read.

Saved("fc.weight").transpose()                                  torch's Linear: (out, in) -> (in, out)
Saved("conv.weight").transpose(2, 3, 1, 0)                      torch's Conv2d: OIHW -> HWIO
Saved("attention.in_proj_weight").part(0, of=3).transpose()     the queries of a joint projection
Saved("q.weight", "k.weight", "v.weight").join(0).transpose()   a joint projection of three
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Dtype, Value
from ipu_jax.base.checks import as_int
from ipu_jax.training.weight_files._tensors import TensorInfo

Made = tuple[TensorInfo | None, Callable[..., np.ndarray]]  # None: a function's result, known only after it has run


@dataclasses.dataclass(frozen=True)
class Change:
    """One change: its text, what it makes of shapes and dtypes, and how; and whether it makes one array of all."""

    text: str
    make: Callable[..., Made]
    joins: bool = False

    def taken(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return the arrays, or their shapes, that are changed together."""
        return [values] if self.joins else [[value] for value in values]


class Saved:
    """Name the saved arrays that a leaf is made of, and the changes that make it.

    Each method returns a new `Saved` with one more change. Changes before `join` or `stack` apply to each array. A
    change is a view if possible, so that only the rows that an IPU needs are read from a file.

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

        def transposed(info: TensorInfo) -> Made:
            found = _permutation(order, info)
            return TensorInfo(tuple(info.shape[d] for d in found), info.dtype), lambda array: array.transpose(found)

        return self._with(f"transpose({', '.join(map(str, order))})", transposed)

    def reshape(self, *shape: int) -> "Saved":
        """Give the elements another shape, in C order; one size may be -1."""
        sizes = _ints("reshape", shape)
        reshaped = lambda info: (TensorInfo(_reshaped(info, sizes), info.dtype), lambda array: array.reshape(sizes))
        return self._with(f"reshape({', '.join(map(str, sizes))})", reshaped)

    def part(self, number: int, *, of: int | Sequence[int], dim: int = 0) -> "Saved":
        """Take one of the parts into which a dim is split.

        Args:
            number: the number of the part, from 0.
            of: the number of parts of equal size, or the sizes of all parts.
            dim: the dim that is split.
        """
        (index, along) = _ints("part", (number, dim))
        sizes = as_int(of) or _ints("part", of if isinstance(of, Sequence) else (of,))

        def cut(info: TensorInfo) -> Made:
            d = _dim(along, info)
            parts = [info.shape[d] // sizes] * sizes if isinstance(sizes, int) else list(sizes)
            if sum(parts) != info.shape[d] or not 0 <= index < len(parts):
                raise ValueError(f"dim {along} of {info} has no part {index} of {sizes}")
            rows = slice(sum(parts[:index]), sum(parts[: index + 1]))
            return _with_size(info, d, rows.stop - rows.start), lambda array: array[(slice(None),) * d + (rows,)]

        of_text = sizes if isinstance(sizes, int) else list(sizes)
        return self._with(f"part({index}, of={of_text}, dim={along})", cut)

    def join(self, dim: int) -> "Saved":
        """Concatenate the arrays along a dim, like `numpy.concatenate`."""
        (along,) = _ints("join", (dim,))

        def joined(*infos: TensorInfo) -> Made:
            d = _dim(along, infos[0])
            if len({(info.dtype, info.shape[:d], info.shape[d + 1 :]) for info in infos}) > 1:
                raise ValueError(f"{', '.join(map(str, infos))} cannot be joined along dim {along}")
            size = sum(info.shape[d] for info in infos)
            return _with_size(infos[0], d, size), lambda *arrays: np.concatenate(arrays, along)

        return self._with(f"join({along})", joined, joins=True)

    def stack(self, dim: int = 0) -> "Saved":
        """Stack the arrays along a new dim, like `numpy.stack`: for example layers that a scan goes over."""
        (along,) = _ints("stack", (dim,))

        def stacked(*infos: TensorInfo) -> Made:
            shape = infos[0].shape
            if len(set(infos)) > 1 or not -len(shape) - 1 <= along <= len(shape):
                raise ValueError(f"{', '.join(map(str, infos))} cannot be stacked along dim {along}")
            d = along % (len(shape) + 1)
            info = TensorInfo((*shape[:d], len(infos), *shape[d:]), infos[0].dtype)
            return info, lambda *arrays: np.stack(arrays, along)

        return self._with(f"stack({along})", stacked, joins=True)

    def astype(self, dtype: Dtype) -> "Saved":
        """Convert to a dtype, also to a dtype that holds fewer values. Numbers are rounded with `rounded`."""
        try:
            target = jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype={dtype!r} is not a dtype: give one such as 'float32'") from None
        converted = lambda info: (TensorInfo(info.shape, target), lambda array: rounded(array, target))
        return self._with(f"astype({target.name!r})", converted)

    def apply(self, function: Callable[[np.ndarray], np.ndarray]) -> "Saved":
        """Apply a function of a NumPy array. Its result is checked only after it has run."""
        applied = lambda info: (None, lambda array: np.asarray(function(array)))
        return self._with(f"apply({getattr(function, '__name__', repr(function))})", applied)

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
        """Return the result's shape and dtype, or None if a function makes it.

        Raises:
            ValueError: a change cannot be made, or several arrays remain; the message names the change.
        """
        infos: list[TensorInfo | None] = [tensors[name] for name in self.names]
        for change in self._changes:
            try:
                infos = [None if None in taken else change.make(*taken)[0] for taken in change.taken(infos)]
            except ValueError as error:
                raise ValueError(f"{change.text}: {error}") from None
        if len(infos) > 1:
            raise ValueError(f"{len(infos)} arrays remain: add .join(dim) or .stack(dim)")
        return infos[0]

    def array(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the result, made of the arrays that `read` returns."""
        arrays = [read(name) for name in self.names]
        for change in self._changes:
            arrays = [change.make(*_infos_of(taken))[1](*taken) for taken in change.taken(arrays)]
        (array,) = arrays
        return array

    def _with(self, text: str, make: Callable[..., Made], *, joins: bool = False) -> "Saved":
        extended = Saved(*self.names)
        extended._changes = (*self._changes, Change(text, make, joins))
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
        raise ValueError(f"{_info_of(array)} has numbers that {dtype} does not hold: choose a dtype that does")
    return found


def _ints(method: str, values: Sequence[Value]) -> tuple[int, ...]:
    found = tuple(map(as_int, values))
    if None in found:
        raise ValueError(f"{method}{tuple(values)!r} has an entry that is not an int: give ints")
    return tuple(value for value in found if value is not None)


def _info_of(array: np.ndarray) -> TensorInfo:
    return TensorInfo(array.shape, array.dtype)


def _infos_of(arrays: Sequence[np.ndarray]) -> list[TensorInfo]:
    """Return the shapes of arrays, each with the dtype of all: a function's results are joined as NumPy joins them."""
    dtype = np.result_type(*(array.dtype for array in arrays))
    return [TensorInfo(array.shape, dtype) for array in arrays]


def _dim(dim: int, info: TensorInfo) -> int:
    if not -len(info.shape) <= dim < len(info.shape):
        raise ValueError(f"{info} has no dim {dim}")
    return dim % len(info.shape)


def _permutation(order: tuple[int, ...], info: TensorInfo) -> tuple[int, ...]:
    dims = tuple(_dim(d, info) for d in order) if order else tuple(reversed(range(len(info.shape))))
    if sorted(dims) != list(range(len(info.shape))):
        raise ValueError(f"{info} has {len(info.shape)} dims: name each of them once")
    return dims


def _reshaped(info: TensorInfo, sizes: tuple[int, ...]) -> tuple[int, ...]:
    size, known = math.prod(info.shape), math.prod(s for s in sizes if s != -1)
    if sizes.count(-1) == 1 and known > 0 and size % known == 0:
        return tuple(size // known if s == -1 else s for s in sizes)
    if min(sizes, default=0) < 0 or known != size:
        raise ValueError(f"{info} has {size} elements")
    return sizes


def _with_size(info: TensorInfo, dim: int, size: int) -> TensorInfo:
    return TensorInfo((*info.shape[:dim], size, *info.shape[dim + 1 :]), info.dtype)
