"""Describe a pipeline's groups of weights and state: where they are, how they are split, and what is frozen."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Params, Tree, Value
from ipu_jax.base.checks import nearest
from ipu_jax.core.layout.packed_layout import WHOLE, PackedLayout, plan_layout, with_frozen, with_specs
from ipu_jax.core.layout.packing import Sharded, check_alive
from ipu_jax.core.layout.whole_tree import Part, WholeTree
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.stage import Stage

_MOST_KNOWN: Final = 32  # layouts that were checked


class Groups:
    """The groups of a pipeline.

    Args:
        stages: the model.
        ipus: the number of IPUs of a replica.
        axes: the sizes of the mesh's further axes.
        specs, state_specs, frozen: as for `Pipeline`.
        whole, whole_state: the user's trees, if they are not `{group: pytree}`.
        over_ipus: the parts of the user's weights that lie split over the IPUs, and the dim of each.

    Attributes:
        owners, state_owners: per group, its IPU, or None if its stages are concurrent or share it.
        given_frozen, given_specs: as given.
        specs, frozen: per group, as given; by default, every IPU holds a shared group whole.
        state_specs: per group; by default, every IPU holds the state of a concurrent stage whole.

    Raises:
        ValueError: a group is on several IPUs, an argument names a group that does not exist, or `specs` split a group
            that a local stage shares.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        ipus: int,
        axes: Mapping[str, int],
        *,
        specs: Tree,
        state_specs: Tree,
        frozen: Tree,
        whole: WholeTree | None = None,
        whole_state: WholeTree | None = None,
        over_ipus: Mapping[Part, int] | None = None,
    ):
        self.ipus, self.axes, self.given_frozen, self.given_specs = ipus, axes, frozen, specs
        self._known: dict[tuple[str, int], tuple[PackedLayout, Any]] = {}
        self._whole, self._whole_state = whole, whole_state
        self.owners, self.state_owners = _owners_of(stages), _state_owners_of(stages)
        shared = {name: PartitionSpec() for stage in stages for name in stage.shared}
        if whole is not None and specs is not None:
            specs = whole.spread("specs", specs, lambda leaf: isinstance(leaf, PartitionSpec))
        self.specs = shared | _specs_for(self.owners, "specs", specs, axes)
        if whole is not None:
            self.specs |= _split_over_ipus(whole, over_ipus or {}, self.owners, self.specs)
        _check_shared(stages, self.specs)
        unsplit = {name: PartitionSpec() for name, place in self.state_owners.items() if place is None}
        self.state_specs = unsplit | _specs_for(self.state_owners, "state_specs", state_specs, axes)
        if whole is not None:
            frozen = whole.spread("frozen", False if frozen is None else frozen)
        self.frozen = _by_group("frozen", frozen, self.owners)

    def layout(self, params: Params) -> PackedLayout:
        """Return where each leaf of whole weights goes."""
        whole = self._whole
        _check_not_placed("params", params)
        params = params if whole is None else whole.split(params)
        return plan_layout(params, self.owners, self.specs, self.ipus, frozen=self.frozen, whole=whole, axes=self.axes)

    def state_layout(self, state: Tree) -> PackedLayout:
        """Return where each leaf of whole state goes."""
        whole = self._whole_state
        _check_not_placed("state", state)
        state = state if whole is None else whole.split(state)
        return plan_layout(
            state, self.state_owners, self.state_specs, self.ipus, what="state", whole=whole, axes=self.axes
        )

    def check(self, params: Params, state: Tree) -> None:
        """Raise `ValueError` unless `params` and `state` were sharded for these groups, and are alive.

        The state is None if no stage has state.
        """
        self.check_params(params)
        if not self.state_owners:
            if state is not None:
                raise ValueError(
                    "state was given, but no stage holds any: name its group, Stage(..., state='name'), or cut a "
                    "function with state="
                )
            return
        if state is None:
            if self._whole_state is not None:
                raise ValueError("state is missing: pass state=pipeline.shard_state(...)")
            names = ", ".join(map(repr, sorted(self.state_owners)))
            raise ValueError(f"state is missing: pass state=pipeline.shard_state({{...}}) with the groups {names}")
        self._check_sharded("state", "shard_state", state, self.state_owners, self.state_specs, self._whole_state)

    def check_params(self, params: Params) -> None:
        """Raise `ValueError` unless `params` were sharded for these groups, and are alive."""
        self._check_sharded("params", "shard", params, self.owners, self.specs, self._whole)
        self.as_trained(params.layout)  # raises if `frozen` does not fit

    def _check_sharded(
        self,
        what: str,
        call: str,
        sharded: Tree,
        owners: dict[str, int | None],
        specs: dict[str, Tree],
        whole: WholeTree | None,
    ) -> None:
        if not isinstance(sharded, Sharded):
            raise ValueError(f"{what} is a {type(sharded).__name__}: pass what pipeline.{call}(...) returns")

        def check_layout(layout: PackedLayout) -> bool:
            if {g.name: g.ipu for g in layout.groups} != owners or layout.ipus != self.ipus:
                raise ValueError(
                    f"{what} were sharded by a pipeline with other groups or IPUs: shard them with this one"
                )
            if whole is not None and (other := _other_than(whole, layout)):
                raise ValueError(
                    f"{what} were sharded for another function: {other}; shard them for this one, which takes whole "
                    "trees, as unshard returns them"
                )
            for group in layout.groups:
                bare = tuple(dataclasses.replace(leaf, spec=WHOLE) for leaf in group.leaves)
                if group != with_specs(dataclasses.replace(group, leaves=bare), specs, self.axes):
                    raise ValueError(f"{what} were sharded by a pipeline with other specs: shard them with this one")
            return True

        self._once(what, check_layout, sharded.layout)
        check_alive(what, sharded)

    def as_trained(self, layout: PackedLayout) -> PackedLayout:
        """Return the layout of weights, sharded by any pipeline, with exactly the leaves frozen that `frozen` names.

        Raises:
            ValueError: `frozen` does not fit the weights, or a leaf that is trained is not floating.
        """
        return self._once("trained", lambda layout: with_frozen(layout, self.frozen), layout)

    def _once(self, what: str, fn: Callable[[PackedLayout], Any], layout: PackedLayout) -> Any:
        """Return `fn(layout)`, which a step's calls ask again and again for the same few layouts."""
        about = what, id(layout)  # no other layout gets the id of one that is kept
        if about not in self._known:
            result = fn(layout)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[about] = layout, result
        return self._known[about][1]


