"""Lay a scan over stacked weights open: an operation for each layer, so that it can be cut between any two of them."""

import dataclasses
from collections.abc import Collection
from typing import Any

from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CALLS, CHECKPOINTS, JITS, closed_of, in_scan_parts, variables


@dataclasses.dataclass(frozen=True, eq=False)
class ScanLayer:
    """An iteration of a scan over stacked weights: the iteration `number` in the order in which they run."""

    scan: Eqn
    number: int
    invars: list[Var]
    outvars: list[Var]

    @property
    def effects(self) -> Any:
        return self.scan.effects

    @property
    def row(self) -> int:
        """Return the row of the scan's inputs that it reads."""
        return self.scan.params["length"] - 1 - self.number if self.scan.params["reverse"] else self.number


@dataclasses.dataclass(frozen=True, eq=False)
class ScanStack:
    """A result of a scan, stacked from the layers' parts: the operation after the last layer."""

    scan: Eqn
    invars: list[Var]
    outvars: list[Var]
    effects: Any = frozenset()


def layers_of(eqn: Eqn) -> list[Eqn]:
    """Return the layers of a scan, and after them what stacks their results."""
    fixed, values, rows = in_scan_parts(eqn.params, eqn.invars)
    carry, length = len(values), eqn.params["length"]
    parts: list[list[Eqn]] = [[] for _ in eqn.outvars[carry:]]
    layers: list[Eqn] = []
    for number in range(length):
        last = number == length - 1
        new = list(eqn.outvars[:carry]) if last else [core.Var(v.aval) for v in eqn.outvars[:carry]]
        own = [core.Var(v.aval.update(shape=(1, *v.aval.shape[1:]))) for v in eqn.outvars[carry:]]
        layers.append(ScanLayer(eqn, number, [*fixed, *values, *rows], [*new, *own]))
        values = new
        for part, var in zip(parts, own, strict=True):
            part.append(var)
    return layers + [ScanStack(eqn, part, [var]) for part, var in zip(parts, eqn.outvars[carry:], strict=True)]


def has_inner_layers(eqn: Eqn, weights: Collection[Var]) -> bool:
    """Return whether an equation is a scan over groups of layers: its body has a scan over rows of the weights."""
    if eqn.primitive.name != "scan":
        return False
    body = closed_of(eqn.params["jaxpr"]).jaxpr
    _, _, outer = in_scan_parts(eqn.params, list(eqn.invars))
    _, _, inner = in_scan_parts(eqn.params, list(body.invars))
    rows = {own for own, v in zip(inner, outer, strict=True) if not isinstance(v, core.Literal) and v in weights}
    return bool(rows) and _goes_over(body, rows)


def _goes_over(body: Jaxpr, rows: set[Var]) -> bool:
    """Return whether a body has a scan over values that follow from rows alone."""
    for eqn in body.eqns:
        inputs, name = variables(eqn.invars), eqn.primitive.name
        if name == "scan" and eqn.params["length"] > 1:
            if rows.intersection(variables(in_scan_parts(eqn.params, list(eqn.invars))[2])):
                return True
        elif name in (*JITS, *CHECKPOINTS):
            inner = closed_of(eqn.params[CALLS[name]]).jaxpr
            if _goes_over(
                inner, {own for own, v in zip(inner.invars, eqn.invars, strict=True) if {*variables([v])} & rows}
            ):
                return True
        if inputs and rows.issuperset(inputs):
            rows.update(eqn.outvars)
    return False


def unrolled(eqn: Eqn) -> Function:
    """Return the function of a scan's inputs that runs its iterations one after the other, and returns its results."""
    params, body = eqn.params, core.jaxpr_as_fun(closed_of(eqn.params["jaxpr"]))
    order = range(params["length"])[:: -1 if params["reverse"] else 1]

    def run(*inputs: Value) -> list[Value]:
        fixed, carry, xs = in_scan_parts(params, list(inputs))
        found: dict[int, list[Value]] = {}
        for number in order:
            outs = body(*fixed, *carry, *(lax.index_in_dim(x, number, keepdims=False) for x in xs))
            carry, found[number] = outs[: len(carry)], outs[len(carry) :]
        rows = [[lax.expand_dims(y, (0,)) for y in found[number]] for number in sorted(found)]
        return [*carry, *(lax.concatenate(of_result, 0) for of_result in zip(*rows, strict=True))]

    return run
