"""Decide in which array each leaf is: a slot for the leaves of several IPUs, or an array of its own.

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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Tree
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf, PackedArray, check_weight
from ipu_jax.core.layout.tree_parts import spread
from ipu_jax.core.mesh.axes import names_further, names_in
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS


class _Member(NamedTuple):
    """A leaf of a group, whose numbers are `position`, and where it goes."""

    position: tuple[int, int]
    ipu: int | None
    leaf: Leaf
    frozen: bool
    spec: PartitionSpec


def placed(
    layout: PackedLayout,
    owners: Mapping[str, int | None],
    specs: Mapping[str, Tree],
    ipus: int,
    *,
    frozen: Mapping[str, Tree],
    axes: Mapping[str, int],
) -> PackedLayout:
    """Return a layout with arrays, and with the place of each leaf.

    Args:
        layout: what `PackedLayout.of` or `PackedLayout.by_group` returned.
        owners: per group, its IPU, or None if all IPUs hold it; the layout has the groups in this order.
        specs: per group, a PartitionSpec, or a pytree of PartitionSpecs that is a prefix of the group's. A group that
            all IPUs hold needs one.
        ipus: the number of IPUs of a replica.
        frozen: per group, True or False, or a pytree of bools that is a prefix of the group's. Default: False.
        axes: the sizes of further mesh axes, over which specs can split leaves.

    Raises:
        ValueError: a leaf that gets a gradient is not floating, or a spec or a `frozen` does not fit.
    """
    groups, members = [*map(layout.group, owners)], list[_Member]()
    for g, group in enumerate(groups):
        ipu = owners[group.name]
        given = zip(group.leaves, _frozen_mask(group, frozen), specs_of_group(group, ipu, specs, axes), strict=True)
        members += [_Member((g, i), ipu, *of_leaf) for i, of_leaf in enumerate(given)]
    owned: list[list[_Member]] = [[m for m in members if m.ipu == ipu] for ipu in range(ipus)]
    arrays, array_of = list[PackedArray](), dict[tuple[int, int], int]()
    # leaves that every owner has are stacked first, so that identical stages keep their shapes; then the rest by size
    for match in (_match_by_shape, _match_by_size):
        for array, matched in match([[m for m in own if m.position not in array_of] for own in owned if own]):
            array_of.update(dict.fromkeys((m.position for m in matched), len(arrays)))
            arrays.append(dataclasses.replace(array, name=f"slots.{len(arrays)}"))
    for member in sorted(members, key=lambda m: (groups[m.position[0]].name, m.position)):
        if member.ipu is None:
            array_of[member.position] = len(arrays)
            name = "concurrent.{}.{}".format(*member.position)
            arrays.append(PackedArray(_shard(member, ipus), member.leaf.dtype, member.spec, is_slot=False, name=name))
    leaves: list[list[Leaf]] = [[] for _ in groups]
    for position, ipu, leaf, is_frozen, spec in members:
        at, split = array_of[position], next((dim for dim, axis in enumerate(spec) if axis == IPU_AXIS), None)
        where = {"array": at, "ipus": None if ipu is None else 0, "ipu": ipu, "split": split}
        where["shard"] = None if split is None else arrays[at].shape
        leaves[position[0]].append(dataclasses.replace(leaf, **where, frozen=is_frozen))
    of_leaves = zip(groups, leaves, strict=True)
    held = tuple(dataclasses.replace(group, leaves=tuple(own)) for group, own in of_leaves)
    return dataclasses.replace(layout, ipus=ipus, groups=held, arrays=tuple(arrays))


def _frozen_mask(group: Group, frozen: Mapping[str, Tree]) -> list[bool]:
    """Return, per leaf of a group, whether it is frozen, or raise `ValueError` if one that is not can't be trained."""
    mask = spread(f"frozen[{group.name!r}]", frozen.get(group.name, False), group.treedef)
    for value in mask:
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"frozen[{group.name!r}] holds {value!r}: give True, False, or a tree of them")
    for leaf, is_frozen in zip(group.leaves, mask, strict=True):
        check_weight(leaf.path, jnp.dtype(leaf.dtype), bool(is_frozen))
    return [bool(value) for value in mask]


