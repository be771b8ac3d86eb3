"""Pad trees of arrays, place them on a mesh, copy them back to the host, and save how they are split.

A table that is padded for 3 IPUs doesn't have the shape that 8 IPUs need. So the *whole* table is saved, without
padding, and is padded again for any number of IPUs:

    3 IPUs   0 1 2 3 | 4 5 6 7 | 8 9 x x     whole: 0 1 2 3 4 5 6 7 8 9
                                      whole  ->  saved, restored  ->  place
    4 IPUs   0 1 2 | 3 4 5 | 6 7 8 | 9 x x   x: a row of padding

A `Layout` is plain data that says which dim of which leaf is split. It does not depend on the number of IPUs, and is
saved as JSON next to the checkpoint, whatever tool writes the checkpoint. A tree need not fit into the host's memory:
`each_whole` returns the leaves one by one. `place` reads the leaves one by one, and reads only the rows that this
process's IPUs hold.

Nothing here runs inside a `shard_map`. These functions run on the host, before the first step and after the last one.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharded_ops._arguments import one_axis, whole_number
from sharded_ops._split import Split

_FIELDS = ("shape", "dtype", "dim")


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The shape and dtype of a whole leaf, and which of its dims is split.

    Args:
        shape: of the whole leaf, without padding.
        dtype: the name of its dtype, such as "bfloat16".
        dim: the dim that is split, not negative; None for a leaf that every IPU holds whole.

    Raises:
        ValueError: `dtype` is not the name of a dtype, or `shape` has no dim `dim` of at least one row.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None

    def __post_init__(self) -> None:
        try:
            jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype={self.dtype!r} is not a dtype: give one such as 'float32'") from None
        if self.dim is None:
            return
        object.__setattr__(self, "dim", whole_number("dim", self.dim, instead="None for a leaf that is not split"))
        if not 0 <= self.dim < len(self.shape):
            mend = f"give 0 to {len(self.shape) - 1}, or None" if self.shape else "give None"
            raise ValueError(f"dim={self.dim!r} is not a dim of shape {self.shape}: {mend}")
        if not self.shape[self.dim]:
            raise ValueError(f"dim={self.dim} of shape {self.shape} has no rows to split: give dim=None")

    def padded_shape(self, parts: int) -> tuple[int, ...]:
        """Return the global shape on `parts` IPUs: `shape`, with `Split.padded` rows in `dim`."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], Split(self.shape[self.dim], parts).padded, *self.shape[self.dim + 1 :])

    def spec(self, axis: str) -> PartitionSpec:
        """Return the `PartitionSpec` of the padded leaf."""
        if self.dim is None:
            return PartitionSpec()
        return Split(self.shape[self.dim], 1).spec(self.dim, len(self.shape), axis)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describe how the leaves of a tree are split over a mesh axis, for any number of IPUs on it.

    A leaf is named by its path: the keys that lead to it, joined by "/". So {"head": {"w": w}} has the leaf "head/w".
    Make a layout with `Layout.of`. Make the layout of an optimizer's state with `of_state` of the parameters' layout.

    Args:
        leaves: for each path, the shape and dtype of the whole leaf and the dim that is split.

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
            tree: whole arrays without padding, or objects with a shape and a dtype, such as `jax.eval_shape` returns.
            dims: a tree of ints and None with the structure of `tree`, or a prefix of it, where each entry applies to
                all leaves below it. An int is the dim to split; a negative int counts from the end. None: not split.

        Raises:
            ValueError: `dims` is not a prefix of `tree`; a leaf does not have its dim, is not an array or is a random
                key; or two leaves have the same path.
        """
        leaves: dict[str, LeafLayout] = {}
        for path, leaf, dim in _with_dims(tree, dims):
            if path in leaves:
                raise ValueError(f"two leaves have the path {path!r}: rename one, so that each has a path of its own")
            leaves[path] = _leaf_layout_of(path, leaf, dim)
        return cls(leaves)

    def of_state(self, state: Any, dims: Mapping[str, int | None] | None = None) -> "Layout":
        """Return the layout of an optimizer's state, or of another tree that contains trees like the parameters.

        A leaf whose path ends with the path of a parameter, as "0/mu/table" ends with "table", is split like the
        parameter. All other leaves, and scalars, are not split.

        Args:
            state: whole arrays or their shapes, such as `jax.eval_shape(optimizer.init, params)` of whole `params`.
            dims: for each path, the dim to split. Required for a leaf whose path ends with a parameter's path but whose
                shape differs from the parameter's, such as the row statistics of Adafactor.

        Raises:
            ValueError: such a leaf is missing in `dims`, or `dims` contains a path without a leaf, or a dim that the
                leaf does not have.
        """
        given = dict(dims or {})
        leaves: dict[str, LeafLayout] = {}
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
                    f"leaf {path!r} has shape {shape}, but {parameter!r}, whose path ends its own path, has "
                    f"{self.leaves[parameter].shape}: take the state of whole parameters, or say which dim of this one "
                    f"is split with dims={{{path!r}: ...}}"
                )
            leaves[path] = _leaf_layout_of(path, leaf, dim)
        if given:
            raise ValueError(f"dims names {min(given)!r}, which is not a leaf of the state: use {sorted(leaves)}")
        return Layout(leaves)

    def specs(self, tree: Any, axis: str) -> Any:
        """Return the `PartitionSpec` of each leaf of `tree`, for the in_specs and out_specs of a `shard_map`.

        Only the paths of the leaves are used, not the leaves themselves.

        Raises:
            ValueError: `tree` has other paths than the layout, or `axis` is not one name.
        """
        name = one_axis(axis)
        return self._map(tree, lambda path, leaf, leaf_layout: leaf_layout.spec(name))

    def shardings(self, tree: Any, mesh: Mesh, axis: str) -> Any:
        """Return the `NamedSharding` of each leaf of `tree` on `mesh`. Over axes other than `axis` it is replicated.

        Raises:
            ValueError: `tree` has other paths than the layout, or `mesh` has no such axis.
        """
        _parts(mesh, axis)
        return self._map(tree, lambda path, leaf, leaf_layout: NamedSharding(mesh, leaf_layout.spec(axis)))

    def pad(self, tree: Any, parts: int) -> Any:
        """Return the tree with its split dims padded with zeros for `parts` IPUs.

        This works under `jit` and is differentiable.

        Args:
            tree: whole leaves. jax arrays are returned as jax arrays, and numpy arrays as numpy arrays.
            parts: the number of IPUs on the mesh axis.

        Returns:
            The leaves with `Split.padded` rows in their split dims.

        Raises:
            ValueError: `tree` does not fit the layout, or `parts` is not a positive int.
        """

        parts = whole_number("parts", parts, at_least=1)

        def padded(path: str, leaf: Any, leaf_layout: LeafLayout) -> Any:
            _check_leaf("pad", path, leaf, leaf_layout)
            if leaf_layout.dim is None:
                return leaf
            split = Split(leaf_layout.shape[leaf_layout.dim], parts)
            if isinstance(leaf, jax.Array):
                return split.pad(leaf, leaf_layout.dim)
            return np.pad(leaf, [(0, split.padding if d == leaf_layout.dim else 0) for d in range(leaf.ndim)])

        return self._map(tree, padded)

    def unpad(self, tree: Any) -> Any:
        """Return the tree without the padding for any number of IPUs. This is the inverse and transpose of `pad`.

        Args:
            tree: padded leaves. jax arrays are returned as jax arrays, and numpy arrays as numpy arrays.

        Raises:
            ValueError: `tree` does not fit the layout.
        """

        def unpadded(path: str, leaf: Any, leaf_layout: LeafLayout) -> Any:
            _check_leaf("unpad", path, leaf, leaf_layout, padded=True)
            return leaf[_real_part(leaf_layout)]

        return self._map(tree, unpadded)

    def place(self, source: Any, mesh: Mesh, axis: str, *, like: Any = None) -> Any:
        """Copy whole leaves from the host to the IPUs of a mesh, padded and split.

        Leaves are read one after the other, and each leaf is read IPU by IPU. A whole padded leaf is made on the host
        only if one IPU holds all of it. With several processes, each process must call this with the same leaves.

        Args:
            source: a tree of whole numpy arrays, or of objects that numpy can read (a memory map is read piece by
                piece); or, with `like`, a mapping from path to leaf, such as `np.load` returns for an npz file.
            mesh: any mesh with the axis `axis`. Leaves are replicated over its other axes.
            axis: the mesh axis.
            like: any tree with the structure to be built, such as `jax.eval_shape` returns; its leaves are not read.

        Returns:
            The tree, with leaves of the padded global shape, sharded as `shardings` returns. numpy loads bfloat16
            arrays that it has saved as plain pairs of bytes ("V2"); such a leaf gets back the dtype of the layout.

        Raises:
            ValueError: the leaves do not fit the layout, or `mesh` has no such axis.
        """
        parts = _parts(mesh, axis)
        if like is not None:
            self._check_paths(set(source), "the mapping")

        def placed(path: str, leaf: Any, leaf_layout: LeafLayout) -> jax.Array:
            whole = np.asarray(leaf if like is None else source[path])
            whole = _restore_dtype(whole, leaf_layout)
            _check_leaf("place", path, whole, leaf_layout)
            shape = leaf_layout.padded_shape(parts)

            def shard(index: Any) -> np.ndarray:
                rows = [part.indices(size) for part, size in zip(index, shape, strict=True)]
                # Padding is zeros. Rows are copied, because jax on a CPU would otherwise share memory with `source`.
                shard_rows = np.zeros([stop - start for start, stop, _ in rows], whole.dtype)
                # A slice that extends beyond the end of `whole` takes only the existing rows, which are the real rows.
                real = whole[index]
                shard_rows[tuple(slice(0, size) for size in real.shape)] = real
                return shard_rows

            return jax.make_array_from_callback(shape, NamedSharding(mesh, leaf_layout.spec(axis)), shard)

        return self._map(source if like is None else like, placed)

    def whole(self, tree: Any) -> Any:
        """Return the tree as whole numpy arrays without padding, ready to be saved by any tool: the inverse of `place`.

        Args:
            tree: padded leaves: jax arrays, split in any way over any number of IPUs, or numpy arrays.

        Raises:
            ValueError: `tree` does not fit the layout, or some rows of a leaf are only on other processes' IPUs.
        """
        return self._map(tree, _leaf_to_host)

    def each_whole(self, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Return an iterator over each leaf's path and whole array, for a tree that does not fit on the host.

        Raises:
            ValueError: as for `whole`. Wrong paths raise it at once, before the iterator is used.
        """
        named = self._named_leaves(tree)
        return ((path, _leaf_to_host(path, leaf, self.leaves[path])) for path, leaf in named)

    def to_json(self) -> str:
        """Return the layout as JSON text: for each path an object with "shape", "dtype" and "dim"."""
        return json.dumps({path: dataclasses.asdict(leaf) for path, leaf in self.leaves.items()}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Return the layout from the text that `to_json` returned.

        Raises:
            ValueError: `text` is not a text from `to_json`.
        """
        read = json.loads(text)
        if not isinstance(read, dict):
            raise ValueError(f"the JSON text of a Layout is an object, not {type(read).__name__}: give to_json's")
        for path, leaf in read.items():
            shape = leaf["shape"] if isinstance(leaf, dict) and set(leaf) == set(_FIELDS) else None
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"{path!r}: {json.dumps(leaf)} is not a leaf's description: give {', '.join(_FIELDS)}")
        return cls({path: LeafLayout(tuple(leaf["shape"]), leaf["dtype"], leaf["dim"]) for path, leaf in read.items()})

    def _parameter_of(self, path: str) -> str | None:
        """Return the longest path of this layout that `path` ends with, or None if there is none."""
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
            raise ValueError(f"{holder} has no leaf {missing!r}, but the layout has one: give the tree of this layout")
        for unknown in sorted(paths - self.leaves.keys()):
            raise ValueError(f"{holder} has a leaf {unknown!r}, but the layout does not: give the tree of this layout")


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _with_dims(tree: Any, dims: Any) -> list[tuple[str, Any, Any]]:
    """Return the path, the leaf and the dim of each leaf. `dims` is a prefix of `tree`; None counts as a leaf in it."""
    is_none = lambda x: x is None
    try:
        leaf_dims = jax.tree.leaves(jax.tree.broadcast(dims, tree, is_leaf=is_none), is_leaf=is_none)
    except ValueError as error:
        raise ValueError(f"dims is not a prefix of the tree: give a dim or None for all its leaves: {error}") from None
    named = jax.tree.leaves_with_path(tree)
    return [(_name(path), leaf, dim) for (path, leaf), dim in zip(named, leaf_dims, strict=True)]


def _parts(mesh: Mesh, axis: str) -> int:
    if one_axis(axis) not in mesh.shape:
        raise ValueError(f"axis={axis!r} is not an axis of the mesh, which has {tuple(mesh.shape)}: give one of them")
    return mesh.shape[axis]


def _leaf_layout_of(path: str, leaf: Any, dim: Any) -> LeafLayout:
    """Return the layout of a whole leaf; a negative `dim` counts from the end.

    Raises:
        ValueError: the leaf is not an array, or is a random key, or has no such dim. The message names the leaf.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ValueError(f"leaf {path!r} is {leaf!r}, which is not an array: make it one, with a dtype of its own")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"leaf {path!r} has dtype {leaf.dtype}, which cannot be saved: give jax.random.key_data of it")
    try:
        if dim is not None:
            dim = whole_number("dim", dim, instead="None for a leaf that is not split")
            dim += len(leaf.shape) if -len(leaf.shape) <= dim < 0 else 0
        return LeafLayout(tuple(leaf.shape), jnp.dtype(leaf.dtype).name, dim)
    except ValueError as error:
        raise ValueError(f"leaf {path!r}: {error}") from None


