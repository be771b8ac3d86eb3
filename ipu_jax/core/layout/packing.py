"""Place weights on the IPUs in the arrays that a `PackedLayout` describes, and read and write them there."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Batch, Tree, Value
from ipu_jax.base.keys import dtype_named, key_impl, with_keys, without_keys
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.leaf import Leaf, PackedArray
from ipu_jax.core.layout.tree_parts import joined
from ipu_jax.core.mesh.instances import Index, bounded, on_host, put_copy

_MOST_ROWS: Final = 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(Shown):
    """Parameters, gradients, or any tree like them, on the IPUs.

    `params["body"]["w"]` reads a whole leaf, and `dict(params)` reads all groups. As a pytree it consists of packed
    arrays, not of the model's leaves: an array contains leaves of several stages, shapes and ranks. Elementwise
    functions such as `jax.tree.map` and `optax.adam` are right on the pytree, and so are norms over all of it, such as
    `optax.clip_by_global_norm`. Functions that look at a leaf's shape, norm or path are wrong: lamb, lars, adafactor,
    `adaptive_grad_clip`, masks by rank or path. A decay of all weights also changes frozen weights.
    `Pipeline.optimizer` and `make_train_step` are right for every optimizer.

    Attributes:
        arrays: the arrays; each IPU holds a row, a shard, or all of each.
        layout: says which leaf is where; static.
    """

    arrays: list[Value]
    layout: PackedLayout = dataclasses.field(metadata={"static": True})

    def _shown(self) -> list[str | Table]:
        """Return what `print` and notebooks show: a row per group, or per few groups of many."""
        layout = self.layout
        held = {group.name: [leaf for leaf in group.leaves if leaf.array >= 0] for group in layout.groups}
        numbers = {name: sum(leaf.size for leaf in leaves) for name, leaves in held.items()}
        rows = [("group", "place", "leaves", "numbers", "dtypes")]
        for name, leaves in list(held.items())[: _MOST_ROWS if len(held) > _MOST_ROWS + 1 else None]:
            owners, dtypes = {*map(layout.owner, leaves)}, ", ".join(sorted({leaf.dtype for leaf in leaves}))
            place = "several" if len(owners) > 1 else "".join("all IPUs" if o is None else f"IPU {o}" for o in owners)
            rows.append((name, place, str(len(leaves)), f"{numbers[name]:,}", dtypes))
        left = len(held) - len(rows) + 1
        first = f"Sharded: {len(held)} groups on {layout.ipus} IPUs, {sum(numbers.values()):,} numbers"
        return [first, Table(rows, left=2), *([f"and {left} more groups"] if left else [])]

    def keys(self) -> list[str]:
        """Return the keys of the user's dict, sorted, or [] if the tree is none; of a list of stages, the groups."""
        tree = jax.tree.unflatten(self.layout.treedef, self.layout.paths)
        return list(tree) if isinstance(tree, Mapping) else []

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> Tree:
        """Return a tree of whole arrays, without padding, for reading: changes do not reach the IPUs.

        Outside `jax.jit` this communicates like `Pipeline.unshard`, for the arrays that contain the tree.
        """
        if key not in self.keys():
            raise KeyError(f"{key!r} is not a group: there are {', '.join(map(repr, self.keys()))}")
        return joined(jax.tree.map(reader(self), self.layout.tree_of(lambda leaf: leaf)[key]))


def specs_of(layout: PackedLayout) -> Sharded:
    """Return the PartitionSpec of every array of a `Sharded` with this layout, as a `Sharded` of specs."""
    return Sharded([array.spec_on_mesh for array in layout.arrays], layout)


