"""Place weights on the IPUs in the arrays that a `PackedLayout` describes, and read and write them there."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.base.annotations import Batch, Params, Tree, Value
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.layout.packed_layout import Group, Leaf, PackedLayout, dims_with_axes
from ipu_jax.core.layout.whole_tree import joined
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.instances import on_host

_MOST_ROWS: Final = 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(Shown):
    """Parameters, gradients, or any tree like them, on the IPUs.

    `params["body"]["w"]` reads a whole leaf, and `dict(params)` reads all groups. As a pytree it consists of packed
    arrays, not of the model's leaves: a slot contains leaves of several stages, shapes and ranks. Elementwise functions
    such as `jax.tree.map` and `optax.adam` are right on the pytree, and so are norms over all of it, such as
    `optax.clip_by_global_norm`. Functions that look at a leaf's shape, norm or path are wrong: lamb, lars, adafactor,
    `adaptive_grad_clip`, masks by rank or path. A decay of all weights also changes frozen weights.
    `Pipeline.optimizer` and `make_train_step` are right for every optimizer.

    Attributes:
        slots: the weights of the local groups. Each array is `(ipus, *slot.shape)` globally; each IPU holds one row.
        concurrent: per concurrent group, the list of its leaves, padded globally; each IPU holds its shard.
        layout: says which leaf is where; static.
    """

    slots: list[Value]
    concurrent: dict[str, list[Value]]
    layout: PackedLayout = dataclasses.field(metadata={"static": True})

    def _shown(self) -> list[str | Table]:
        """Return what `print` and notebooks show: a row per group, or per few groups of many."""
        groups = self.layout.groups
        rows = [("group", "place", "leaves", "numbers", "dtypes")]
        for group in groups[:_MOST_ROWS] if len(groups) > _MOST_ROWS + 1 else groups:
            place = "all IPUs" if group.ipu is None else f"IPU {group.ipu}"
            dtypes = ", ".join(sorted({leaf.dtype for leaf in group.leaves}))
            rows.append((group.name, place, str(len(group.leaves)), f"{_numbers(group):,}", dtypes))
        left = len(groups) - len(rows) + 1
        first = f"Sharded: {len(groups)} groups on {self.layout.ipus} IPUs, {sum(map(_numbers, groups)):,} numbers"
        return [first, Table(rows, left=2), *([f"and {left} more groups"] if left else [])]

    def keys(self) -> list[str]:
        """Return the names of the groups, sorted; of a function's weights, the keys of the user's dict."""
        whole = self.layout.whole
        if whole is not None:
            return list(jax.tree.unflatten(whole.treedef, whole.paths))
        return sorted(group.name for group in self.layout.groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, group: str) -> Tree:
        """Return a group's tree of whole arrays, without padding, for reading: changes do not reach the IPUs.

        Outside `jax.jit` this communicates like `Pipeline.unshard`, for the arrays that contain the group.
        """
        if group not in self.keys():
            raise KeyError(f"{group!r} is not a group: there are {', '.join(map(repr, self.keys()))}")
        if self.layout.whole is not None:
            return unshard_tree(self)[group]
        of_group = self.layout.group(group)
        return jax.tree.unflatten(of_group.treedef, whole_leaves(self, of_group))


def _numbers(group: Group) -> int:
    return sum(leaf.size for leaf in group.leaves)


def specs_of(layout: PackedLayout) -> Sharded:
    """Return the PartitionSpec of every array of a `Sharded` with this layout, as a `Sharded` of specs."""
    concurrent = {group.name: [leaf.spec for leaf in group.leaves] for group in layout.concurrent}
    return Sharded([PartitionSpec(IPU_AXIS, *slot.spec) for slot in layout.slots], concurrent, layout)


def empty_sharded(ipus: int) -> Sharded:
    """Return a `Sharded` without groups."""
    return Sharded([], {}, PackedLayout(ipus, (), ()))


@jax.transfer_guard("allow")  # the caller asks for this transfer
def shard_tree(params: Params, layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Place `{group: pytree}` on the IPUs. Communicates from host to device only; each IPU gets its own part."""
    in_slots: list[list[tuple[int, Leaf, Any]]] = [[] for _ in layout.slots]  # with their IPUs
    concurrent: dict[str, list[Value]] = {group.name: [] for group in layout.concurrent}
    of_groups = layout.groups_of(params)
    for group in layout.groups:
        for leaf, value in zip(group.leaves, of_groups[group.name], strict=True):
            if group.ipu is None:
                array = padded(np.asarray(value, leaf.dtype), leaf, layout.ipus)
                concurrent[group.name].append(_put(array, mesh, leaf.spec))
            else:
                in_slots[leaf.slot].append((group.ipu, leaf, value))
    slots = []
    for slot, held in zip(layout.slots, in_slots, strict=True):
        whole = np.zeros((layout.ipus, *slot.shape), slot.dtype)
        for ipu, leaf, value in held:
            whole.reshape(layout.ipus, -1)[ipu, : leaf.size] = np.asarray(value).reshape(-1)
        slots.append(_put(whole, mesh, PartitionSpec(IPU_AXIS, *slot.spec)))
    return Sharded(slots, concurrent, layout)


