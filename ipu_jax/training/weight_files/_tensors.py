"""Describe arrays in files, and return their bytes in pieces."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from ipu_jax.base.checks import shown

_PIECE = 1 << 22  # bytes: enough for a disk's full speed, and little compared to a leaf


class TensorInfo(NamedTuple):
    """The shape and dtype of an array. The dtype is a text if NumPy has no such dtype, or it is unknown."""

    shape: tuple[int, ...]
    dtype: np.dtype | str

    def __str__(self) -> str:
        return f"{self.dtype!s:.60}[{', '.join(map(str, self.shape))}]"


class WeightSource(Protocol):
    """A set of named arrays that are read one by one.

    Attributes:
        label: its name in error messages.
        tensors: per name, shape and dtype.
    """

    label: str

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray:
        """Return an array that must not be written to. If the source can, it reads only the parts that are used."""
        ...


class BadFileError(ValueError):
    """A file violates its format, or differs from what was written; the message names it."""


def quoted(name: str) -> str:
    """Return a name for a message; of a long one, which a damaged file may have, the beginning and the end.

    >>> quoted("fc.weight"), len(quoted("x" * 100_000))
    ("'fc.weight'", 115)
    """
    return repr(shown(name, 120))


def byte_pieces(array: np.ndarray) -> Iterator[memoryview]:
    """Return an iterator over the bytes of an array in C order, in pieces of a few megabytes.

    A contiguous array is not copied, another array is copied one piece at a time.

    >>> [piece.tolist() for piece in byte_pieces(np.array([[1, 2], [3, 4]], np.uint8).T)]
    [[1, 3, 2, 4]]
    """
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        yield from (flat[start : start + _PIECE].data for start in range(0, flat.size, _PIECE))
    elif array.nbytes <= _PIECE:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    elif array.nbytes // len(array) > _PIECE:
        for row in array:
            yield from byte_pieces(row)
    else:
        rows = _PIECE // (array.nbytes // len(array))
        for start in range(0, len(array), rows):
            yield from byte_pieces(array[start : start + rows])


@contextlib.contextmanager
def naming(label: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a library that reads a damaged file into a `BadFileError` that names the file."""
    try:
        yield
    except BadFileError:
        raise
    except errors as error:
        reason = f"{error}".rstrip(".") or type(error).__name__
        raise BadFileError(f"{label} is damaged: {reason}. Export or download it again") from error
