"""Name parts of a tree's leaves, and put parts in a tree.

    params = {"layers": W}      W[0:4] is Part(0, (0, 4))      {"layers": Rows([W[0:4], W[4:8], W[8:10]])}

Rows are along the axis on which a leaf is stacked: of a leaf whose layers are stacked along axis 1, they are W[:, 0:4].
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Tree, Value


@dataclasses.dataclass(frozen=True)
class Part:
    """A leaf of the tree, or rows of it along `axis`, from `rows[0]` up to `rows[1]`.

    `leaf` is its number in the order of `jax.tree.leaves`.
    """

    leaf: int
    rows: tuple[int, int] | None = None
    axis: int = 0

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index of this part in the leaf.

        >>> Part(0, (2, 5), axis=1).index
        (slice(None, None, None), slice(2, 5, None))
        """
        return () if self.rows is None else along(self.axis, *self.rows)

    def part(self, start: int, stop: int, axis: int | None = None) -> "Part":
        """Return rows of this part, which are counted from its own first row. Without `axis` they are along its own.

        >>> Part(0, (4, 8), axis=1).part(1, 3)
        Part(leaf=0, rows=(5, 7), axis=1)
        """
        axis = self.axis if axis is None else axis
        assert self.rows is None or axis == self.axis, f"{self} has no rows along axis {axis}"
        first = 0 if self.rows is None else self.rows[0]
        return Part(self.leaf, (first + start, first + stop), axis)

    def holds(self, other: "Part") -> bool:
        """Return whether another part is in this one.

        >>> rows = Part(0, (4, 8))
        >>> rows.holds(Part(0, (5, 6))), rows.holds(Part(0, (5, 6), axis=1)), rows.holds(Part(0))
        (True, False, False)
        """
        if self.leaf != other.leaf or self.rows is None or other.rows is None:
            return self.leaf == other.leaf and self.rows is None
        return self.axis == other.axis and self.rows[0] <= other.rows[0] and other.rows[1] <= self.rows[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The parts of one leaf along an axis, first rows first, where a tree of the user has the leaf. A pytree."""

    parts: list[Value]
    axis: int = dataclasses.field(default=0, metadata={"static": True})


def joined(tree: Tree) -> Tree:
    """Return the tree with one array in place of each `Rows`."""

    def whole(node: Tree) -> Value:
        return jnp.concatenate([*map(jnp.asarray, node.parts)], node.axis) if isinstance(node, Rows) else node

    return jax.tree.map(whole, tree, is_leaf=is_rows)


def divided(tree: Tree, like: Tree) -> Tree:
    """Return the tree with `Rows` wherever `like` has them: the inverse of `joined`.

    >>> [part.tolist() for part in divided(np.arange(6).reshape(2, 3), Rows([np.zeros((2, 1))] * 3, axis=1)).parts]
    [[[0], [3]], [[1], [4]], [[2], [5]]]
    """

    def parts(node: Tree, leaf: Value) -> Tree:
        if not isinstance(node, Rows):
            return leaf
        ends = itertools.accumulate((np.shape(part)[node.axis] for part in node.parts), initial=0)
        return Rows([leaf[along(node.axis, *of_part)] for of_part in itertools.pairwise(ends)], node.axis)

    return jax.tree.map(parts, like, tree, is_leaf=is_rows)


def along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the index of rows along an axis."""
    return (*[slice(None)] * axis, slice(start, stop))


def resized(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """Return a shape with another size along an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def leaves_at(tree: Tree, paths: Sequence[Any]) -> list[Value]:
    """Return the leaves at these paths, whatever order the tree's own nodes have.

    >>> import collections
    >>> ordered = collections.OrderedDict(y=1, x=2)
    >>> leaves_at(ordered, [path for path, _ in jax.tree.leaves_with_path({"x": 0, "y": 0})])
    [2, 1]
    """
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    return [found[jax.tree_util.keystr(path)] for path in paths]


def is_rows(node: Tree) -> bool:
    """Return whether a node is `Rows`; for `jax.tree.map(..., is_leaf=is_rows)`."""
    return isinstance(node, Rows)


def spread(what: str, prefix: Tree, treedef: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Tree]:
    """Return, per leaf of a group's tree, the leaf of `prefix` above it.

    Args:
        what: the name of `prefix` in error messages.
        prefix: a tree with the same kinds of nodes, or with dicts, lists and tuples of the same names: a plain dict
            fits an `nnx.State`, and can name the fields of an Equinox module.
        treedef: the group's tree.
        is_leaf: as `jax.tree.leaves` takes it, for `prefix`.

    Raises:
        ValueError: no leaf of `prefix` is above a leaf, or `prefix` names something that is not in the tree.
    """
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_leaf), is_leaf=is_leaf)
    except ValueError:
        pass  # other kinds of nodes
    of_names = {_names(path): leaf for path, leaf in jax.tree.leaves_with_path(prefix, is_leaf=is_leaf)}
    leaves = [_names(path) for path, _ in jax.tree.leaves_with_path(tree)]
    above = [next((names[:k] for k in range(len(names) + 1) if names[:k] in of_names), None) for names in leaves]
    unknown = ["/".join(names) for names in of_names.keys() - {*above}]
    wrong = [f"it names {name}, which is not there" for name in sorted(unknown)[:1]]
    if None in above:
        without = "/".join(leaves[above.index(None)])
        wrong.append(f"it says nothing for {without}: name all leaves, or a node above them")
    if wrong:
        raise ValueError(f"{what} does not fit the tree: {'; '.join(wrong)}")
    return [of_names[names] for names in above if names is not None]


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