def shapes_on(layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Return the result of `shard_tree` with the shape, dtype and sharding of each array in place of the array."""

    def shape_of(shape: tuple[int, ...], dtype: str, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sizes = [size + (-size % layout.ipus if axis == IPU_AXIS else 0) for size, axis in dims_with_axes(shape, spec)]
        return jax.ShapeDtypeStruct(tuple(sizes), jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    specs = specs_of(layout)
    slots = [
        shape_of((layout.ipus, *s.shape), s.dtype, spec) for s, spec in zip(layout.slots, specs.slots, strict=True)
    ]
    concurrent = {g.name: [shape_of(leaf.shape, leaf.dtype, leaf.spec) for leaf in g.leaves] for g in layout.concurrent}
    return Sharded(slots, concurrent, layout)


def whole_shapes(layout: PackedLayout) -> Tree:
    """Return the user's tree with the shape of each leaf, whole and without padding."""
    leaves = {leaf.path: leaf for group in layout.groups for leaf in group.leaves}
    return layout.assembled([jax.ShapeDtypeStruct(leaf.whole_shape, leaf.dtype) for leaf in leaves.values()])


def batch_shapes(batch: Batch, mesh: Mesh, spec: PartitionSpec) -> Tree:
    """Return the shapes of a batch's leaves, each placed where it says itself or else as `spec` says."""

    def shape_of(leaf: Value) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        own = getattr(leaf, "sharding", None)
        kept = isinstance(own, NamedSharding) and own.mesh == mesh
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=own if kept else NamedSharding(mesh, spec))

    return jax.tree.map(shape_of, batch)


def _put(whole: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    # from a callback, so that each device takes its own block; copied, so that later changes on the host don't reach it
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index].copy())


def padded(value: np.ndarray, leaf: Leaf, ipus: int) -> np.ndarray:
    """Return `value` with its split dim padded by zeros to a multiple of `ipus`."""
    widths = [(0, -size % ipus if axis == IPU_AXIS else 0) for size, axis in dims_with_axes(value.shape, leaf.spec)]
    return np.pad(value, widths) if any(after for _, after in widths) else value


@jax.transfer_guard("allow")  # the caller asks for this transfer
def unshard_tree(sharded: Sharded) -> Tree:
    """Return the tree that was given to `shard_tree`, with its original shapes and without padding.

    Communicates one all-gather per array that is split over several instances.
    """
    slots = [on_host(slot) for slot in sharded.slots]  # each is read once, for all groups that are in it
    read = dataclasses.replace(sharded, slots=slots)
    layout = sharded.layout
    return joined(layout.arranged({group.name: whole_leaves(read, group) for group in layout.groups}))


def whole_leaves(sharded: Sharded, group: Group) -> list[jax.Array]:
    """Return a group's whole arrays, without padding. Communicates like `unshard_tree`, for this group."""

    def whole(array: Value) -> Value:
        return array if isinstance(array, Tracer) else on_host(array)

    values = []
    for i, leaf in enumerate(group.leaves):
        if group.ipu is None:
            value = whole(sharded.concurrent[group.name][i])[tuple(map(slice, leaf.shape))]
        else:
            value = leaf_in(whole(sharded.slots[leaf.slot])[group.ipu], leaf)
        values.append(jnp.asarray(value))
    return values


def read(slots: Sequence[jax.Array], group: Group) -> Tree:
    """Return the group's tree from this IPU's row of each slot. Runs on the owner, inside the program."""
    return jax.tree.unflatten(group.treedef, [leaf_in(slots[leaf.slot], leaf) for leaf in group.leaves])


def leaf_in(slot: Any, leaf: Leaf) -> Any:
    """Return a leaf from its IPU's row of a slot: all of it, or the first elements of a flat one."""
    return slot if slot.shape == leaf.shape else slot.reshape(-1)[: leaf.size].reshape(leaf.shape)


def write(slots: Sequence[jax.Array], group: Group, values: Tree, zero: Value) -> list[jax.Array]:
    """Return the slots with the group's leaves replaced. Runs on the owner, inside the program.

    `zero` is a traced 0, since XLA rewrites the whole slot if the index is a constant.
    """
    written = list(slots)
    for leaf, value in zip(group.leaves, jax.tree.leaves(values), strict=True):
        slot = written[leaf.slot]
        value = jnp.asarray(value, slot.dtype)  # a constant of the traced program may be a Python number
        if slot.shape == leaf.shape:
            written[leaf.slot] = value
        else:
            flat = jax.lax.dynamic_update_slice(slot.reshape(-1), value.reshape(-1), (zero,))
            written[leaf.slot] = flat.reshape(slot.shape)
    return written


def check_alive(what: str, tree: Tree, mend: str = "pass what that call returned in their place") -> None:
    """Raise `ValueError` if an array of `tree` was deleted: using it on devices would end the process."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(f"{what}: an earlier call reused the buffers of its arrays (it donates them): {mend}")
