"""Say where the leaves of a tree are on the IPUs, as plain values.

    params                        groups                      leaves               arrays
    {"layers": W, "table": T}     "stage 0": [W[0:4]]         W[0:4] on IPU 0      0, a slot: W[0:4] | W[4:8]
                                  "stage 1": [W[4:8]]         W[4:8] on IPU 1
                                  "shared": [T]               T on every IPU       1: T

A stage reads groups. A group has leaves: leaves of the user's tree, or rows of them. Each leaf is in one array: in a
*slot*, where it is in its IPU's row, beside other leaves in theirs; or it is an array itself, whole on every IPU, or
split over them. The arrays are all that the IPUs hold of weights, gradients or state.

The tree of stages written by hand is `{group: pytree}`. A function that was cut has a tree of its own. Its layout has
no arrays before it is placed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Params, Tree, Value
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.layout.leaf import Leaf, PackedArray, check_array, check_weight
from ipu_jax.core.layout.tree_parts import Part, Rows, resized, spread
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS

_NUMBERS: Final = (bool, int, float)
"""Python's numbers, which a cut function takes as `jax.grad` does."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The leaves that a stage gets together, as a tree of this structure."""

    name: str
    treedef: Any
    leaves: tuple[Leaf, ...]

    def tree_of(self, value_of: Callable[[Leaf], Value]) -> Tree:
        """Return the tree with a value per leaf."""
        return jax.tree.unflatten(self.treedef, map(value_of, self.leaves))


