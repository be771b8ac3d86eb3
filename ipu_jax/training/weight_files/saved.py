"""Define how a leaf is made from saved arrays: by names, and by changes that are checked before anything is read.

Saved("fc.weight").transpose()                                  torch's Linear: (out, in) -> (in, out)
Saved("conv.weight").transpose(2, 3, 1, 0)                      torch's Conv2d: OIHW -> HWIO
Saved("attention.in_proj_weight").part(0, of=3).transpose()     the queries of a joint projection
Saved("q.weight", "k.weight", "v.weight").join(0).transpose()   a joint projection of three
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Dtype, Value
from ipu_jax.base.checks import as_int
from ipu_jax.training.weight_files._tensors import TensorInfo

Shapes = list[TensorInfo | None]  # None: the result of a function is known only after it has run
Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Change:
    """One change: its text, and how it changes shapes and arrays."""

    text: str
    shapes: Callable[[Shapes], Shapes]
    arrays: Callable[[Arrays], Arrays]


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
        return self._each(
            f"transpose({', '.join(map(str, order))})",
            lambda info: TensorInfo(tuple(info.shape[d] for d in _permutation(order, info)), info.dtype),
            lambda array: array.transpose(order or None),
        )

    def reshape(self, *shape: int) -> "Saved":
        """Give the elements another shape, in C order; one size may be -1."""
        sizes = _ints("reshape", shape)
        return self._each(
            f"reshape({', '.join(map(str, sizes))})",
            lambda info: TensorInfo(_reshaped(info, sizes), info.dtype),
            lambda array: array.reshape(sizes),
        )

    def part(self, number: int, *, of: int | Sequence[int], dim: int = 0) -> "Saved":
        """Take one of the parts into which a dim is split.

        Args:
            number: the number of the part, from 0.
            of: the number of parts of equal size, or the sizes of all parts.
            dim: the dim that is split.
        """
        (index, along) = _ints("part", (number, dim))
        sizes = as_int(of) or _ints("part", of if isinstance(of, Sequence) else (of,))
        described = f"part({index}, of={sizes if isinstance(sizes, int) else list(sizes)}, dim={along})"

        def rows(info: TensorInfo) -> slice:
            size = info.shape[_dim(along, info)]
            parts = [size // sizes] * sizes if isinstance(sizes, int) else list(sizes)
            if sum(parts) != size or not 0 <= index < len(parts):
                raise ValueError(f"dim {along} of {info} has no part {index} of {sizes}")
            return slice(sum(parts[:index]), sum(parts[: index + 1]))

        def cut(array: np.ndarray) -> np.ndarray:
            info = _info_of(array)
            return array[(slice(None),) * _dim(along, info) + (rows(info),)]

        def shape(info: TensorInfo) -> TensorInfo:
            found = rows(info)
            return _with_size(info, _dim(along, info), found.stop - found.start)

        return self._each(described, shape, cut)

    def join(self, dim: int) -> "Saved":
        """Concatenate the arrays along a dim, like `numpy.concatenate`."""
        (along,) = _ints("join", (dim,))

        def joined(infos: list[TensorInfo]) -> TensorInfo:
            d = _dim(along, infos[0])
            if len({(info.dtype, info.shape[:d], info.shape[d + 1 :]) for info in infos}) > 1:
                raise ValueError(f"{', '.join(map(str, infos))} cannot be joined along dim {along}")
            return _with_size(infos[0], d, sum(info.shape[d] for info in infos))

        return self._all(f"join({along})", joined, lambda arrays: np.concatenate(arrays, along))

    def stack(self, dim: int = 0) -> "Saved":
        """Stack the arrays along a new dim, like `numpy.stack`: for example layers that a scan goes over."""
        (along,) = _ints("stack", (dim,))

        def stacked(infos: list[TensorInfo]) -> TensorInfo:
            shape = infos[0].shape
            if len(set(infos)) > 1 or not -len(shape) - 1 <= along <= len(shape):
                raise ValueError(f"{', '.join(map(str, infos))} cannot be stacked along dim {along}")
            d = along % (len(shape) + 1)
            return TensorInfo((*shape[:d], len(infos), *shape[d:]), infos[0].dtype)

        return self._all(f"stack({along})", stacked, lambda arrays: np.stack(arrays, along))

    def astype(self, dtype: Dtype) -> "Saved":
        """Convert to a dtype, also to a dtype that holds fewer values. Numbers are rounded with `rounded`."""
        try:
            target = jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype={dtype!r} is not a dtype: give one such as 'float32'") from None
        return self._each(
            f"astype({target.name!r})",
            lambda info: TensorInfo(info.shape, target),
            lambda array: rounded(array, target),
        )

    def apply(self, function: Callable[[np.ndarray], np.ndarray]) -> "Saved":
        """Apply a function of a NumPy array. Its result is checked only after it has run."""
        return self._with(
            Change(
                f"apply({getattr(function, '__name__', repr(function))})",
                lambda infos: [None] * len(infos),
                lambda arrays: [np.asarray(function(array)) for array in arrays],
            )
        )

    def info(self, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
        """Return the result's shape and dtype, or None if a function makes it.

        Raises:
            ValueError: a change cannot be made, or several arrays remain; the message names the change.
        """
        infos: Shapes = [tensors[name] for name in self.names]
        for change in self._changes:
            try:
                infos = change.shapes(infos)
            except ValueError as error:
                raise ValueError(f"{change.text}: {error}") from None
        if len(infos) > 1:
            raise ValueError(f"{len(infos)} arrays remain: add .join(dim) or .stack(dim)")
        return infos[0]

    def array(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the result, made of the arrays that `read` returns."""
        arrays = [read(name) for name in self.names]
        for change in self._changes:
            arrays = change.arrays(arrays)
        (array,) = arrays
        return array

    def _with(self, change: Change) -> "Saved":
        extended = Saved(*self.names)
        extended._changes = (*self._changes, change)
        return extended

    def _each(
        self, text: str, shape: Callable[[TensorInfo], TensorInfo], cut: Callable[[np.ndarray], np.ndarray]
    ) -> "Saved":
        known = lambda infos: [None if info is None else shape(info) for info in infos]
        return self._with(Change(text, known, lambda arrays: [cut(array) for array in arrays]))

    def _all(
        self, text: str, shape: Callable[[list[TensorInfo]], TensorInfo], join: Callable[[Arrays], np.ndarray]
    ) -> "Saved":
        def known(infos: Shapes) -> Shapes:
            sure = [info for info in infos if info is not None]
            return [shape(sure)] if len(sure) == len(infos) else [None]

        return self._with(Change(text, known, lambda arrays: [join(arrays)]))


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
