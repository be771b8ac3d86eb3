"""Refuse traced segments that would hang or mix data, or whose results may differ between IPUs where they must not.

A collective over "ipu" waits until every IPU of the replica reaches it. It is refused in a local stage, which only one
IPU runs, and, in a concurrent stage, inside a branch or a loop whose predicate may differ between IPUs. A collective
without replica groups, such as a ppermute, waits for all devices of the mesh, whatever its axis. XLA would pair it with
a collective that other IPUs run, and exchange their data. A local stage may therefore communicate over "replica" only
by collectives that have groups. The results of a concurrent stage (its `y`, its aux, state that is not sharded) must be
the same on all IPUs. Nothing at run time would notice a difference, so it is checked here.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from jax import lax

from ipu_jax.base.jaxprs import all_equations
from ipu_jax.core.collectives import axes_of, waits
from ipu_jax.core.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.programs._variance import differing
from ipu_jax.core.programs.segment import Segment

_WHO = {IPU_AXIS: "IPUs", REPLICA_AXIS: "replicas"}


def differing_outputs(segment: Segment, jaxpr: Any, inputs: Sequence[bool], weights: int) -> list[bool]:
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


def _refuse_in_local(segment: Segment, eqn: Any) -> NoReturn:
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


def _refuse_branch(segment: Segment, eqn: Any, inside: str, axis: str) -> NoReturn:
    over = axis if axis in axes_of(eqn) else axes_of(eqn)[0]
    raise ValueError(
        f"stage {segment.name!r} uses {eqn.primitive.name} over axis {over!r} inside a {inside} "
        f"whose predicate may differ between {_WHO[axis]}: those that take it would wait for ever for the "
        f"others; communicate outside of it, or decide by what all {_WHO[axis]} hold alike"
    )


def refuse_differing(segment: Segment, what: str, differs: bool) -> None:
    """Refuse a result of a concurrent segment that may differ between IPUs.

    Raises:
        ValueError: the result may differ. The message names the stage, the value and a fix.
    """
    if differs:
        raise ValueError(
            f"concurrent stage {segment.name!r} returns {what} that may differ between IPUs, where all are to hold the "
            f"same: gather the parts (jax.lax.all_gather) or add them up (jax.lax.psum) over axis {IPU_AXIS!r} first"
        )
