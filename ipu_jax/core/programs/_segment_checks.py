"""Refuse traced segments that would hang or mix data, or whose results may differ between IPUs where they must not.

A collective over "ipu" waits until every IPU of the replica reaches it. It is refused in a local stage, which only one
IPU runs, and, in a concurrent stage, inside a branch or a loop whose predicate may differ between IPUs. A collective
without replica groups, such as a ppermute, waits for all devices of the mesh, whatever its axis. XLA would pair it with
a collective that other IPUs run, and exchange their data. A local stage may therefore communicate over "replica" only
by collectives that have groups. The results of a concurrent stage (its `y`, its aux, state that is not sharded) must be
the same on all IPUs. Nothing at run time would notice a difference, so it is checked here.
"""

from collections.abc import Sequence
from typing import NoReturn

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Eqn, Jaxpr, Tree
from ipu_jax.base.jaxprs import all_equations
from ipu_jax.base.keys import is_key
from ipu_jax.core.mesh.axes import axes_of, further_axes, names_in, parts, waits
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.programs.segment import Segment, SegmentResults
from ipu_jax.core.programs.variance import differing

_WHO = {IPU_AXIS: "IPUs", REPLICA_AXIS: "replicas"}


def differing_outputs(segment: Segment, jaxpr: Jaxpr, inputs: Sequence[bool], weights: int) -> list[bool]:
    """Return, per output of a segment's F or B, whether it may differ between IPUs (never for a local segment).

    Args:
        segment: the segment that was traced.
        jaxpr: its F or its B.
        inputs: per input, whether its value may differ between IPUs.
        weights: how many leading inputs are the same on all replicas; the others are each replica's own.

    Raises:
        ValueError: a collective waits for devices that may not reach it. The message names the stage, the primitive and
            a fix.
    """
    collectives = [eqn for eqn in all_equations(jaxpr) if axes_of(eqn)]
    if segment.place is not None:
        for eqn in collectives:
            if waits(eqn, IPU_AXIS):
                _refuse_in_local(segment, eqn)
    if any(waits(eqn, REPLICA_AXIS) for eqn in collectives) and lax.axis_size(REPLICA_AXIS) > 1:
        own = [i >= weights for i in range(len(jaxpr.invars))]
        differing(jaxpr, own, REPLICA_AXIS, lambda eqn, inside: _refuse_branch(segment, eqn, inside, REPLICA_AXIS))
    if segment.place is None:
        return differing(jaxpr, inputs, IPU_AXIS, lambda eqn, inside: _refuse_branch(segment, eqn, inside, IPU_AXIS))
    return [False] * len(jaxpr.outvars)


def _refuse_in_local(segment: Segment, eqn: Eqn) -> NoReturn:
    axes, name = axes_of(eqn), eqn.primitive.name
    if IPU_AXIS in axes:
        raise ValueError(
            f"stage {segment.name!r} on IPU {segment.place} uses {name} over axis {IPU_AXIS!r}, "
            "which would wait for ever for the IPUs that don't run it: make the stage concurrent "
            "(ipu=ALL_IPUS), or take the collective out"
        )
    raise ValueError(
        f"stage {segment.name!r} on IPU {segment.place} uses {name} over axis {axes[0]!r}, which has no replica "
        "groups, so that it would exchange data with IPUs that run other stages: use psum, pmax, pmin, all_gather, "
        "psum_scatter or all_to_all (a shift by k is an all_to_all of rows that are zero but for row (axis_index + k) "
        "% axis_size), or make the stage concurrent (ipu=ALL_IPUS)"
    )


def _refuse_branch(segment: Segment, eqn: Eqn, inside: str, axis: str) -> NoReturn:
    over = axis if axis in axes_of(eqn) else axes_of(eqn)[0]
    raise ValueError(
        f"stage {segment.name!r} uses {eqn.primitive.name} over axis {over!r} inside a {inside} "
        f"whose predicate may differ between {_WHO[axis]}: those that take it would wait for ever for the "
        f"others; communicate outside of it, or decide by a value that is the same on all {_WHO[axis]}"
    )


