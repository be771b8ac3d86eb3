"""Lay a scan over stacked weights open: an operation for each layer, so that it can be cut between any two of them."""

import dataclasses
from typing import Any

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import in_scan_parts


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