def _check_leaf(method: str, path: str, leaf: Any, leaf_layout: LeafLayout, *, padded: bool = False) -> None:
    """Raise for a leaf that does not have the shape and dtype of `leaf_layout`.

    With `padded`, the leaf may have any number of rows of padding in its split dim.

    Raises:
        ValueError: names the leaf, its shape or dtype, and the expected one.
    """
    shape, dim = tuple(np.shape(leaf)), leaf_layout.dim
    fits = shape == leaf_layout.shape
    if padded and dim is not None and len(shape) == len(leaf_layout.shape):
        fits = shape[dim] >= leaf_layout.shape[dim]
        fits &= shape[:dim] + shape[dim + 1 :] == leaf_layout.shape[:dim] + leaf_layout.shape[dim + 1 :]
    if not fits:
        takes = f"{leaf_layout.shape}" + (f" with any padding in dim {dim}" if padded and dim is not None else "")
        raise ValueError(
            f"{method}: leaf {path!r} has shape {shape}, but the layout takes {takes}: give the leaf that it describes"
        )
    name = getattr(getattr(leaf, "dtype", None), "name", type(leaf).__name__)
    if name != leaf_layout.dtype:
        raise ValueError(
            f"{method}: leaf {path!r} has dtype {name}, but the layout says {leaf_layout.dtype}: convert it, or make "
            f"a layout of the converted leaf"
        )