@dataclasses.dataclass(frozen=True, repr=False)
class PackedLayout(Shown):
    """Say where every leaf of a tree is. It is hashable, and the static part of a `Sharded`.

    Attributes:
        ipus: the number of IPUs of a replica; 0 before it is placed.
        groups: the groups, in the order in which stages read them.
        treedef: the structure of the user's tree.
        arrays: slots first, then the arrays of single leaves, group after group by name; none before it is placed.
        what: the name of the tree in error messages, "params" or "state".

    >>> tree = {"w": np.array([[0, 1, 2], [3, 4, 5]])}
    >>> layout = PackedLayout.of("params", tree, {"a": [Part(0, (1, 3), axis=1)], "b": [Part(0, (0, 1), axis=1)]})
    >>> layout.split(tree)["a"][0].tolist(), layout.tree_of(lambda leaf: leaf.shape)["w"].parts
    ([[1, 2], [4, 5]], [(2, 1), (2, 2)])
    """

    ipus: int = 0
    groups: tuple[Group, ...] = ()
    treedef: Any = dataclasses.field(default_factory=lambda: jax.tree.structure({}))
    arrays: tuple[PackedArray, ...] = ()
    what: str = "params"

    @classmethod
    def of(
        cls, what: str, tree: Tree, groups: Mapping[str, Tree], split: Mapping[Part, int] | None = None
    ) -> "PackedLayout":
        """Return the layout of a tree before it is placed.

        Args:
            what: the name of the tree.
            tree: the user's tree of arrays or shapes.
            groups: per group, a tree of the parts that it holds. Rows of a leaf are all along one axis, and all of it.
            split: the parts that are split over the IPUs, and the dim of each.

        Raises:
            ValueError: a leaf is not an array.
        """
        named, treedef = jax.tree.flatten_with_path(tree)
        paths = [f"{what}{jax.tree_util.keystr(path)}" for path, _ in named]
        dtypes = [held_dtype(path, leaf) for path, (_, leaf) in zip(paths, named, strict=True)]

        def leaf_of(part: Part) -> Leaf:
            shape, size_of_rows = tuple(named[part.leaf][1].shape), None
            if part.rows is not None:
                size_of_rows = shape[part.axis]
                shape = resized(shape, part.axis, part.rows[1] - part.rows[0])
            return Leaf(paths[part.leaf], shape, dtypes[part.leaf], part, size_of_rows, split=(split or {}).get(part))

        flat = ((name, *jax.tree.flatten(parts)) for name, parts in groups.items())
        held = tuple(Group(name, of, tuple(map(leaf_of, parts))) for name, parts, of in flat)
        return cls(groups=held, treedef=treedef, what=what)

    @classmethod
    def by_group(cls, what: str, tree: Mapping[str, Params], names: Sequence[str]) -> "PackedLayout":
        """Return the layout of `{group: pytree}` with exactly these groups, before it is placed.

        Raises:
            ValueError: it is not a mapping, groups are missing or unknown, or a leaf is not an array.
        """
        if not isinstance(tree, Mapping):
            raise ValueError(f"{what} is a {type(tree).__name__}: give a dict of whole arrays for groups {[*names]}")
        both = {"missing": sorted({*names} - tree.keys()), "unknown": sorted(tree.keys() - {*names})}
        if any(both.values()):
            wrong = "; ".join(f"{word} {', '.join(map(repr, found))}" for word, found in both.items() if found)
            raise ValueError(f"{what}: {wrong}. The stages name the groups {', '.join(map(repr, sorted(names)))}")
        plain = {name: tree[name] for name in names}
        treedef = jax.tree.structure(plain)
        parts = jax.tree.unflatten(treedef, map(Part, range(treedef.num_leaves)))
        return cls.of(what, plain, {name: parts[name] for name in names})

    @classmethod
    def of_one_ipu(cls, what: str, tree: Tree) -> "PackedLayout":
        """Return the layout of a plain tree, whose leaves are arrays themselves, whole on one IPU."""
        treedef = jax.tree.structure(tree)
        parts = jax.tree.unflatten(treedef, map(Part, range(treedef.num_leaves)))
        layout = cls.of(what, tree, {what: parts}).changed(lambda leaf: dataclasses.replace(leaf, array=leaf.part.leaf))
        of_leaves = enumerate(layout.leaves)
        arrays = tuple(PackedArray(leaf.shape, leaf.dtype, is_slot=False, name=f"{k}") for k, leaf in of_leaves)
        return dataclasses.replace(layout, ipus=1, arrays=arrays)

    def like(self, tree: Tree) -> "PackedLayout":
        """Return this layout with the dtypes of a tree of the same structure and shapes.

        Raises:
            ValueError: as in `leaves_of`, or a leaf is not an array.
        """
        found = self.leaves_of(tree)
        dtypes = [held_dtype(path, leaf) for path, leaf in zip(self.paths, found, strict=True)]
        return self.changed(lambda leaf: dataclasses.replace(leaf, dtype=dtypes[leaf.part.leaf]))

    def changed(self, change: Callable[[Leaf], Leaf]) -> "PackedLayout":
        """Return the layout with other leaves, or this one if they are equal."""
        groups = tuple(dataclasses.replace(g, leaves=tuple(map(change, g.leaves))) for g in self.groups)
        return self if groups == self.groups else dataclasses.replace(self, groups=groups)

    # what is where

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return all leaves, group after group."""
        return tuple(itertools.chain.from_iterable(group.leaves for group in self.groups))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.ipus, self.groups, self.treedef, self.arrays, self.what))

    def __hash__(self) -> int:
        return self._hash  # each call of a jitted program asks for it

    @functools.cached_property
    def _by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    def group(self, name: str) -> Group:
        return self._by_name[name]

    @property
    def parts_of_groups(self) -> dict[str, list[Part]]:
        """Return, per group, which parts of the user's tree it holds."""
        return {group.name: [leaf.part for leaf in group.leaves] for group in self.groups}

    @functools.cached_property
    def parts(self) -> tuple[tuple[Leaf, ...], ...]:
        """Return, per leaf of the user's tree, its parts, first rows first. Of equal parts of groups it is the last."""
        found: list[dict[Any, Leaf]] = [{} for _ in range(self.treedef.num_leaves)]
        for leaf in self.leaves:
            found[leaf.part.leaf][leaf.part.rows or ()] = leaf
        return tuple(tuple(of[rows] for rows in sorted(of)) for of in found)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Return the path of each leaf of the user's tree."""
        return tuple(parts[0].path for parts in self.parts)

    @functools.cached_property
    def held_by_array(self) -> list[list[Leaf]]:
        """Return, per array, the leaves in it."""
        held: list[list[Leaf]] = [[] for _ in self.arrays]
        for leaf in self.leaves:
            if leaf.array >= 0:
                held[leaf.array].append(leaf)
        return held

    @functools.cached_property
    def frozen(self) -> list[bool]:
        """Return, per leaf of the user's tree, whether it gets no gradient."""
        return [all(leaf.frozen for leaf in parts) for parts in self.parts]

    @functools.cached_property
    def trained(self) -> tuple[Leaf, ...]:
        """Return the leaves that get a gradient, in the order of the user's tree."""
        return tuple(leaf for leaf in itertools.chain.from_iterable(self.parts) if not leaf.frozen)

    @functools.cached_property
    def trained_arrays(self) -> list[int]:
        """Return the numbers of the arrays that contain a leaf that gets a gradient: slots, then in order of groups."""
        trained = dict.fromkeys(leaf.array for leaf in self.leaves if not leaf.frozen)
        return sorted(trained, key=lambda k: (not self.arrays[k].is_slot, k * self.arrays[k].is_slot))

    def spec(self, leaf: Leaf) -> PartitionSpec:
        """Return how a leaf is split, over its IPUs and over further mesh axes."""
        return self.arrays[leaf.array].spec

    def owner(self, leaf: Leaf) -> int | None:
        """Return the IPU that has a leaf alone, or None."""
        array = self.arrays[leaf.array] if self.arrays else None
        return leaf.ipu if array is None or array.is_slot or IPU_AXIS in array.spec else None

    @functools.cached_property
    def is_by_group(self) -> bool:
        """Return whether the user's tree is `{group: pytree}`."""
        return self.treedef == jax.tree.structure({group.name: group.tree_of(lambda _: 0) for group in self.groups})

    # from and to the user's tree

    def leaves_of(self, tree: Tree) -> list[Value]:
        """Return the leaves of the user's tree, whole.

        Raises:
            ValueError: the tree has another structure or other shapes.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef and self.is_by_group and isinstance(tree, Mapping):
            leaves, treedef = jax.tree.flatten({**tree})
        if treedef != self.treedef:
            found = {f"{self.what}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(tree)}
            missing, unknown = sorted({*self.paths} - found), sorted(found - {*self.paths})
            nodes = f"its nodes are {treedef}, and were {self.treedef}"
            other = f"it has no {missing[0]}" if missing else f"it has {unknown[0]}" if unknown else f"{nodes:.400}"
            raise ValueError(
                f"{self.what} is not the tree for which the function was cut: {other}; give a tree like that one"
            )
        for (leaf, *_), value in zip(self.parts, leaves, strict=True):
            if tuple(np.shape(value)) != leaf.whole_shape:
                raise ValueError(
                    f"{leaf.path} has shape {tuple(np.shape(value))}, and the function was cut for {leaf.whole_shape}: "
                    "give that shape, or cut the function for this one"
                )
        both = zip(self.parts, leaves, strict=True)
        return [np.asarray(v, leaf.dtype) if isinstance(v, _NUMBERS) else v for (leaf, *_), v in both]

    def split(self, tree: Tree) -> dict[str, Tree]:
        """Return each group's tree, from the user's tree of whole arrays or shapes; it raises as `leaves_of` does."""
        leaves = self.leaves_of(tree)
        value_of = lambda leaf: leaf.of_whole(leaves[leaf.part.leaf])
        return {group.name: group.tree_of(value_of) for group in self.groups}

    def trained_leaves(self, tree: Tree) -> list[Value]:
        """Return the value of each leaf of `trained`, from the user's tree of whole arrays."""
        leaves = self.leaves_of(tree)
        return [leaf.of_whole(leaves[leaf.part.leaf]) for leaf in self.trained]

    def tree_of(self, value_of: Callable[[Leaf], Value], masked: Tree = None) -> Tree:
        """Return the *logical* tree: the user's tree of values, with `Rows` where a leaf has several parts.

        Leaves without a value, which is None, are `masked`.
        """

        def node(parts: tuple[Leaf, ...]) -> Tree:
            values = [value_of(leaf) for leaf in parts]
            if values[0] is None:
                return masked
            return values[0] if len(values) == 1 else Rows(values, parts[0].part.axis)

        return jax.tree.unflatten(self.treedef, map(node, self.parts))

    def join(self, of_groups: Mapping[str, Tree]) -> Tree:
        """Return the logical tree from each group's tree: the inverse of `split`, but for `Rows`."""
        values = itertools.chain.from_iterable(jax.tree.leaves(of_groups[group.name]) for group in self.groups)
        return self.tree_of(dict(zip(self.leaves, values, strict=True)).__getitem__)

    def spread(self, what: str, prefix: Tree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, list[Tree]]:
        """Return, per group and leaf, the leaf above it in a prefix of the user's tree."""
        values = spread(what, prefix, self.treedef, is_leaf)
        return {group.name: [values[leaf.part.leaf] for leaf in group.leaves] for group in self.groups}

    def _shown(self) -> list[str | Table]:
        """Return a row per leaf, array after array.

        >>> from ipu_jax import Pipeline, Stage
        >>> stages = [Stage(lambda w, x, mb: mb @ w, params=name, ipu=ipu) for ipu, name in enumerate("ab")]
        >>> Pipeline(stages).shard({"a": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}).layout
        Layout of 1 array on 2 IPUs
          array  on each IPU  leaf         shape   place
          0      float32[12]  params['a']  [4, 3]  IPU 0
          0      float32[12]  params['b']  [3]     IPU 1
        """
        rows = [("array", "on each IPU", "leaf", "shape", "place")]
        shown = [leaf for leaf in self.leaves if leaf.array >= 0 or not self.arrays]
        for leaf in sorted(shown, key=lambda leaf: leaf.array):
            array = self.arrays[leaf.array] if self.arrays else PackedArray(leaf.shape, leaf.dtype)
            place = "every IPU" if leaf.split is None else f"dim {leaf.split} over the IPUs"
            place = place if (owner := self.owner(leaf)) is None else f"IPU {owner}"
            place += ", frozen" * leaf.frozen + ", a chunk per replica" * (REPLICA_AXIS in array.spec)
            shape = [*array.shape[2 if leaf.ipus == 1 else 0 :]]
            rows.append((str(leaf.array), f"{array.dtype}{shape}", str(leaf), str([*leaf.shape]), place))
        first = f"Layout of {counted(len(self.arrays), 'array')} on {counted(self.ipus, 'IPU')}"
        return [first, Table(rows, left=5, indent="  ")]


def held_dtype(path: str, value: Value) -> str:
    """Return the dtype in which IPUs hold an array, or raise `ValueError` if they hold none such."""
    check_array(path, value)
    check_weight(path, value.dtype, frozen=True)
    # jax stores numpy's float64 as float32
    return str(jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
