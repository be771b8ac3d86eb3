"""Decide where each weight goes: packed arrays for the stages of one IPU, shards for concurrent stages.

Every IPU runs the same program, so the arguments have the same shapes on every IPU; but IPU 0 may own an MLP and IPU 1
a classifier. The leaves of all IPUs are therefore matched into *slots*, arrays with a leading `ipu` dim:

                 slot 0 (2560x1280 flat)     slot 1 (784x2560)   slot 2 (2560)   slot 3 (1280)
        IPU 0    MLP layer 1 weights         layer 0 weights     layer 0 bias    layer 1 bias
        IPU 1    classifier weights, 0 …     0 …                 classifier bias, 0 …

A slot whose leaves all have the same shape keeps that shape, and reading it costs nothing: identical stages are simply
stacked. Any other slot is flat and as long as its largest leaf; reading a leaf is then a reshape, of a prefix if the
leaf is smaller than the slot. So the bytes of an IPU are the sum over all slots of the largest leaf in each slot. That
is the size of the IPU's own weights if the stages are balanced, and never the sum over all stages. Leaves of concurrent
groups are split by their PartitionSpecs; a split dim that is not divisible by the number of IPUs is padded with zeros.

A leaf that is split over further mesh axes never lies in a flat slot, and shares its slot with leaves of the same shape
and spec only. A slot is then `(ipus, *whole shape)`, split by `P("ipu", *spec)`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Dtype, Params, Tree, Value
from ipu_jax.core.layout.whole_tree import WholeTree, Within, is_rows, spread
from ipu_jax.core.mesh.axes import names_further, names_in
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS

WHOLE = PartitionSpec()
_REPLACED: Final = "_overwrite_with_gradient"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A packed array: `(ipus, *shape)` globally, `shape` on each IPU, split over further mesh axes by `spec`."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = WHOLE


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A weight: its shape and dtype, and where it is.

    A leaf of a local group is in slot number `slot`. `spec` says how a leaf of a concurrent group is split over the
    IPUs, and any leaf over further mesh axes. A `frozen` leaf gets no gradient. If it is only a part of a leaf of
    the user's tree, `rows` says where it is there.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    slot: int = -1
    spec: PartitionSpec = WHOLE
    frozen: bool = False
    rows: Within | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the user's leaf, of which this may be a part."""
        return self.shape if self.rows is None else self.rows.whole_shape(self.shape)