def with_frozen(layout: PackedLayout, frozen: Mapping[str, Tree]) -> PackedLayout:
    """Return the layout with these leaves frozen and no others; `frozen` is as for `placed`.

    Raises:
        ValueError: a `frozen` does not fit, or a leaf that gets a gradient is not floating.
    """
    masks = itertools.chain.from_iterable([_frozen_mask(group, frozen) for group in layout.groups])
    return layout.changed(lambda leaf: dataclasses.replace(leaf, frozen=next(masks)))


def specs_of_group(
    group: Group, ipu: int | None, specs: Mapping[str, Tree], axes: Mapping[str, int]
) -> list[PartitionSpec]:
    """Return the PartitionSpec of each leaf of a group. A group on one IPU needs none.

    Raises:
        ValueError: a group of all IPUs has no specs, or they do not fit the group or the further axes of the mesh.
    """
    name = group.name
    if name not in specs and ipu is not None:
        return [WHOLE for _ in group.leaves]
    if name not in specs:
        raise ValueError(
            f"group {name!r} is concurrent and has no PartitionSpecs: give specs={{{name!r}: PartitionSpec(...)}}, "
            f"with 'ipu' for the dim that is split and PartitionSpec() for what every IPU holds whole"
        )
    is_spec = lambda x: isinstance(x, PartitionSpec)
    given = zip(group.leaves, spread(f"specs[{name!r}]", specs[name], group.treedef, is_spec), strict=True)
    found = [spec if leaf.split is None else _over_ipus(leaf, spec) for leaf, spec in given]
    for leaf, spec in zip(group.leaves, found, strict=True):
        _check_spec(leaf, spec, ipu, axes)
    return [spec if any(map(names_in, spec)) else WHOLE for spec in found]  # P(None, None) is too long for a flat slot


def _over_ipus(leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
    """Return a spec that splits a leaf over the IPUs as the function does from which its stages were cut."""
    entries, dim = [*spec, *[None] * (len(leaf.shape) - len(spec))], leaf.split or 0
    if entries[dim] is not None:
        raise ValueError(
            f"specs split dim {dim} of {leaf.path} over {entries[dim]!r}, and everywhere splits it over 'ipu': split "
            "another dim"
        )
    return PartitionSpec(*entries[:dim], IPU_AXIS, *entries[dim + 1 :])


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


def _match_by_shape(owners: list[list[_Member]]) -> Iterator[tuple[PackedArray, Sequence[_Member]]]:
    """Yield a slot for each set of leaves of one shape, dtype and spec to which every owner contributes one leaf."""
    if not owners:
        return
    kind = lambda m: (m.leaf.shape, m.leaf.dtype, m.spec)
    kinds = [{kind(m) for m in members} for members in owners]
    for one in sorted(set.intersection(*kinds), key=lambda kind: (*kind[:2], str(kind[2]))):
        equal = [[m for m in members if kind(m) == one] for members in owners]
        for matched in zip(*equal, strict=False):  # leaves left over on some owners are matched by size
            yield PackedArray(*one), matched


def _match_by_size(owners: list[list[_Member]]) -> Iterator[tuple[PackedArray, Sequence[_Member]]]:
    """Yield, per dtype, a slot for the largest leaf of each owner, then one for the second largest, and so on.

    Leaves that are split over further axes are matched with their like only.
    """
    kind = lambda m: (m.leaf.dtype, str(m.spec), m.leaf.shape if names_further(m.spec) else ())
    for one in sorted({kind(m) for members in owners for m in members}):
        by_size = [sorted((m for m in members if kind(m) == one), key=lambda m: -m.leaf.size) for members in owners]
        for row in itertools.zip_longest(*by_size):
            matched = [m for m in row if m is not None]
            shapes = {m.leaf.shape for m in matched}
            flat = (max(m.leaf.size for m in matched),)
            yield PackedArray(shapes.pop() if len(shapes) == 1 else flat, one[0], matched[0].spec), matched


def _shard(member: _Member, ipus: int) -> tuple[int, ...]:
    """Return the shape of what each IPU has of a leaf that all of them hold."""
    sizes = zip(member.leaf.shape, (*member.spec, *[None] * len(member.leaf.shape)), strict=False)
    return tuple(-(-size // ipus) if axis == IPU_AXIS else size for size, axis in sizes)
