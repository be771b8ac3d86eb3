"""Choose which values of F are stashed for B, and how B gets the other residuals of `jax.vjp`.

read       a residual that is a weight or a part of the micro-batch
derived    a residual that follows from these, and from stashed values, by cheap operations
stashed    a value of F: a residual, or a value from which residuals follow
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jax.extend import core

from ipu_jax.base.annotations import Jaxpr, Value, Var
from ipu_jax.base.jaxprs import depending, needed, part_of, read_by, variables
from ipu_jax.core.programs._keeping import bytes_of, cheapest_to_keep

Source = tuple[Literal["input", "derived", "stash"], int]


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of a segment's F.

    Attributes:
        sources: per residual, how B gets it, and its index among the inputs, the derived or the stashed values.
        stashed: the variables of F to stash.
        derive: a closed jaxpr from F's readable inputs and the stashed values to the derived values.
    """

    sources: tuple[Source, ...]
    stashed: list[Value]
    derive: Jaxpr

    def restored(self, readable: Sequence[Value], stash: Sequence[Value]) -> list[Value]:
        """Return the residuals, given the inputs that B reads and the stashed values."""
        values = {"input": readable, "derived": core.jaxpr_as_fun(self.derive)(*readable, *stash), "stash": stash}
        return [values[kind][i] for kind, i in self.sources]


def choose_residuals(
    traced: Jaxpr, outvars: Sequence[Var], readable: Sequence[Var], weights: int, *, recompute: bool
) -> Residuals:
    """Choose the values to stash for these residuals.

    Args:
        traced: F as a closed jaxpr.
        outvars: the residuals.
        readable: the inputs of F that B has: weights, micro-batch and keys.
        weights: how many leading inputs are weights. Values that follow from weights alone are never stashed.
        recompute: whether B computes a residual again where that is cheaper than stashing it. Each part of a stage has
            made this choice already, but a residual of one part may follow from a residual of another.
    """
    jaxpr = traced.jaxpr
    places = {var: i for i, var in enumerate(readable)}
    varying = depending(jaxpr.eqns, jaxpr.invars[weights:])  # on x, inputs or state
    wanted = [v for v in dict.fromkeys(variables(outvars)) if v in varying and v not in places]
    stashed = _cheapest(jaxpr, wanted, varying, places) if recompute else wanted
    slots = {var: k for k, var in enumerate(stashed)}
    sources: list[Source] = []
    derived: list[Var] = []
    for var in outvars:
        if isinstance(var, core.Literal) or (var not in slots and var not in places):
            sources.append(("derived", len(derived)))
            derived.append(var)
        else:
            sources.append(("input", places[var]) if var in places else ("stash", slots[var]))
    again = needed([eqn for eqn in jaxpr.eqns if not slots.keys() & set(eqn.outvars)], derived)
    return Residuals(tuple(sources), stashed, part_of(traced, [*readable, *stashed], again, derived))


def _cheapest(jaxpr: Jaxpr, wanted: list[Var], varying: set[Var], readable: Any) -> list[Var]:
    eqns = [eqn for eqn in jaxpr.eqns if varying.intersection(eqn.outvars)]
    costs = {var: float(bytes_of(var)) for var in jaxpr.invars if var in varying and var not in readable}
    cost, kept = cheapest_to_keep(eqns, costs, wanted)
    if cost > 0.95 * sum(map(bytes_of, wanted)):
        return wanted
    return [v for v in [*jaxpr.invars, *(v for eqn in eqns for v in eqn.outvars)] if v in kept]


def with_outputs(traced: Jaxpr, outvars: Sequence[Var]) -> Jaxpr:
    """Return F with other outputs, without the equations that they do not need."""
    jaxpr = traced.jaxpr
    eqns = jaxpr.eqns if jaxpr.effects else needed(jaxpr.eqns, list(outvars))
    return part_of(traced, jaxpr.invars, eqns, outvars)


def without_unread(traced: Jaxpr, first: int, count: int) -> tuple[Jaxpr, list[int]]:
    """Return a program without the unread inputs among the `count` inputs from `first` on, and the numbers of the rest.

    F of a stage keeps values for the derivative of its aux as well, which B does not compute.
    """
    jaxpr = traced.jaxpr
    used = set(read_by(jaxpr.eqns, jaxpr.outvars))
    read = [k for k in range(count) if jaxpr.invars[first + k] in used]
    invars = [*jaxpr.invars[:first], *(jaxpr.invars[first + k] for k in read), *jaxpr.invars[first + count :]]
    return part_of(traced, invars, jaxpr.eqns, jaxpr.outvars), read
