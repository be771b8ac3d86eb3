"""Say which part of a user's own tree of weights each group holds, for a pipeline that was cut out of one function.

    params = {"embed": E, "layers": W}     "stage 0": [E, W[0:4]]   "stage 1": [W[4:8]]   "stage 2": [W[8:10]]

The user passes and gets the tree; the IPUs hold the groups. Rows are along the axis on which a leaf is stacked: of a
leaf whose layers are stacked along axis 1, stage 0 holds W[:, 0:4].
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Tree, Value

_NUMBERS: Final = (bool, int, float)
"""Python's numbers, which a cut function takes as `jax.grad` does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A leaf of the tree, or rows of it along `axis`, from `rows[0]` up to `rows[1]`.

    `leaf` is its number in the order of `jax.tree.leaves`.
    """

    leaf: int
    rows: tuple[int, int] | None = None
    axis: int = 0

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


class Within(NamedTuple):
    """Locate rows in a leaf: their first row, the number of rows of the leaf, and the axis.

    >>> rows = Within(2, 8, axis=1)
    >>> rows.whole_shape((5, 3)), rows.slices((5, 3))
    ((5, 8), (slice(None, None, None), slice(2, 5, None)))
    """

    first: int
    number: int
    axis: int = 0

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the leaf, of which rows have this shape."""
        return resized(shape, self.axis, self.number)

    def slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the index in the leaf of rows of this shape."""
        return along(self.axis, self.first, self.first + shape[self.axis])


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


@dataclasses.dataclass(frozen=True)
class WholeTree:
    """A user's tree, and the parts of it that groups hold.

    Attributes:
        what: the name of the tree in error messages, "params" or "state".
        treedef: its structure.
        paths: per leaf its path, such as "params['embed']".
        shapes, dtypes: per leaf its shape and dtype.
        groups: per group, the parts that it holds, in order.
    """

    what: str
    treedef: Any
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    groups: tuple[tuple[str, tuple[Part, ...]], ...]

    @classmethod
    def of(cls, what: str, tree: Tree, groups: Mapping[str, Sequence[Part]]) -> "WholeTree":
        """Return the description of a tree of arrays or of their shapes.

        >>> tree = {"w": np.array([[0, 1, 2], [3, 4, 5]])}
        >>> whole = WholeTree.of("params", tree, {"a": [Part(0, (1, 3), axis=1)], "b": [Part(0, (0, 1), axis=1)]})
        >>> groups = whole.split(tree)
        >>> groups["a"][0].tolist(), joined(whole.join(groups))["w"].tolist(), whole.named("a")
        ([[1, 2], [4, 5]], [[0, 1, 2], [3, 4, 5]], (["params['w']"], [Within(first=1, number=3, axis=1)]))
        """
        named, treedef = jax.tree.flatten_with_path(tree)
        paths = tuple(f"{what}{jax.tree_util.keystr(path)}" for path, _ in named)
        shapes = tuple(tuple(np.shape(leaf)) for _, leaf in named)
        dtypes = tuple(leaf.dtype for _, leaf in named)
        held: dict[int, set[Part]] = {}
        for part in itertools.chain(*groups.values()):
            held.setdefault(part.leaf, set()).add(part)
        for leaf, parts in held.items():  # `join` relies on it
            if parts != {Part(leaf)}:
                (axis, *others), rows = {part.axis for part in parts}, sorted(part.rows or (-1, -1) for part in parts)
                starts, stops = zip(*rows, strict=True)
                tiled = not others and (*starts, shapes[leaf][axis]) == (0, *stops)
                assert tiled, f"the parts of {paths[leaf]} are {sorted(map(str, parts))}"
        return cls(what, treedef, paths, shapes, dtypes, tuple((name, tuple(parts)) for name, parts in groups.items()))

    def split(self, tree: Tree) -> dict[str, list[Value]]:
        """Return each group's list of leaves.

        Raises:
            ValueError: the tree is not like the one for which the function was cut.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            found = {f"{self.what}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(tree)}
            missing, unknown = sorted(set(self.paths) - found), sorted(found - set(self.paths))
            nodes = f"its nodes are {treedef}, and were {self.treedef}"
            other = f"it has no {missing[0]}" if missing else f"it has {unknown[0]}" if unknown else f"{nodes:.400}"
            raise ValueError(
                f"{self.what} is not the tree for which the function was cut: {other}; give a tree like that one"
            )
        for path, shape, leaf in zip(self.paths, self.shapes, leaves, strict=True):
            if tuple(np.shape(leaf)) != shape:
                raise ValueError(
                    f"{path} has shape {tuple(np.shape(leaf))}, and the function was cut for {shape}: give that shape, "
                    "or cut the function for this one"
                )
        both = zip(leaves, self.dtypes, strict=True)
        leaves = [np.asarray(leaf, dtype) if isinstance(leaf, _NUMBERS) else leaf for leaf, dtype in both]
        return {name: [_part(leaves[part.leaf], part) for part in parts] for name, parts in self.groups}

    def join(self, groups: Mapping[str, Sequence[Value]]) -> Tree:
        """Return the tree whose parts the groups hold, with `Rows` where a leaf has several."""
        found: list[dict[Part, Value]] = [{} for _ in self.paths]  # copies of a leaf are alike
        for name, parts in self.groups:
            for part, value in zip(parts, groups[name], strict=True):
                found[part.leaf][part] = value

        def node(values: dict[Part, Value]) -> Tree:
            first, *others = sorted(values, key=lambda part: part.rows or ())
            return Rows([values[part] for part in (first, *others)], first.axis) if others else values[first]

        return jax.tree.unflatten(self.treedef, map(node, found))

    def named(self, group: str) -> tuple[list[str], list[Within | None]]:
        """Return, per part of a group, the path of its leaf; and where its rows are in the leaf, or None."""
        parts = dict(self.groups)[group]
        size = lambda part: self.shapes[part.leaf][part.axis]
        rows = [part.rows and Within(part.rows[0], size(part), part.axis) for part in parts]
        return [self.paths[part.leaf] for part in parts], rows

    def spread(self, what: str, prefix: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, list[Tree]]:
        """Return, per group and part, the leaf of `prefix` above it."""
        values = spread(what, prefix, self.treedef, is_leaf)
        return {name: [values[part.leaf] for part in parts] for name, parts in self.groups}


def _part(leaf: Value, part: Part) -> Value:
    if part.rows is None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(resized(leaf.shape, part.axis, part.rows[1] - part.rows[0]), leaf.dtype)
    return leaf[along(part.axis, *part.rows)]


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