def check_results(
    segment: Segment, results: SegmentResults, differs: SegmentResults, last: bool, split_state: Tree
) -> None:
    """Refuse results that are random keys, or that may differ between IPUs and are not split over them.

    Args:
        segment: the segment that returned the results.
        results: the shapes of the results.
        differs: per result, whether its value may differ between IPUs.
        last: whether the segment is the last one.
        split_state: per leaf of the new state, whether it is split over the IPUs.

    Raises:
        ValueError: a result is refused. The message names the stage, the value and a fix.
    """
    if last and segment.role == "prediction":
        _check_outputs(segment, differs.y, results.y)
    else:
        _refuse_differing(segment, "a loss" if last else "a y or a skip", any(jax.tree.leaves(differs.y)))
    _refuse_differing(segment, "an aux", any(jax.tree.leaves(differs.aux)))
    state = zip(jax.tree.leaves(differs.state), jax.tree.leaves(split_state), strict=True)
    _refuse_differing(segment, "state that is not split", any(may and not split for may, split in state))
    for path, leaf in jax.tree.leaves_with_path((results.y, results.aux)):
        if is_key(leaf):
            raise ValueError(
                f"stage {segment.name!r} returns a random key, {leaf.dtype}, in its {'aux' if path[0].idx else 'y'}: "
                "return jax.random.key_data(key), and wrap it again with jax.random.wrap_key_data where it is used"
            )


def _refuse_differing(segment: Segment, what: str, differs: bool) -> None:
    """Refuse a result of a concurrent segment that may differ between IPUs.

    Raises:
        ValueError: the result may differ. The message names the stage, the value and a fix.
    """
    if differs:
        raise ValueError(
            f"concurrent stage {segment.name!r} returns {what} that may differ between IPUs, where all must hold the "
            f"same: gather the parts (jax.lax.all_gather) or add them up (jax.lax.psum) over axis {IPU_AXIS!r} first"
        )


def _check_outputs(segment: Segment, differs: Tree, outputs: Tree) -> None:
    stage = segment.stages[-1]
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    try:
        specs = jax.tree.leaves(jax.tree.broadcast(stage.predict_specs, outputs, is_leaf=is_spec), is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"stage {stage.name!r}: predict_specs does not fit the tree that predict returns: {error}"
        ) from error
    leaves = jax.tree.leaves_with_path(outputs)
    for (path, leaf), spec, may_differ in zip(leaves, specs, jax.tree.leaves(differs), strict=True):
        name = f"outputs{jax.tree_util.keystr(path)} of {leaf.dtype}{list(leaf.shape)}"
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"stage {stage.name!r}: predict_specs says {spec} for {name}, which has fewer dims: give a spec for "
                "the dims of one micro-batch's outputs"
            )
        axes = further_axes(jax.sharding.get_abstract_mesh())
        for dim, entry in enumerate(spec):
            if leaf.shape[dim] % parts(axes, PartitionSpec(entry)):
                sizes = ", ".join(f"{axis}={axes[axis]}" for axis in names_in(entry) if axis in axes)
                raise ValueError(
                    f"stage {stage.name!r}: predict_specs says {spec} for {name}: dim {dim} is not divisible by "
                    f"{sizes}; choose a size that is, or leave the dim whole"
                )
        if may_differ and IPU_AXIS not in spec:
            raise ValueError(
                f"concurrent stage {segment.name!r} returns {name} that may differ between IPUs: keep it split with "
                "Stage(predict_specs=PartitionSpec(...)), with 'ipu' for the dim that is split, or gather the parts "
                f"(jax.lax.all_gather) or add them up (jax.lax.psum) over axis {IPU_AXIS!r} first"
            )
        if IPU_AXIS in spec and not may_differ and lax.axis_size(IPU_AXIS) > 1:
            raise ValueError(
                f"stage {stage.name!r}: predict_specs says {spec} for {name}, but every IPU returns the same: leave "
                "'ipu' out of its spec"
            )
