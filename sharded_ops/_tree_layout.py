"""Whole trees of split arrays: padded, placed on a mesh, brought back, and saved beside a description of the split.

A table that is padded for 3 IPUs has not the shape that 8 IPUs need. So what is saved is the *whole* table, without
padding, and every number of IPUs pads it anew:

    3 IPUs   0 1 2 3 | 4 5 6 7 | 8 9 x x     whole: 0 1 2 3 4 5 6 7 8 9
                                      whole  ->  saved, restored  ->  place
    4 IPUs   0 1 2 | 3 4 5 | 6 7 8 | 9 x x   x: a row of padding

A `Layout` says which dim of which leaf is split, in plain data: it knows no number of IPUs, and lies as JSON beside the
checkpoint, whatever tool writes that. Only one leaf at a time stands on the host where that can be had: `each_whole`
hands leaves out one by one, and `place` reads its leaves one by one, of each only the rows that this process's IPUs
hold.

Nothing here runs inside a `shard_map`: these are the host's doings, before the first step and after the last.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharded_ops._arguments import one_axis, whole_number
from sharded_ops._leaf_layout import LeafLayout, brought_whole, check_leaf, leaf_layout_of, real_part, with_meaning
from sharded_ops._split import Split

_FIELDS = ("shape", "dtype", "dim")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The split of a tree's leaves over the IPUs of one mesh axis, for any number of IPUs.

    A leaf is named by its path, the keys on the way to it with "/" between: {"head": {"w": w}} has "head/w". Make a
    layout with `Layout.of`, and that of an optimizer's state from its parameters' with `of_state`.

    Args:
        leaves: per path what the leaf is, whole.

    Example:
        >>> from jax.sharding import AxisType
        >>> def mesh_of(n):
        ...     return jax.make_mesh((n,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
        >>> params = {"table": np.arange(10.0, dtype=np.float32), "bias": np.ones(2, np.float32)}
        >>> layout = Layout.of(params, {"table": 0, "bias": None})
        >>> on_3 = layout.place(params, mesh_of(3), "ipu")
        >>> on_3["table"].shape, on_3["table"].sharding.spec
        ((12,), P('ipu',))
        >>> saved, beside_it = dict(layout.each_whole(on_3)), layout.to_json()  # np.savez("params.npz", **saved)
        >>> saved["table"].shape
        (10,)
        >>> on_8 = Layout.from_json(beside_it).place(saved, mesh_of(8), "ipu", like=params)
        >>> on_8["table"].shape
        (16,)
    """

    leaves: Mapping[str, LeafLayout]

    @classmethod
    def of(cls, tree: Any, dims: Any) -> "Layout":
        """Return the layout of a tree, from the whole tree and the dim to split of each leaf.

        Args:
            tree: arrays, or what has a shape and a dtype as `jax.eval_shape` gives it. Whole: without padding.
            dims: a tree of ints and None whose structure is that of `tree`, or a prefix of it: one stands for all
                leaves below. An int is the dim that is split, negative ones count from the end; None: not split.

        Raises:
            ValueError: `dims` is no prefix of `tree`, a leaf has not the dim it names, or is no array or a random key,
                or two leaves have one path.
        """
        found: dict[str, LeafLayout] = {}
        for path, leaf, dim in _with_dims(tree, dims):
            if path in found:
                raise ValueError(f"two leaves have the path {path!r}: rename one, so that each has a path of its own")
            found[path] = leaf_layout_of(path, leaf, dim)
        return cls(found)

    def of_state(self, state: Any, dims: Mapping[str, int | None] | None = None) -> "Layout":
        """Return the layout of a tree that holds copies of the tree that this layout is of, such as an optimizer's
        state.

        A leaf whose path ends with that of a parameter, as "0/mu/table" does with "table", is split as the parameter
        is; all others and scalars are not split.

        Args:
            state: arrays or their shapes, whole: `jax.eval_shape(optimizer.init, params)` of whole `params`.
            dims: per path the dim that is split, for leaves whose path ends with a parameter's but which have another
                shape, such as the row statistics of Adafactor.

        Raises:
            ValueError: such a leaf is missing in `dims`, or `dims` names no leaf or not a dim of it.
        """
        given = dict(dims or {})
        found: dict[str, LeafLayout] = {}
        for path, leaf, _ in _with_dims(state, None):
            shape, parameter = np.shape(leaf), self._parameter_of(path)
            if path in given:
                dim = given.pop(path)
            elif parameter is None or shape == ():
                dim = None
            elif shape == self.leaves[parameter].shape:
                dim = self.leaves[parameter].dim
            else:
                raise ValueError(
                    f"leaf {path!r} has shape {shape}, but {parameter!r}, with whose path its own ends, has "
                    f"{self.leaves[parameter].shape}: take the state of whole parameters, or say which dim of this one "
                    f"is split with dims={{{path!r}: ...}}"
                )
            found[path] = leaf_layout_of(path, leaf, dim)
        if given:
            raise ValueError(f"dims names {min(given)!r}, which is no leaf of the state: give one of {sorted(found)}")
        return Layout(found)

    def specs(self, tree: Any, axis: str) -> Any:
        """Return, per leaf of `tree`, its `PartitionSpec`, for the in_specs and out_specs of a `shard_map`.

        Raises:
            ValueError: `tree` has other paths than the layout, or `axis` is not one name. Of its leaves nothing else is
                looked at.
        """
        name = one_axis(axis)
        return self._map(tree, lambda path, leaf, described: described.spec(name))

    def shardings(self, tree: Any, mesh: Mesh, axis: str) -> Any:
        """Return, per leaf of `tree`, its `NamedSharding` on `mesh`, of which all axes but `axis` hold the same.

        Raises:
            ValueError: `tree` has other paths than the layout, or `mesh` has no such axis.
        """
        _parts(mesh, axis)
        return self._map(tree, lambda path, leaf, described: NamedSharding(mesh, described.spec(axis)))

    def pad(self, tree: Any, parts: int) -> Any:
        """Return the tree with its split dims padded with zeros for `parts` IPUs. May stand under `jit` and be
        differentiated.

        Args:
            tree: whole leaves, jax's or numpy's, which stay what they are.
            parts: IPUs on the mesh axis.

        Returns:
            The leaves with `Split.padded` rows in their split dims.

        Raises:
            ValueError: `tree` does not fit the layout, or `parts` is not a positive int.
        """

        parts = whole_number("parts", parts, at_least=1)

        def padded(path: str, leaf: Any, described: LeafLayout) -> Any:
            check_leaf("pad", path, leaf, described)
            if described.dim is None:
                return leaf
            split = Split(described.shape[described.dim], parts)
            if isinstance(leaf, jax.Array):
                return split.pad(leaf, described.dim)
            return np.pad(leaf, [(0, split.padding if d == described.dim else 0) for d in range(leaf.ndim)])

        return self._map(tree, padded)

    def unpad(self, tree: Any) -> Any:
        """Drop the padding again, however many IPUs it was for: the inverse of `pad`, and its transpose.

        Args:
            tree: padded leaves, jax's or numpy's, which stay what they are.

        Raises:
            ValueError: `tree` does not fit the layout.
        """

        def unpadded(path: str, leaf: Any, described: LeafLayout) -> Any:
            check_leaf("unpad", path, leaf, described, padded=True)
            return leaf[real_part(described)]

        return self._map(tree, unpadded)

    def place(self, source: Any, mesh: Mesh, axis: str, *, like: Any = None) -> Any:
        """Put whole leaves from the host on the IPUs of a mesh, padded and split.

        Leaves are read one after the other, and of each the rows of one IPU after the other: a whole padded leaf is
        made on the host only where one IPU holds it all. The arrays are copies. With several processes each calls this
        with the same leaves.

        Args:
            source: a tree of whole leaves, numpy's or what numpy reads (a memory map is read piece by piece); or, with
                `like`, a mapping from path to leaf, such as `np.load` gives for an npz file.
            mesh: any mesh with the axis `axis`. Its other axes hold the same.
            axis: the mesh axis.
            like: any tree of the structure to be built, such as `jax.eval_shape` gives; its leaves are not looked at.

        Returns:
            The tree, with leaves of the padded global shape, sharded as `shardings` says. numpy reads a bfloat16 that
            it saved as two bytes without a meaning ("V2"); such a leaf is given the dtype of the layout again.

        Raises:
            ValueError: the leaves do not fit the layout, or `mesh` has no such axis.
        """
        parts = _parts(mesh, axis)
        if like is not None:
            self._check_paths(set(source), "the mapping")

        def placed(path: str, leaf: Any, described: LeafLayout) -> jax.Array:
            whole = np.asarray(leaf if like is None else source[path])
            whole = with_meaning(whole, described)
            check_leaf("place", path, whole, described)
            shape = described.padded_shape(parts)

            def shard(index: Any) -> np.ndarray:
                rows = [part.indices(size) for part, size in zip(index, shape, strict=True)]
                # zeros, and a copy: jax on a CPU would otherwise share the memory of its source.
                held = np.zeros([stop - start for start, stop, _ in rows], whole.dtype)
                # A slice beyond the end of `whole` takes what is there: the real rows.
                real = whole[index]
                held[tuple(slice(0, size) for size in real.shape)] = real
                return held

            return jax.make_array_from_callback(shape, NamedSharding(mesh, described.spec(axis)), shard)

        return self._map(source if like is None else like, placed)

    def whole(self, tree: Any) -> Any:
        """Return the tree as whole numpy arrays without padding, ready to be saved by any tool: the inverse of `place`.

        Args:
            tree: padded leaves, split in any way over any number of IPUs, or numpy's.

        Raises:
            ValueError: `tree` does not fit the layout, or rows of a leaf lie on IPUs of other processes alone.
        """
        return self._map(tree, brought_whole)

    def each_whole(self, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Path and whole array of each leaf, as `whole` has them, one by one: for a tree that the host cannot hold.

        Raises:
            ValueError: as `whole`, before the first leaf where paths are wrong.
        """
        named = self._named_leaves(tree)
        return ((path, brought_whole(path, leaf, self.leaves[path])) for path, leaf in named)

    def to_json(self) -> str:
        """Return the layout as JSON text: an object per path with "shape", "dtype" and "dim"."""
        return json.dumps({path: dataclasses.asdict(leaf) for path, leaf in self.leaves.items()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Return the layout that `to_json` wrote.

        Raises:
            ValueError: `text` is no such text.
        """
        read = json.loads(text)
        if not isinstance(read, dict):
            raise ValueError(f"the JSON text of a Layout is an object, not {type(read).__name__}: give to_json's")
        for path, leaf in read.items():
            if not isinstance(leaf, dict) or set(leaf) != set(_FIELDS) or not _are_sizes(leaf["shape"]):
                raise ValueError(f"{path!r}: {json.dumps(leaf)} describes no leaf: give its {', '.join(_FIELDS)}")
        return cls({path: LeafLayout(tuple(leaf["shape"]), leaf["dtype"], leaf["dim"]) for path, leaf in read.items()})

    def _parameter_of(self, path: str) -> str | None:
        """Return the longest path of the layout with which this one ends."""
        ends = [known for known in self.leaves if path == known or path.endswith(f"/{known}") or not known]
        return max(ends, key=len, default=None)

    def _map(self, tree: Any, fn: Callable[[str, Any, LeafLayout], Any]) -> Any:
        named = self._named_leaves(tree)
        return jax.tree.unflatten(jax.tree.structure(tree), [fn(path, leaf, self.leaves[path]) for path, leaf in named])

    def _named_leaves(self, tree: Any) -> list[tuple[str, Any]]:
        named = [(_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
        self._check_paths({path for path, _ in named}, "the tree")
        return named

    def _check_paths(self, paths: set[str], holder: str) -> None:
        for missing in sorted(self.leaves.keys() - paths):
            raise ValueError(f"{holder} has no leaf {missing!r}, but the layout has: give the tree that it is of")
        for unknown in sorted(paths - self.leaves.keys()):
            raise ValueError(f"{holder} has a leaf {unknown!r}, but the layout has not: give the tree that it is of")


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _are_sizes(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _with_dims(tree: Any, dims: Any) -> list[tuple[str, Any, Any]]:
    """Path, leaf and dim of each leaf; `dims` is a prefix of `tree`, in which None is a leaf."""
    of_leaves: list[Any] = []
    try:
        jax.tree.map(
            lambda dim, below: of_leaves.extend([dim] * len(jax.tree.leaves(below))),
            dims,
            tree,
            is_leaf=lambda x: x is None,
        )
    except ValueError as error:
        raise ValueError(f"dims is no prefix of the tree, give a dim or None for all its leaves: {error}") from None
    named = jax.tree.leaves_with_path(tree)
    return [(_name(path), leaf, dim) for (path, leaf), dim in zip(named, of_leaves, strict=True)]


def _parts(mesh: Mesh, axis: str) -> int:
    if one_axis(axis) not in mesh.shape:
        raise ValueError(f"axis={axis!r} is no axis of the mesh, which has {tuple(mesh.shape)}: give one of them")
    return mesh.shape[axis]
