"""Decide where the leaves of a pipeline's weights are, or of its state: per group, its IPU and how it is split."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.base.checks import nearest
from ipu_jax.core.layout.arrays import placed, specs_of_group, with_frozen
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE
from ipu_jax.core.layout.packing import Sharded, check_alive
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.stage import Stage

_MOST_KNOWN: Final = 32  # layouts that were checked


class LayoutRule:
    """Decide where the leaves of one tree are.

    Args:
        what: the name of the tree, "params" or "state".
        owners: per group, its IPU, or None if all IPUs hold it.
        ipus: the number of IPUs of a replica.
        axes: the sizes of the mesh's further axes.
        specs, frozen: per group, as for `placed`.
        tree: the layout of the user's tree before it is placed, if stages were cut of a function; else None, and the
            tree is `{group: pytree}`.
    """

    def __init__(
        self,
        what: str,
        owners: dict[str, int | None],
        ipus: int,
        axes: Mapping[str, int],
        specs: Mapping[str, Tree],
        frozen: Mapping[str, Tree],
        tree: PackedLayout | None,
    ):
        self.what, self.owners, self._tree = what, owners, tree
        self._how: dict[str, Any] = {"specs": specs, "ipus": ipus, "frozen": frozen, "axes": axes}
        self._known: dict[tuple[str, int], tuple[PackedLayout, Any]] = {}
        self._placed = None if tree is None else placed(tree, owners, **self._how)  # raises if `specs` do not fit

    def layout(self, tree: Tree) -> PackedLayout:
        """Return where each leaf of a whole tree goes, or raise the `ValueError` that `Pipeline.shard` raises."""
        what = self.what
        if isinstance(tree, Sharded):
            raise ValueError(
                f"{what} is placed already: use it as it is, or give the whole tree, pipeline.unshard({what})"
            )
        given = PackedLayout.by_group(what, tree, [*self.owners]) if self._tree is None else self._tree.like(tree)
        if self._placed is not None and given is self._tree:
            return self._placed
        return placed(given, self.owners, **self._how)

    def check(self, sharded: Tree) -> None:
        """Raise `ValueError` unless a tree was sharded by this rule, but for what is frozen, and is alive."""
        what, call = self.what, "shard" if self.what == "params" else "shard_state"
        if sharded is None and what == "state":
            if self._tree is not None:
                raise ValueError("state is missing: pass state=pipeline.shard_state(...)")
            names = ", ".join(map(repr, sorted(self.owners)))
            raise ValueError(f"state is missing: pass state=pipeline.shard_state({{...}}) with the groups {names}")
        if not isinstance(sharded, Sharded):
            raise ValueError(f"{what} is a {type(sharded).__name__}: pass what pipeline.{call}(...) returns")
        self._once("fits", self._check_layout, sharded.layout)
        self.as_trained(sharded.layout)  # raises if `frozen` does not fit
        check_alive(what, sharded)

    def _check_layout(self, layout: PackedLayout) -> bool:
        what, owners = self.what, self.owners
        others = [group for group in layout.groups if {leaf.ipu for leaf in group.leaves} - {owners.get(group.name)}]
        if others or {group.name for group in layout.groups} != {*owners} or layout.ipus != self._how["ipus"]:
            raise ValueError(f"{what} were sharded by a pipeline with other groups or IPUs: shard them with this one")
        if self._tree is not None and (other := _other_than(self._tree, layout)):
            raise ValueError(
                f"{what} were sharded for another function: {other}; shard them for this one, which takes whole trees, "
                "as unshard returns them"
            )
        as_cut = self._tree or layout.changed(lambda leaf: dataclasses.replace(leaf, split=None))
        for group in layout.groups:
            specs = specs_of_group(as_cut.group(group.name), owners[group.name], self._how["specs"], self._how["axes"])
            if [*map(layout.spec, group.leaves)] != specs:
                raise ValueError(f"{what} were sharded by a pipeline with other specs: shard them with this one")
        return True

    def as_trained(self, layout: PackedLayout) -> PackedLayout:
        """Return the layout of weights, sharded by any pipeline, with exactly the leaves frozen that `frozen` names.

        Raises:
            ValueError: `frozen` does not fit the weights, or a leaf that is trained is not floating.
        """
        return self._once("trained", lambda layout: with_frozen(layout, self._how["frozen"]), layout)

    def _once(self, what: str, fn: Callable[[PackedLayout], Any], layout: PackedLayout) -> Any:
        """Return `fn(layout)`, which a step's calls ask again and again for the same few layouts."""
        about = what, id(layout)  # no other layout gets the id of one that is kept
        if about not in self._known:
            result = fn(layout)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[about] = layout, result
        return self._known[about][1]


def rule_of_weights(
    stages: tuple[Stage, ...],
    ipus: int,
    axes: Mapping[str, int],
    *,
    specs: Tree = None,
    frozen: Tree = None,
    tree: PackedLayout | None = None,
) -> LayoutRule:
    """Return where the weights of a pipeline are.

    Args:
        stages: the model.
        ipus: the number of IPUs of a replica.
        axes: the sizes of the mesh's further axes.
        specs, frozen: as for `Pipeline`: prefixes of the user's tree. By default every IPU holds a shared group whole.
        tree: as for `LayoutRule`.

    Raises:
        ValueError: a group is on several IPUs, an argument names a group that does not exist, or `specs` split a group
            that a local stage shares.
    """
    owners = _owners_of(stages)
    whole = {name: WHOLE for stage in stages for name in stage.shared}
    if tree is not None and specs is not None:
        specs = tree.spread("specs", specs, lambda leaf: isinstance(leaf, PartitionSpec))
    of_groups = whole | _specs_for(owners, "specs", specs, axes)
    if tree is not None:
        of_groups = {name: WHOLE for name, ipu in owners.items() if ipu is None} | of_groups
        frozen = tree.spread("frozen", False if frozen is None else frozen)
    _check_shared(stages, of_groups)
    return LayoutRule("params", owners, ipus, axes, of_groups, _by_group("frozen", frozen, owners), tree)