def shardings_of(layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Return where every array of a `Sharded` with this layout is, as a `Sharded` of shardings."""
    return Sharded([array.sharding_on(mesh) for array in layout.arrays], layout)


@jax.transfer_guard("allow")  # the caller asks for this transfer
def shard_tree(tree: Tree, layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Place a tree on the IPUs. Communicates from host to device only; each IPU gets its own part."""
    leaves = layout.leaves_of(tree)
    return shard_leaves(lambda leaf: leaf.of_whole(leaves[leaf.part.leaf]), layout, mesh)


def shard_leaves(value_of: Callable[[Leaf], Value], layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Place the leaves of a layout, array by array.

    Args:
        value_of: returns the value of a leaf: an array, or anything of which `value[slices]` reads a block and
            `np.asarray(value)` all. It is asked for leaves of this process only.
        layout: where the leaves go.
        mesh: the mesh of the arrays.
    """

    def put(array: PackedArray, held: list[Leaf]) -> jax.Array:
        shape, sharding = array.shape_on_mesh(layout.ipus), array.sharding_on(mesh)
        if key_impl(array.dtype) is not None:
            return put_copy(value_of(held[0]), sharding)

        def read(leaf: Leaf) -> Value:
            value = value_of(leaf)
            return np.asarray(value) if isinstance(value, jax.Array) else value

        def block(index: Index | None) -> np.ndarray:  # a copy: later changes on the host don't reach the device
            return np.array(block_of(held, read, shape, index or ()), array.dtype)

        return jax.make_array_from_callback(shape, sharding, block)

    return Sharded([put(*of) for of in zip(layout.arrays, layout.held_by_array, strict=True)], layout)


def block_of(
    held: Sequence[Leaf], value_of: Callable[[Leaf], Value], shape: tuple[int, ...], index: Index, numpy: Any = np
) -> Value:
    """Return the block of an array at `index`, made of the leaves in the array, with zeros beside them.

    Args:
        held: the leaves in the array.
        value_of: returns the value of a leaf; it is called for leaves in this block only.
        shape: the shape of the array.
        index: where the block is.
        numpy: `numpy` or `jax.numpy`.
    """
    index, ipus = bounded(index, shape), held[0].ipus
    if ipus is None:
        return held[0].block(value_of(held[0]), shape, index, numpy)
    rows = list[Value]()
    for ipu in range(index[ipus].start, index[ipus].stop):
        at = (*index[:ipus], slice(ipu, ipu + 1), *index[ipus + 1 :])
        leaf = next((leaf for leaf in held if leaf.is_at(at)), None)
        if leaf is None:
            rows.append(numpy.zeros([part.stop - part.start for part in at], dtype_named(held[0].dtype)))
        else:
            rows.append(leaf.block(value_of(leaf), shape, at, numpy))
    return rows[0] if len(rows) == 1 else numpy.concatenate(rows, ipus)


def shapes_on(layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Return the result of `shard_tree` with the shape, dtype and sharding of each array in place of the array."""
    shapes = [(array.shape_on_mesh(layout.ipus), dtype_named(array.dtype)) for array in layout.arrays]
    where = shardings_of(layout, mesh).arrays
    return Sharded([jax.ShapeDtypeStruct(*of, sharding=at) for of, at in zip(shapes, where, strict=True)], layout)


def whole_shapes(layout: PackedLayout) -> Tree:
    """Return the user's tree with the shape of each leaf, whole and without padding."""
    shapes = [jax.ShapeDtypeStruct(leaf.whole_shape, leaf.dtype) for leaf, *_ in layout.parts]
    return jax.tree.unflatten(layout.treedef, shapes)


def batch_shapes(batch: Batch, mesh: Mesh, spec: PartitionSpec) -> Tree:
    """Return the shapes of a batch's leaves, each placed where it says itself or else as `spec` says."""

    def shape_of(leaf: Value) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        own = getattr(leaf, "sharding", None)
        kept = isinstance(own, NamedSharding) and own.mesh == mesh
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=own if kept else NamedSharding(mesh, spec))

    return jax.tree.map(shape_of, batch)


@jax.transfer_guard("allow")  # the caller asks for this transfer
def unshard_tree(sharded: Sharded) -> Tree:
    """Return the tree that was given to `shard_tree`, with its original shapes and without padding.

    Communicates one all-gather per array that is split over several instances.
    """
    return joined(sharded.layout.tree_of(reader(sharded)))


def reader(sharded: Sharded) -> Callable[[Leaf], Value]:
    """Return a function that reads a leaf, whole and without padding; None if no array has it. It reads arrays once."""

    @functools.cache
    def whole(array: int) -> Value:
        value = sharded.arrays[array]
        return value if isinstance(value, Tracer) else with_keys(on_host(without_keys(value)), value)

    return lambda leaf: None if leaf.array < 0 else jnp.asarray(leaf.in_array(whole(leaf.array)))


def arrays_of(sharded: Sharded) -> list[Value]:
    """Return what this IPU has of each array. Call it inside the program."""
    both = zip(sharded.arrays, sharded.layout.arrays, strict=True)
    return [value[0] if array.is_slot else value for value, array in both]


def sharded_of(arrays: Sequence[Value], layout: PackedLayout) -> Sharded:
    """Return the `Sharded` of this IPU's arrays: the inverse of `arrays_of`. Arrays may be None."""
    both = zip(arrays, layout.arrays, strict=True)
    return Sharded([value[None] if array.is_slot and value is not None else value for value, array in both], layout)


def leaf_in(array: Any, leaf: Leaf) -> Any:
    """Return a leaf from what its IPU has of its array: all of it, or the first elements of a flat slot."""
    return array if array.shape == leaf.held else array.reshape(-1)[: leaf.size].reshape(leaf.shape)


def read(arrays: Sequence[Value], group: Group) -> Tree:
    """Return a group's tree from an IPU's arrays. Runs inside the program, where the IPU holds the group."""
    return group.tree_of(lambda leaf: leaf_in(arrays[leaf.array], leaf))


def write(arrays: Sequence[Value], group: Group, values: Tree, zero: Value) -> list[Value]:
    """Return an IPU's arrays with the group's leaves replaced. Runs inside the program, where the IPU holds the group.

    `zero` is a traced 0, since XLA rewrites the whole slot if the index is a constant.
    """
    written = list(arrays)
    for leaf, value in zip(group.leaves, jax.tree.leaves(values), strict=True):
        array = written[leaf.array]
        value = jnp.asarray(value, array.dtype)  # a constant of the traced program may be a Python number
        if array.shape == leaf.held:
            written[leaf.array] = value
        else:
            flat = jax.lax.dynamic_update_slice(array.reshape(-1), value.reshape(-1), (zero,))
            written[leaf.array] = flat.reshape(array.shape)
    return written


def check_alive(what: str, tree: Tree, mend: str = "pass what that call returned in their place") -> None:
    """Raise `ValueError` if an array of `tree` was deleted: using it on devices would end the process."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(f"{what}: an earlier call reused the buffers of its arrays (it donates them): {mend}")
