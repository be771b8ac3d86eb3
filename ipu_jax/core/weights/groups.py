"""Describe a pipeline's groups of weights and state: where they are, how they are split, and what is frozen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from ipu_jax.core.stage import Stage
from ipu_jax.core.weights.arguments import (
    by_group,
    check_alive,
    check_names,
    check_sharded,
    check_shared,
    check_state,
    owners_of,
    specs_for,
    state_owners_of,
)
from ipu_jax.core.weights.packed_layout import PackedLayout, plan_layout, with_frozen
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.core.weights.whole_tree import WholeTree


class Groups:
    """The groups of a pipeline.

    Args:
        stages: the model.
        ipus: the number of IPUs of a replica.
        axes: the sizes of the mesh's further axes.
        specs, state_specs, frozen: as for `Pipeline`.
        whole, whole_state: the user's trees, if they are not `{group: pytree}`.

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
        specs: Any,
        state_specs: Any,
        frozen: Any,
        whole: WholeTree | None = None,
        whole_state: WholeTree | None = None,
    ):
        self.ipus, self.axes, self.given_frozen, self.given_specs = ipus, axes, frozen, specs
        self._whole, self._whole_state = whole, whole_state
        self.owners, self.state_owners = owners_of(stages), state_owners_of(stages)
        shared = {name: PartitionSpec() for stage in stages for name in stage.shared}
        if whole is not None and specs is not None:
            specs = whole.spread("specs", specs, lambda leaf: isinstance(leaf, PartitionSpec))
        self.specs = shared | specs_for(self.owners, by_group("specs", specs), "specs", axes)
        check_shared(stages, self.specs)
        unsplit = {name: PartitionSpec() for name, place in self.state_owners.items() if place is None}
        given = by_group("state_specs", state_specs)
        self.state_specs = unsplit | specs_for(self.state_owners, given, "state_specs", axes)
        if whole is not None:
            frozen = whole.spread("frozen", False if frozen is None else frozen)
        self.frozen = by_group("frozen", frozen)
        check_names("frozen", self.frozen, self.owners)

    def layout(self, params: Any) -> PackedLayout:
        """Return where each leaf of whole weights goes."""
        whole = self._whole
        params = params if whole is None else whole.split(params)
        return plan_layout(params, self.owners, self.specs, self.ipus, frozen=self.frozen, whole=whole, axes=self.axes)

    def state_layout(self, state: Any) -> PackedLayout:
        """Return where each leaf of whole state goes."""
        whole = self._whole_state
        state = state if whole is None else whole.split(state)
        return plan_layout(
            state, self.state_owners, self.state_specs, self.ipus, what="state", whole=whole, axes=self.axes
        )

    def check(self, params: Any, state: Any) -> None:
        """Raise `ValueError` unless `params` and `state` were sharded for these groups, and are alive."""
        self.check_params(params)
        is_whole = self._whole_state is not None
        check_state(state, self.state_owners, self.state_specs, self.ipus, self.axes, is_whole=is_whole)

    def check_params(self, params: Any) -> None:
        """Raise `ValueError` unless `params` were sharded for these groups, and are alive."""
        check_sharded("params", params, self.owners, self.specs, self.ipus, self.axes)
        self.as_trained(params.layout)  # raises if `frozen` does not fit
        check_alive("params", params)

    def as_trained(self, layout: PackedLayout) -> PackedLayout:
        """Return the layout of weights, sharded by any pipeline, with exactly the leaves frozen that `frozen` names.

        Raises:
            ValueError: `frozen` does not fit the weights, or a leaf that is trained is not floating.
        """
        return with_frozen(layout, self.frozen)

    def apply_frozen(self, params: Sharded) -> Sharded:
        """Return the weights with exactly the leaves frozen that `frozen` names."""
        layout = self.as_trained(params.layout)
        return params if layout == params.layout else dataclasses.replace(params, layout=layout)