def rule_of_state(
    stages: tuple[Stage, ...],
    ipus: int,
    axes: Mapping[str, int],
    *,
    specs: Tree = None,
    tree: PackedLayout | None = None,
) -> LayoutRule:
    """Return where the state of a pipeline is: by default, the state of a concurrent stage is whole on every IPU.

    Raises:
        ValueError: two stages name one group, or `specs` name a group that does not exist.
    """
    owners = _state_owners_of(stages)
    whole = {name: WHOLE for name, place in owners.items() if place is None}
    specs = whole | _specs_for(owners, "state_specs", specs, axes)
    return LayoutRule("state", owners, ipus, axes, specs, dict.fromkeys(owners, True), tree)


def _other_than(tree: PackedLayout, layout: PackedLayout) -> str | None:
    """Return what a layout has otherwise than the tree for which a function was cut, or None if it fits."""
    if layout.treedef.num_leaves != tree.treedef.num_leaves or layout.paths != tree.paths:
        return "it has a tree with other leaves"
    for (here, *_), (there, *_) in zip(tree.parts, layout.parts, strict=True):
        one, other = (f"{leaf.dtype}{[*leaf.whole_shape]}" for leaf in (there, here))
        if one != other:
            return f"{here.path} is {one} there, and {other} here"
    for group in tree.groups:
        here, there = (", ".join(map(str, of.group(group.name).leaves)) for of in (tree, layout))
        if here != there:
            return f"{group.name} holds {there} there, and {here} here"
    return None


def _by_group(what: str, value: Value, owners: Mapping[str, Tree]) -> dict[str, Any]:
    """Return an argument with an entry per group as a dict.

    Raises:
        ValueError: it is neither a mapping nor None, or it names a group that no stage names.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{what}={value!r} does not say which group it is for: give {{'group': ...}}")
    given = dict(value or {})
    for name in sorted(given.keys() - owners.keys()):
        kind, there = ("state" if what == "state_specs" else "params"), ", ".join(map(repr, sorted(owners)))
        hint = nearest(name, owners) or f"leave it out, or name it in Stage(..., {kind}=); there are {there or 'none'}"
        raise ValueError(f"{what} for {name!r}: no stage names such a group: {hint}")
    return given


def _specs_for(owners: dict[str, int | None], what: str, value: Value, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return specs as a dict; raise `ValueError` if `axes` is empty and they split groups of local stages."""
    specs = _by_group(what, value, owners)
    local = sorted(name for name in specs if owners[name] is not None)
    if local and not axes:
        raise ValueError(
            f"{what} for {', '.join(map(repr, local))}: only groups of concurrent stages are split over IPUs; to split "
            "others, give the mesh a further axis, make_mesh(replicas, ipus_per_replica, tensor=2)"
        )
    return specs


def _check_shared(stages: tuple[Stage, ...], specs: Mapping[str, Tree]) -> None:
    """Raise `ValueError` if `specs` split a group that a local stage shares: it would see one IPU's part."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    for stage in stages:
        for name in stage.shared if stage.place is not None else ():
            for spec in jax.tree.leaves(specs[name], is_leaf=is_spec):
                if is_spec(spec) and IPU_AXIS in spec:
                    raise ValueError(
                        f"specs[{name!r}] holds {spec}, but stage {stage.name!r} on IPU {stage.place} shares the "
                        "group, so every IPU holds it whole: give PartitionSpec(), or leave it out of specs"
                    )


def _owners_of(stages: tuple[Stage, ...]) -> dict[str, int | None]:
    """Return, per group, the IPU of its stages, or None if they are concurrent or share it.

    Raises:
        ValueError: a group is used on two IPUs, both on an IPU and by concurrent stages, or both on an IPU and shared.
    """
    owners: dict[str, int | None] = {}
    for stage in stages:
        if stage.params is None:
            continue
        if owners.setdefault(stage.params, stage.place) != stage.place:
            here, there = (
                "ALL_IPUS" if place is None else f"IPU {place}" for place in (owners[stage.params], stage.place)
            )
            raise ValueError(
                f"group {stage.params!r} is used on {here} and on {there}: a group lives on one IPU, or is shared by "
                "concurrent stages; put its stages on one IPU, make them all concurrent, give each its own group, or "
                f"let every IPU hold it whole, Stage(..., shared=({stage.params!r},)) without params"
            )
    for stage in stages:
        for name in stage.shared:
            if owners.setdefault(name, None) is not None:
                own = next(other for other in stages if other.params == name)
                raise ValueError(
                    f"group {name!r} is shared by stage {stage.name!r}, and the params of stage {own.name!r} on IPU "
                    f"{own.place}: every IPU holds a shared group; let {own.name!r} read it by shared=({name!r},), too"
                )
    return owners


def _state_owners_of(stages: tuple[Stage, ...]) -> dict[str, int | None]:
    """Return, per state group, the IPU of its stage, or None if the stage is concurrent.

    Raises:
        ValueError: two stages name the same state group.
    """
    owners: dict[str, int | None] = {}
    for stage in stages:
        if stage.state is None:
            continue
        if stage.state in owners:
            raise ValueError(
                f"state {stage.state!r} is named by two stages: the schedule would decide the order of their updates; "
                "give each stage its own"
            )
        owners[stage.state] = stage.place
    return owners