def _real_part(leaf_layout: LeafLayout) -> tuple[slice, ...]:
    """Return the slices that remove a leaf's padding."""
    return tuple(slice(0, size) for size in leaf_layout.shape)


def _restore_dtype(array: np.ndarray, leaf_layout: LeafLayout) -> np.ndarray:
    """Return `array` in the dtype of the layout, if numpy has loaded it as plain bytes.

    numpy saves a dtype that is not its own, such as bfloat16, as bytes without the name of the dtype.
    """
    dtype = jnp.dtype(leaf_layout.dtype)
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array


def _leaf_to_host(path: str, leaf: Any, leaf_layout: LeafLayout) -> np.ndarray:
    """Return the whole leaf as a new array on the host. Shards are copied into it one after the other.

    Raises:
        ValueError: the leaf does not fit the layout, or some of its rows are only on other processes' IPUs.
    """
    if not isinstance(leaf, jax.Array):
        leaf = _restore_dtype(np.asarray(leaf), leaf_layout)
        _check_leaf("whole", path, leaf, leaf_layout, padded=True)
        return np.array(leaf[_real_part(leaf_layout)])
    _check_leaf("whole", path, leaf, leaf_layout, padded=True)
    # Shards with the same index are equal, such as shards along other mesh axes: one of each is enough.
    shards = {tuple((part.start, part.stop) for part in shard.index): shard for shard in leaf.addressable_shards}
    if sum(shard.data.size for shard in shards.values()) < leaf.size:
        raise ValueError(
            f"whole: rows of leaf {path!r} lie on IPUs of other processes alone, where they cannot be read: gather it "
            f"first, with jax.experimental.multihost_utils.process_allgather(leaf, tiled=True)"
        )
    whole = np.empty(leaf_layout.shape, leaf.dtype)
    for shard in shards.values():
        # A slice that extends beyond the end takes only the existing rows, which are the real rows of this shard.
        rows = whole[(*shard.index, ...)]
        rows[...] = _on_host(shard.data)[tuple(slice(0, size) for size in rows.shape)]
    return whole


def _on_host(shard: jax.Array) -> np.ndarray:
    # jax keeps the host copy of an array as long as the array lives. The copy of a temporary array is freed soon.
    temporary = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return np.asarray(temporary)