@dataclasses.dataclass(frozen=True)
class Group:
    """A parameter group. `ipu` is the IPU that owns it, or None if the group is concurrent."""

    name: str
    ipu: int | None
    treedef: Any
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The place of every leaf of every group. It is hashable, and the static part of a `Sharded`.

    `whole` describes the user's tree if it is not `{group: pytree}`.
    """

    ipus: int
    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    whole: WholeTree | None = None

    @property
    def concurrent(self) -> list[Group]:
        return [group for group in self.groups if group.ipu is None]

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def groups_of(self, tree: Tree) -> dict[str, list[Value]]:
        """Return each group's leaves from a tree of whole arrays, the user's or `{group: pytree}`."""
        if self.whole is not None:
            return self.whole.split(tree)
        return {group.name: jax.tree.leaves(tree[group.name]) for group in self.groups}

    def arranged(self, leaves: Mapping[str, Sequence[Value]]) -> Tree:
        """Return the *logical* tree of values that the leaves of the groups have, in order.

        It is `{group: pytree}`, or the user's tree with `Rows` where a leaf is in several groups.
        """
        if self.whole is not None:
            return self.whole.join(leaves)
        return {group.name: jax.tree.unflatten(group.treedef, leaves[group.name]) for group in self.groups}

    def assembled(self, leaves: Sequence[Value]) -> Tree:
        """Return the user's tree from its whole leaves, in the order in which the groups name them first."""
        paths = dict.fromkeys(leaf.path for group in self.groups for leaf in group.leaves)
        at = dict(zip(paths, leaves, strict=True))
        if self.whole is not None:
            return jax.tree.unflatten(self.whole.treedef, [at[path] for path in self.whole.paths])
        return {g.name: jax.tree.unflatten(g.treedef, [at[leaf.path] for leaf in g.leaves]) for g in self.groups}

    def frozen_leaves(self) -> list[bool]:
        """Return, per leaf of the logical tree, whether it gets no gradient."""
        return jax.tree.leaves(self.arranged({g.name: [leaf.frozen for leaf in g.leaves] for g in self.groups}))

    def frozen_whole_leaves(self) -> list[bool]:
        """Return, per leaf of the user's tree, whether it gets no gradient."""
        tree = self.arranged({g.name: [leaf.frozen for leaf in g.leaves] for g in self.groups})
        return [all(leaf.parts) if is_rows(leaf) else leaf for leaf in jax.tree.leaves(tree, is_leaf=is_rows)]

    def trained_leaves(self, tree: Tree) -> list[Value]:
        """Return the leaves of the logical tree that get a gradient, from a tree of whole arrays."""
        leaves = jax.tree.leaves(self.arranged(self.groups_of(tree)))
        return [leaf for leaf, is_frozen in zip(leaves, self.frozen_leaves(), strict=True) if not is_frozen]

    @property
    def trainable_slots(self) -> frozenset[int]:
        """Return the numbers of the slots that contain a leaf that gets a gradient."""
        return frozenset(leaf.slot for g in self.groups if g.ipu is not None for leaf in g.leaves if not leaf.frozen)


