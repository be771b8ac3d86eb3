"""Reading a traced stage: what a jit inside it hides is laid open, and a collective that would hang is refused.

A collective over "ipu" waits until every IPU of the replica has come to it. So it may not stand in a local stage, which
only one IPU runs, nor, in a concurrent stage, in a branch or a loop whose predicate may differ between IPUs.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from ipu_jax.devices import IPU_AXIS
from ipu_jax.segment import Segment

_ALIKE_ON_ALL = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")


def inlined(closed: Any) -> Any:
    """The closed jaxpr with the body of each `jax.jit` inside it in the place of its call."""

    def run(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            inputs = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                outputs = run(inner.jaxpr, inner.consts, inputs)
            else:
                found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
                outputs = found if eqn.primitive.multiple_results else [found]
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    if not any(eqn.primitive.name in ("jit", "pjit") for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def refuse_what_waits(segment: Segment, jaxpr: Any, weights: int) -> None:
    """Refuses a segment in which some IPUs would wait for others that don't come.

    Args:
        segment: whose trace it is.
        jaxpr: its F or its B; the first `weights` inputs are weights, which differ between IPUs.
        weights: how many.

    Raises:
        ValueError: names the stage, the primitive and the mend.
    """
    if segment.place is not None:
        for eqn in _all_equations(jaxpr):
            if _waits(eqn):
                raise ValueError(
                    f"stage {segment.name!r} on IPU {segment.place} uses {eqn.primitive.name} over axis {IPU_AXIS!r}, "
                    "which would wait for ever for the IPUs that don't run it: make the stage concurrent "
                    "(ipu=ALL_IPUS), or take the collective out"
                )
        return
    differing = set(jaxpr.invars[:weights])
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if not isinstance(v, core.Literal) and v in differing]
        name = eqn.primitive.name
        # a cond's predicate is its first input; a while's may come to depend on any of them
        decided_by = eqn.invars[:1] if name == "cond" else eqn.invars if name == "while" else []
        if any(v in differing for v in decided_by if not isinstance(v, core.Literal)):
            for inner in core.jaxprs_in_params(eqn.params):
                waiting = next((e for e in _all_equations(inner) if _waits(e)), None)
                if waiting is not None:
                    raise ValueError(
                        f"stage {segment.name!r} uses {waiting.primitive.name} over axis {IPU_AXIS!r} inside a {name} "
                        "whose predicate may differ between IPUs: those that take it would wait for ever for the "
                        "others; communicate outside of it, or decide by what all IPUs hold alike"
                    )
        if (reads and not (_waits(eqn) and name in _ALIKE_ON_ALL)) or name == "axis_index":
            differing.update(eqn.outvars)


def _waits(eqn: Any) -> bool:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return IPU_AXIS in (axes if isinstance(axes, (tuple, list)) else (axes,)) and eqn.primitive.name != "axis_index"


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _all_equations(inner)
