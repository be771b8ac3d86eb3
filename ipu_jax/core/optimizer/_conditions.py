"""Replace a `cond` between whole trees by selects, so that each value can be computed where its leaf is.

    cond(p, update, keep, tree)    ->    leaf by leaf: select(p, updated leaf, kept leaf)

`optax.apply_if_finite` and `optax.MultiSteps` skip updates with such a `cond`. Both branches are computed, and the
selected result is the same bit by bit. A `cond` that reads one leaf which is whole on one IPU stays: this IPU runs it.
"""

from typing import Any

import jax
from jax import lax

from ipu_jax.base.jaxprs import closed_of, evaluated, laid_open


def with_selects(traced: Any, cond: Any) -> Any:
    """Return the closed jaxpr with the branches of the equation `cond` inlined, and a select between their results."""

    def rule(eqn: Any, inputs: list[Any]) -> list[Any] | None:
        if eqn is not cond:
            return None
        index, *operands = inputs
        branches = [laid_open(closed_of(branch)) for branch in eqn.params["branches"]]
        results = [evaluated(branch, operands, lambda *_: None) for branch in branches]
        return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    return jax.make_jaxpr(lambda *args: evaluated(traced, args, rule))(*traced.in_avals)