def plan_layout(
    params: Mapping[str, Params],
    owners: Mapping[str, int | None],
    specs: Mapping[str, Tree],
    ipus: int,
    *,
    frozen: Mapping[str, Tree] | None = None,
    what: str = "params",
    whole: WholeTree | None = None,
    axes: Mapping[str, int] | None = None,
) -> PackedLayout:
    """Decide where each leaf goes.

    Args:
        params: `{group: pytree of arrays}`, the whole (unsharded) weights.
        owners: per group, its IPU, or None if it is concurrent.
        specs: per group, a PartitionSpec, or a pytree of PartitionSpecs that is a prefix of the group's. A concurrent
            group needs one.
        ipus: the number of IPUs of a replica.
        frozen: per group, True or False, or a pytree of bools that is a prefix of the group's. Default: False.
        what: the name of `params` in error messages, "params" or "state". Leaves of a state may have any dtype.
        whole: the user's tree, if `params` was split from it.
        axes: the sizes of further mesh axes, over which specs can split leaves.

    Returns:
        The `PackedLayout`.

    Raises:
        ValueError: groups are missing or unknown, a leaf is not an array, a leaf that gets a gradient is not floating,
            or a spec or a `frozen` does not fit.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"{what} is a {type(params).__name__}: give a dict of whole arrays for groups {[*owners]}")
    missing, unknown = sorted(owners.keys() - params.keys()), sorted(params.keys() - owners.keys())
    if missing or unknown:
        both = {"missing": missing, "unknown": unknown}
        wrong = "; ".join(f"{word} {', '.join(map(repr, names))}" for word, names in both.items() if names)
        raise ValueError(f"{what}: {wrong}. The stages name the groups {', '.join(map(repr, sorted(owners)))}")
    groups = []
    for name, ipu in owners.items():
        paths, treedef = jax.tree.flatten_with_path(params[name])
        mask = _frozen_mask(name, treedef, (frozen or {}).get(name, what == "state"))
        named = [f"{what}[{name!r}]{jax.tree_util.keystr(path)}" for path, _ in paths]
        rows: list[Within | None] = [None] * len(paths)
        if whole is not None:
            named, rows = whole.named(name)
        leaves = [
            _leaf(path, value, is_frozen, of_rows)
            for path, (_, value), is_frozen, of_rows in zip(named, paths, mask, rows, strict=True)
        ]
        groups.append(with_specs(Group(name, ipu, treedef, tuple(leaves)), specs, axes or {}))
    slots, groups = _assign_slots(groups, ipus)
    return PackedLayout(ipus, groups, slots, whole)


def _frozen_mask(name: str, treedef: Any, frozen: Tree) -> list[bool]:
    mask = spread(f"frozen[{name!r}]", frozen, treedef)
    for value in mask:
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"frozen[{name!r}] holds {value!r}: give True, False, or a tree of them")
    return [bool(value) for value in mask]


def with_frozen(layout: PackedLayout, frozen: Mapping[str, Tree]) -> PackedLayout:
    """Return the layout with these leaves frozen and no others; `frozen` is as in `plan_layout`.

    Raises:
        ValueError: a `frozen` does not fit, or a leaf that gets a gradient is not floating.
    """
    groups = []
    for group in layout.groups:
        mask = _frozen_mask(group.name, group.treedef, frozen.get(group.name, False))
        leaves = []
        for leaf, is_frozen in zip(group.leaves, mask, strict=True):
            check_weight(leaf.path, jnp.dtype(leaf.dtype), is_frozen)
            leaves.append(dataclasses.replace(leaf, frozen=is_frozen))
        groups.append(dataclasses.replace(group, leaves=tuple(leaves)))
    found = dataclasses.replace(layout, groups=tuple(groups))
    return layout if found == layout else found


def check_array(where: str, value: Value) -> None:
    """Raise `ValueError` unless `value` is an array that IPUs can hold, or has the shape and dtype of one."""
    dtype = getattr(value, "dtype", None)
    is_number = isinstance(dtype, np.dtype) and dtype.isnative and jnp.issubdtype(dtype, jnp.number)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or is_number or dtype == np.bool_:
        return
    if isinstance(value, (str, bytes)):
        raise ValueError(
            f"{where} is {value!r:.60}, a text, and must be an array of numbers: give the numbers of its tokens, or "
            "leave it out"
        )
    if dtype is None and callable(value):
        raise ValueError(f"{where} is a function, {value!r:.60}: leave it out, and let the function name it itself")
    if isinstance(value, (bool, int, float, complex)):
        # a list is a tree of its numbers
        array = f"np.asarray({where.partition('[0]')[0]})"
        raise ValueError(f"{where} is {value!r:.60}, and must be an array of numbers: give {array}")
    if isinstance(dtype, np.dtype):
        raise ValueError(f"{where} has dtype {dtype}: IPUs hold numbers and bools, in native byte order: convert it")
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    mend = "tensor.numpy()" if hasattr(value, "numpy") else "np.asarray(...), or batch.data of a FeedBatch"
    raise ValueError(f"{where} is a {kind}, and must be a NumPy or jax array: give {mend}")


def _leaf(where: str, value: Value, frozen: bool, rows: Within | None) -> Leaf:
    check_array(where, value)
    check_weight(where, value.dtype, frozen)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)  # jax stores numpy's float64 as float32
    return Leaf(where, tuple(value.shape), np.dtype(dtype).name, frozen=frozen, rows=rows)


def check_weight(where: str, dtype: Dtype, frozen: bool = False) -> None:
    """Raise `ValueError` unless a leaf of this dtype can be trained, or is frozen and can be held."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ValueError(
            f"{where} is {dtype}: a key is not held among numbers; hold jax.random.key_data(...) of it, or let the "
            "function take a key"
        )
    if frozen:
        return
    if _REPLACED in where:
        raise ValueError(
            f"{where} is in Flax's collection {_REPLACED!r}: its gradient is its new value, which an optimizer would "
            "take for a gradient. Freeze it, and the scales stay as they are (of a cut function, frozen={'params': "
            f"False, {_REPLACED!r}: True}}), or compute in bfloat16"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"{where} is {dtype}: weights must be real; hold two real leaves, and join them in the function, "
            "jax.lax.complex(re, im)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where} is {dtype}: weights must be floating; freeze it, or carry other data in the batch")
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{where} is {dtype}: weights that are trained must have at least 16 bits; hold it in bfloat16 and cast "
            "it in the function, or freeze it"
        )