def _other_than(whole: WholeTree, layout: PackedLayout) -> str | None:
    """Return what a layout has otherwise than the tree for which a function was cut, or None if it fits."""
    if layout.whole is None or layout.whole.paths != whole.paths:
        return "it has a tree with other leaves"
    found = {leaf.path: (leaf.whole_shape, leaf.dtype) for group in layout.groups for leaf in group.leaves}
    for path, shape, dtype in zip(whole.paths, whole.shapes, whole.dtypes, strict=True):
        if found[path] != (shape, str(dtype)):
            return f"{path} is {found[path][1]}{list(found[path][0])} there, and {dtype}{list(shape)} here"
    for name, _ in whole.groups if layout.whole.groups != whole.groups else ():
        here, there = (
            ", ".join(path + (f"[{':, ' * rows.axis}{rows.first}:]" if rows else "") for path, rows in parts)
            for parts in (zip(*of.named(name), strict=True) for of in (whole, layout.whole))
        )
        if here != there:
            return f"{name} holds {there} there, and {here} here"
    return None


def _check_not_placed(what: str, tree: Tree) -> None:
    if isinstance(tree, Sharded):
        raise ValueError(f"{what} is placed already: use it as it is, or give the whole tree, pipeline.unshard({what})")


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


def _split_over_ipus(
    whole: WholeTree, dims: Mapping[Part, int], owners: Mapping[str, int | None], specs: Mapping[str, Tree]
) -> dict[str, list[Any]]:
    """Return the specs of the groups that all IPUs hold, beside further axes; `dims` are those that the IPUs split."""
    found: dict[str, list[Any]] = {}
    for name, parts in whole.groups:
        if owners[name] is not None:
            continue
        given = specs.get(name, PartitionSpec())
        given = [given] * len(parts) if isinstance(given, PartitionSpec) else given
        found[name] = []
        for part, spec in zip(parts, given, strict=True):
            entries = [*spec, *[None] * (len(whole.shapes[part.leaf]) - len(spec))]
            if part in dims:
                if entries[dims[part]] is not None:
                    raise ValueError(
                        f"specs split dim {dims[part]} of {whole.paths[part.leaf]} over {entries[dims[part]]!r}, and "
                        "everywhere splits it over 'ipu': split another dim"
                    )
                entries[dims[part]] = IPU_AXIS
            found[name].append(PartitionSpec(*entries))
    return found


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
