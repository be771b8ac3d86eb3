"""Count the primitives that a traced program runs."""

from collections import Counter
from typing import Any

from jax.extend import core


def primitives_of(jaxpr: Any, times: int = 1) -> Counter[str]:
    """Count the primitives that run; a scan's body counts once per iteration."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += times
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in core.jaxprs_in_params(eqn.params):
            found += primitives_of(getattr(inner, "jaxpr", inner), times * turns)
    return found