def with_specs(group: Group, specs: Mapping[str, Tree], axes: Mapping[str, int]) -> Group:
    """Return a group whose leaves have the PartitionSpecs of the group. A local group needs none.

    Raises:
        ValueError: a concurrent group has no specs, or they do not fit the group or the further axes of the mesh.
    """
    name = group.name
    if name not in specs:
        if group.ipu is not None:
            return group
        raise ValueError(
            f"group {name!r} is concurrent and has no PartitionSpecs: give specs={{{name!r}: PartitionSpec(...)}}, "
            f"with 'ipu' for the dim that is split and PartitionSpec() for what every IPU holds whole"
        )
    is_spec = lambda x: isinstance(x, PartitionSpec)
    leaves = []
    for leaf, spec in zip(group.leaves, spread(f"specs[{name!r}]", specs[name], group.treedef, is_spec), strict=True):
        _check_spec(leaf, spec, group.ipu, axes)
        leaves.append(dataclasses.replace(leaf, spec=spec))
    return dataclasses.replace(group, leaves=tuple(leaves))


def _check_spec(leaf: Leaf, spec: Any, ipu: int | None, axes: Mapping[str, int]) -> None:
    where, why, mend = f"{leaf.path} of shape {leaf.shape} has spec {spec}", "", ""
    named = [axis for entry in spec for axis in names_in(entry)] if isinstance(spec, PartitionSpec) else []
    twice = [axis for k, axis in enumerate(named) if axis in named[:k]]
    unknown = [axis for axis in named if axis not in (IPU_AXIS, *axes)]
    if not isinstance(spec, PartitionSpec):
        why = "it is not a PartitionSpec"
    elif REPLICA_AXIS in unknown:
        why = "every replica holds its weights whole"
    elif unknown:
        why = f"the mesh has no axis {unknown[0]!r}"
        if isinstance(unknown[0], str):
            mend = f", or a mesh with that axis, make_mesh(replicas, ipus_per_replica, {unknown[0]}=2)"
    elif twice:
        why = f"{twice[0]!r} splits it twice"
    elif len(spec) > len(leaf.shape):
        why = f"it has no dim {len(leaf.shape)}"
    if why:
        once = " and ".join(map(repr, axes if ipu is not None else (IPU_AXIS, *axes)))
        raise ValueError(
            f"{where}: {why}; give a PartitionSpec of at most {len(leaf.shape)} dims, with {once} at most once and "
            f"None elsewhere{mend}"
        )
    if IPU_AXIS in named and ipu is not None:
        raise ValueError(
            f"{where}, but its group is on IPU {ipu}: 'ipu' splits groups of concurrent stages only; name a further "
            "axis, or make the stage concurrent (ipu=ALL_IPUS)"
        )
    for dim, entry in enumerate(spec):
        over = [axis for axis in names_in(entry) if axis != IPU_AXIS]
        if over and IPU_AXIS in names_in(entry):
            raise ValueError(f"{where}: dim {dim} is split over 'ipu' and {over[0]!r}; give each a dim of its own")
        parts = math.prod(axes[axis] for axis in over)
        if leaf.shape[dim] % parts:
            sizes = " x ".join(f"{axis}={axes[axis]}" for axis in over)
            raise ValueError(
                f"{where}: dim {dim} is not divisible by {sizes}; choose a size that is, or leave the dim whole"
            )


class _Member(NamedTuple):
    """A leaf of a local group. Its position is the pair of the group's number and its own number in the group."""

    position: tuple[int, int]
    leaf: Leaf


