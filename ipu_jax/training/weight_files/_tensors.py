"""Describe arrays in files, return their bytes in pieces, and name the leaves of trees.

A name is the keys that lead to a leaf, with "/" between them:

{"blocks": [{"attention": {"w": w}}]}      "blocks/0/attention/w"
"""

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.base.checks import shown
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import Leaf

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


def not_ignored(names: Iterable[str], ignore: Iterable[str]) -> list[str]:
    """Return the names that match none of these patterns of `fnmatch`, or of this one.

    >>> not_ignored(["base/w", "lora/a"], "base/*")
    ['lora/a']
    """
    patterns = [ignore] if isinstance(ignore, str) else list(ignore)
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


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


def named_leaves(tree: Tree) -> list[tuple[str, Value]]:
    """Return the (name, leaf) pairs of a pytree, in the order of `jax.tree.leaves`.

    Keys are escaped as in a JSON pointer: "~1" stands for "/", and "~0" for "~". None is not a leaf.
    The name of a tree that is itself a leaf is "". Source: RFC 6901, section 3.

    Raises:
        ValueError: two leaves have the same name.

    >>> [name for name, _ in named_leaves({"a/b": [1.0, None], "layers": ({"w": 2.0},)})]
    ['a~1b/0', 'layers/0/w']
    """
    named = [(_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
    _check_different([name for name, _ in named])
    return named


def names_in(layout: PackedLayout) -> list[tuple[str, Leaf]]:
    """Return the name of each leaf of a layout and the leaf, group by group. The parts of one leaf have its name.

    Raises:
        ValueError: two leaves have the same name.
    """
    names = [name for name, _ in named_leaves(jax.tree.unflatten(layout.treedef, layout.paths))]
    return [(names[leaf.part.leaf], leaf) for leaf in layout.leaves]


def _name(path: tuple[Any, ...]) -> str:
    keys = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)


def _check_different(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two leaves have the name {name!r}: rename a key, so that each has a name of its own")
        seen.add(name)
