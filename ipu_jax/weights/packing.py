"""Weights of unlike stages in one SPMD program: slots, so that an IPU holds its own stages' weights only.

Every IPU runs the same program, so every IPU's arguments have the same shapes; but IPU 0 may own an MLP and IPU 1 a
classifier. Each IPU's leaves are matched with the other IPUs' into *slots*, arrays with a leading `ipu` dim:

                 slot 0 (2560x1280 flat)     slot 1 (784x2560)   slot 2 (2560)   slot 3 (1280)
        IPU 0    MLP layer 1 weights         layer 0 weights     layer 0 bias    layer 1 bias
        IPU 1    classifier weights, 0 …     0 …                 classifier bias, 0 …

A slot whose leaves have one shape keeps that shape, and reading it costs nothing: like stages are simply stacked. Any
other slot is flat, as long as its largest leaf; a leaf that fills it is a reshape, a smaller one a prefix. So an IPU's
bytes are the sum over the slots of the largest leaf in each: its own weights where stages are balanced, and never the
sum over the stages. Concurrent groups are split by their PartitionSpecs, dims that don't divide padded with zeros.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax.devices import IPU_AXIS

WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Describe one packed array: `(ipus, *shape)` globally, `shape` on each IPU."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Describe one weight: its shape and dtype, and where it is (`slot` of a local group, `spec` of a concurrent one).

    A `frozen` one gets no gradient.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    slot: int = -1
    spec: PartitionSpec = WHOLE
    frozen: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Group:
    """Describe a parameter group: `ipu` owns it, or None if it is concurrent."""

    name: str
    ipu: int | None
    treedef: Any
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """Describe where every leaf of every group is. Hashable: it is the static part of a `Sharded`."""

    ipus: int
    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    @property
    def trainable_slots(self) -> frozenset[int]:
        """Return the slots with a leaf that gets a gradient."""
        return frozenset(leaf.slot for g in self.groups if g.ipu is not None for leaf in g.leaves if not leaf.frozen)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """Hold parameters, gradients, or any tree like them, on the IPUs. A pytree: optax and `jax.tree.map` work.

    Attributes:
        slots: the local groups' weights; each array is `(ipus, *slot.shape)` globally, an IPU holding one row.
        concurrent: per concurrent group the list of its leaves, padded globally, an IPU holding its shard.
        layout: static; which leaf is where.
    """

    slots: list[Any]
    concurrent: dict[str, list[Any]]
    layout: PackedLayout = dataclasses.field(metadata={"static": True})


def plan_layout(
    params: Mapping[str, Any],
    owners: Mapping[str, int | None],
    specs: Mapping[str, Any],
    ipus: int,
    *,
    frozen: Mapping[str, Any] | None = None,
    what: str = "params",
) -> PackedLayout:
    """Decide where each leaf goes.

    Args:
        params: `{group: pytree of arrays}`, the whole (unsharded) weights.
        owners: per group, its IPU, or None where it is concurrent.
        specs: per concurrent group, a PartitionSpec, or a pytree of them that is a prefix of the group's own.
        ipus: IPUs of a replica.
        frozen: per group, True or False, or a pytree of them that is a prefix of the group's own; False where absent.
        what: what errors call it, "params" or "state"; leaves of a state are of any dtype.

    Returns:
        The `PackedLayout`.

    Raises:
        ValueError: missing or unknown groups, a leaf that isn't an array, one that gets a gradient and isn't floating,
            a spec or a `frozen` that doesn't fit.
    """
    missing, unknown = sorted(owners.keys() - params.keys()), sorted(params.keys() - owners.keys())
    if missing or unknown:
        wrong = "; ".join(
            f"{word} {', '.join(map(repr, names))}"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        )
        raise ValueError(f"{what}: {wrong}. The stages name the groups {', '.join(map(repr, sorted(owners)))}")
    groups = []
    for name, ipu in owners.items():
        paths, treedef = jax.tree.flatten_with_path(params[name])
        of_frozen = _whether_frozen(name, treedef, (frozen or {}).get(name, what == "state"))
        leaves = [
            _leaf(f"{what}[{name!r}]{jax.tree_util.keystr(path)}", value, is_frozen)
            for (path, value), is_frozen in zip(paths, of_frozen, strict=True)
        ]
        if ipu is None:
            leaves = with_specs(name, leaves, treedef, specs)
        groups.append(Group(name, ipu, treedef, tuple(leaves)))
    slots, groups = _assign_slots(groups, ipus)
    return PackedLayout(ipus, groups, slots)


def _whether_frozen(name: str, treedef: Any, frozen: Any) -> list[bool]:
    try:
        found = jax.tree.leaves(jax.tree.broadcast(frozen, jax.tree.unflatten(treedef, range(treedef.num_leaves))))
    except ValueError as error:
        raise ValueError(f"frozen[{name!r}] does not fit the group's tree: {error}") from error
    for value in found:
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"frozen[{name!r}] holds {value!r}: give True, False, or a tree of them")
    return [bool(value) for value in found]


def with_frozen(layout: PackedLayout, frozen: Mapping[str, Any]) -> PackedLayout:
    """Return the layout with these leaves frozen and no others, as `plan_layout` takes them.

    Raises:
        ValueError: a `frozen` that doesn't fit, or a leaf that is to get a gradient and isn't floating.
    """
    groups = []
    for group in layout.groups:
        of_frozen = _whether_frozen(group.name, group.treedef, frozen.get(group.name, False))
        for leaf, is_frozen in zip(group.leaves, of_frozen, strict=True):
            _check_floating(leaf.path, jnp.dtype(leaf.dtype), is_frozen)
        leaves = (dataclasses.replace(leaf, frozen=f) for leaf, f in zip(group.leaves, of_frozen, strict=True))
        groups.append(dataclasses.replace(group, leaves=tuple(leaves)))
    return dataclasses.replace(layout, groups=tuple(groups))


def _leaf(where: str, value: Any, frozen: bool) -> Leaf:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{where} is {value!r}: a weight must be an array")
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise ValueError(f"{where} is {value.dtype}: keep jax.random.key_data(...) of a key")
    _check_floating(where, value.dtype, frozen)
    held = jax.dtypes.canonicalize_dtype(value.dtype)  # numpy's float64 is held as float32
    return Leaf(where, tuple(value.shape), np.dtype(held).name, frozen=frozen)


def _check_floating(where: str, dtype: Any, frozen: bool) -> None:
    if not frozen and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where} is {dtype}: weights must be floating; freeze it, or carry other data in the batch")


def with_specs(name: str, leaves: Sequence[Leaf], treedef: Any, specs: Mapping[str, Any]) -> list[Leaf]:
    """Return the leaves of a concurrent group, each with its PartitionSpec.

    Raises:
        ValueError: no specs for the group, or some that don't fit it.
    """
    if name not in specs:
        raise ValueError(
            f"group {name!r} is concurrent and has no PartitionSpecs: give specs={{{name!r}: PartitionSpec(...)}}, "
            f"with 'ipu' for the dim that is split and PartitionSpec() for what every IPU holds whole"
        )
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    try:
        whole = jax.tree.broadcast(specs[name], jax.tree.unflatten(treedef, leaves), is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(f"specs[{name!r}] does not fit the group's tree: {error}") from error
    found = []
    for leaf, spec in zip(leaves, jax.tree.leaves(whole, is_leaf=is_spec), strict=True):
        named = [axis for axis in spec if axis is not None] if is_spec(spec) else []
        if (
            not is_spec(spec)
            or any(axis != IPU_AXIS for axis in named)
            or len(named) > 1
            or len(spec) > len(leaf.shape)
        ):
            raise ValueError(
                f"{leaf.path} of shape {leaf.shape} has spec {spec}: give a PartitionSpec of at most "
                f"{len(leaf.shape)} dims, with 'ipu' at most once and None elsewhere"
            )
        found.append(dataclasses.replace(leaf, spec=spec))
    return found


def _assign_slots(groups: list[Group], ipus: int) -> tuple[tuple[Slot, ...], tuple[Group, ...]]:
    owned: list[list[tuple[int, int]]] = [[] for _ in range(ipus)]  # per IPU, (group, leaf) indices
    for g, group in enumerate(groups):
        if group.ipu is not None:
            owned[group.ipu] += [(g, i) for i in range(len(group.leaves))]
    leaf_of = lambda at: groups[at[0]].leaves[at[1]]  # noqa: E731
    slots: list[Slot] = []
    chosen: dict[tuple[int, int], int] = {}
    owners = [leaves for leaves in owned if leaves]
    # first what is alike on every owner, so that like parts are stacked as they are; then the rest by size
    kinds = [{(leaf_of(at).shape, leaf_of(at).dtype) for at in leaves} for leaves in owners]
    for shape, dtype in sorted(set.intersection(*kinds)) if kinds else []:
        rows = [[at for at in leaves if (leaf_of(at).shape, leaf_of(at).dtype) == (shape, dtype)] for leaves in owners]
        for ranked in zip(*rows, strict=False):
            chosen.update(dict.fromkeys(ranked, len(slots)))
            slots.append(Slot(shape, dtype))
    for dtype in sorted({leaf.dtype for group in groups for leaf in group.leaves}):
        rows = [[at for at in leaves if at not in chosen and leaf_of(at).dtype == dtype] for leaves in owners]
        rows = [sorted(row, key=lambda at: -leaf_of(at).size) for row in rows]
        for rank in range(max(map(len, rows), default=0)):
            ranked = [row[rank] for row in rows if rank < len(row)]
            shapes = {leaf_of(at).shape for at in ranked}
            flat = (max(leaf_of(at).size for at in ranked),)
            chosen.update(dict.fromkeys(ranked, len(slots)))
            slots.append(Slot(shapes.pop() if len(shapes) == 1 else flat, dtype))
    placed = tuple(
        dataclasses.replace(
            group,
            leaves=tuple(
                leaf if group.ipu is None else dataclasses.replace(leaf, slot=chosen[g, i])
                for i, leaf in enumerate(group.leaves)
            ),
        )
        for g, group in enumerate(groups)
    )
    return tuple(slots), placed


def specs_of(layout: PackedLayout) -> Sharded:
    """Return the PartitionSpec of every array of a `Sharded` with this layout, as a `Sharded` of specs."""
    concurrent = {g.name: [leaf.spec for leaf in g.leaves] for g in layout.groups if g.ipu is None}
    return Sharded([PartitionSpec(IPU_AXIS)] * len(layout.slots), concurrent, layout)


def empty_sharded(ipus: int) -> Sharded:
    """Return a `Sharded` without groups."""
    return Sharded([], {}, PackedLayout(ipus, (), ()))


def shard_tree(params: Mapping[str, Any], layout: PackedLayout, mesh: Mesh) -> Sharded:
    """Put `{group: pytree}` on the IPUs. Communicates host to device only; an IPU gets what it owns."""
    local: dict[tuple[int, int], tuple[Leaf, Any]] = {}
    concurrent: dict[str, list[Any]] = {}
    for group in layout.groups:
        values = jax.tree.leaves(params[group.name])
        if group.ipu is None:
            concurrent[group.name] = [
                _put(padded(np.asarray(value, leaf.dtype), leaf, layout.ipus), mesh, leaf.spec)
                for leaf, value in zip(group.leaves, values, strict=True)
            ]
        else:
            local.update({(group.ipu, leaf.slot): (leaf, v) for leaf, v in zip(group.leaves, values, strict=True)})
    slots = []
    for k, slot in enumerate(layout.slots):
        whole = np.zeros((layout.ipus, *slot.shape), slot.dtype)
        for ipu in range(layout.ipus):
            if (ipu, k) in local:
                leaf, value = local[ipu, k]
                whole.reshape(layout.ipus, -1)[ipu, : leaf.size] = np.asarray(value).reshape(-1)
        slots.append(_put(whole, mesh, PartitionSpec(IPU_AXIS)))
    return Sharded(slots, concurrent, layout)


def _put(whole: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    # from a callback, and copied: each device takes its own block, and no later change of the host's array reaches it
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index].copy())


def padded(value: np.ndarray, leaf: Leaf, ipus: int) -> np.ndarray:
    """Return `value` with its split dim padded by zeros to a multiple of `ipus`."""
    widths = [(0, -size % ipus if axis == IPU_AXIS else 0) for size, axis in _dims(value.shape, leaf.spec)]
    return np.pad(value, widths) if any(after for _, after in widths) else value


def _dims(shape: Sequence[int], spec: PartitionSpec) -> list[tuple[int, Any]]:
    return [(size, spec[i] if i < len(spec) else None) for i, size in enumerate(shape)]


def local_shape(leaf: Leaf, ipus: int) -> tuple[int, ...]:
    """Return the shape of one IPU's shard of a concurrent leaf."""
    return tuple(-(-size // ipus) if axis == IPU_AXIS else size for size, axis in _dims(leaf.shape, leaf.spec))


def local_shapes(layout: PackedLayout) -> dict[str, Any]:
    """Return `{group: tree of the shapes that one IPU sees}`."""
    return {
        group.name: jax.tree.unflatten(
            group.treedef,
            [
                jax.ShapeDtypeStruct(
                    local_shape(leaf, layout.ipus) if group.ipu is None else leaf.shape, jnp.dtype(leaf.dtype)
                )
                for leaf in group.leaves
            ],
        )
        for group in layout.groups
    }


def unshard_tree(sharded: Sharded) -> dict[str, Any]:
    """Return `{group: pytree}` with its original shapes, without padding: the inverse of `shard_tree`."""
    groups: dict[str, Any] = {}
    slots = [np.asarray(slot) for slot in sharded.slots]
    for group in sharded.layout.groups:
        values = []
        for i, leaf in enumerate(group.leaves):
            if group.ipu is None:
                whole = np.asarray(sharded.concurrent[group.name][i])
                value = whole[tuple(slice(size) for size in leaf.shape)]
            else:
                value = slots[leaf.slot][group.ipu].reshape(-1)[: leaf.size].reshape(leaf.shape)
            values.append(jnp.asarray(value))
        groups[group.name] = jax.tree.unflatten(group.treedef, values)
    return groups


def read(slots: Sequence[jax.Array], group: Group) -> Any:
    """Return the group's tree from this IPU's row of each slot (`slot.shape`), on the owner, inside the program."""
    values = []
    for leaf in group.leaves:
        slot = slots[leaf.slot]
        values.append(slot if slot.shape == leaf.shape else slot.reshape(-1)[: leaf.size].reshape(leaf.shape))
    return jax.tree.unflatten(group.treedef, values)


def write(slots: Sequence[jax.Array], group: Group, values: Any, zero: Any) -> list[jax.Array]:
    """Return the slots with the group's leaves replaced, inside the program, on the owner.

    `zero` is a traced 0: at a constant index XLA rewrites the whole slot.
    """
    written = list(slots)
    for leaf, value in zip(group.leaves, jax.tree.leaves(values), strict=True):
        slot = written[leaf.slot]
        if slot.shape == leaf.shape:
            written[leaf.slot] = value.astype(slot.dtype)
        else:
            flat = jax.lax.dynamic_update_slice(slot.reshape(-1), value.reshape(-1).astype(slot.dtype), (zero,))
            written[leaf.slot] = flat.reshape(slot.shape)
    return written