def _assign_slots(groups: list[Group], ipus: int) -> tuple[tuple[Slot, ...], tuple[Group, ...]]:
    """Return the slots, and the groups with the slot of each local leaf filled in."""
    members_of_ipu: list[list[_Member]] = [[] for _ in range(ipus)]
    for g, group in enumerate(groups):
        if group.ipu is not None:
            members_of_ipu[group.ipu] += [_Member((g, i), leaf) for i, leaf in enumerate(group.leaves)]
    owners = [members for members in members_of_ipu if members]

    # leaves that every owner has are stacked first, so that identical stages keep their shapes; then the rest by size
    slots: list[Slot] = []
    slot_of: dict[tuple[int, int], int] = {}
    for match in (_match_by_shape, _match_by_size):
        unassigned = [[m for m in members if m.position not in slot_of] for members in owners]
        for slot, matched in match(unassigned):
            slot_of.update(dict.fromkeys((m.position for m in matched), len(slots)))
            slots.append(slot)
    placed = []
    for g, group in enumerate(groups):
        leaves = (dataclasses.replace(leaf, slot=slot_of.get((g, i), -1)) for i, leaf in enumerate(group.leaves))
        placed.append(dataclasses.replace(group, leaves=tuple(leaves)))
    return tuple(slots), tuple(placed)


def _match_by_shape(owners: list[list[_Member]]) -> Iterator[tuple[Slot, Sequence[_Member]]]:
    """Yield a slot for each set of leaves of one shape, dtype and spec to which every owner contributes one leaf."""
    if not owners:
        return
    kind = lambda m: (m.leaf.shape, m.leaf.dtype, m.leaf.spec)
    kinds = [{kind(m) for m in members} for members in owners]
    for one in sorted(set.intersection(*kinds), key=lambda kind: (*kind[:2], str(kind[2]))):
        equal = [[m for m in members if kind(m) == one] for members in owners]
        for matched in zip(*equal, strict=False):  # leaves left over on some owners are matched by size
            yield Slot(*one), matched


def _match_by_size(owners: list[list[_Member]]) -> Iterator[tuple[Slot, Sequence[_Member]]]:
    """Yield, per dtype, a slot for the largest leaf of each owner, then one for the second largest, and so on.

    Leaves that are split over further axes are matched with their like only.
    """
    kind = lambda leaf: (leaf.dtype, str(leaf.spec), leaf.shape if names_further(leaf.spec) else ())
    for one in sorted({kind(m.leaf) for members in owners for m in members}):
        by_size = [
            sorted((m for m in members if kind(m.leaf) == one), key=lambda m: -m.leaf.size) for members in owners
        ]
        for row in itertools.zip_longest(*by_size):
            matched = [m for m in row if m is not None]
            shapes = {m.leaf.shape for m in matched}
            flat = (max(m.leaf.size for m in matched),)
            yield Slot(shapes.pop() if len(shapes) == 1 else flat, one[0], matched[0].leaf.spec), matched


def dims_with_axes(shape: Sequence[int], spec: PartitionSpec) -> list[tuple[int, Any]]:
    """Return, per dim, its size and the mesh axis over which it is split, or None."""
    return [(size, spec[i] if i < len(spec) else None) for i, size in enumerate(shape)]


def local_shape(leaf: Leaf, ipus: int) -> tuple[int, ...]:
    """Return the shape of one IPU's shard of a concurrent leaf; a leaf on one IPU has its own shape."""
    return tuple(-(-size // ipus) if axis == IPU_AXIS else size for size, axis in dims_with_axes(leaf.shape, leaf.spec))


def local_shapes(layout: PackedLayout) -> dict[str, Tree]:
    """Return `{group: tree of the shapes and dtypes that one IPU sees}`."""
    shape = lambda leaf: jax.ShapeDtypeStruct(local_shape(leaf, layout.ipus), jnp.dtype(leaf.dtype))
    return {group.name: jax.tree.unflatten(group.treedef, map(shape, group.leaves)) for group in layout.groups}
