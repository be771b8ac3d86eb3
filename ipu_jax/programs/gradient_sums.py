"""Run a traced backward and add each part of a gradient to the accumulator, at the place where it belongs.

    traced      da = scan(...) stacked       dpos = pad(dt)        dw = dw1 + dw2
    run here    per layer: sum_a[i] += da_i  sum_pos[:T] += dt     sum_w += dw1, sum_w += dw2

So a scan over layers never stacks the gradients of all layers, and a gradient that is zero outside of a slice changes
that slice of the accumulator only. A gradient is a sum of parts, and the jaxpr shows which equation computes each part.
Where nothing else reads a part, its equation is replaced by one that adds to the accumulator in place. Any other part
is computed as traced, and then added. JAX's own way, `VJP.with_refs`, adds a scan's gradients to the wrong leaves in
jax 0.10 where some leaves have a `Ref` and others have none (docs/design/guards.md).
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ipu_jax._jaxprs import CHECKPOINTS, bound, closed_of, laid_open, scan_parts, value_of, variables
from ipu_jax.programs._scatters import into_flat, into_rows


@dataclasses.dataclass(frozen=True)
class Sum:
    """The accumulator of one leaf's gradient.

    Attributes:
        total: an array of the leaf's shape, or a flat one whose first elements are the leaf's; its float dtype is at
            least as wide as the leaf's.
        shape: the leaf's.
    """

    total: Any
    shape: tuple[int, ...]


def add_gradients(
    backward: Any, args: Sequence[Any], num_dx: int, sums: Sequence[Sum], zero: Any
) -> tuple[list[Any], list[Any]]:
    """Run a backward and add its gradients to their accumulators.

    Args:
        backward: a closed jaxpr whose outputs are `num_dx` other values, then one gradient per entry of `sums`.
        args: its arguments.
        num_dx: how many outputs come before the gradients.
        sums: the accumulators.
        zero: an int32 that is 0, which XLA does not know. It is added to the index of each update, because XLA fuses
            an update at a constant index into a loop over the whole array.

    Returns:
        `(new totals, the other outputs)`.
    """
    totals = [s.total for s in sums]
    views = [_View(s.shape, s.total.shape != s.shape, zero) for s in sums]
    wanted = [
        _Wanted(var, k, view) for k, (var, view) in enumerate(zip(backward.jaxpr.outvars[num_dx:], views, strict=True))
    ]
    walk = _Walk(backward, wanted)
    env = walk.run(args, totals)
    return totals, [value_of(v, env) for v in backward.jaxpr.outvars[:num_dx]]


@dataclasses.dataclass(frozen=True)
class _View:
    """A part of an accumulator: the leaf's sub-array at some leading indices."""

    leaf: tuple[int, ...]
    flat: bool
    zero: Any
    index: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf[len(self.index) :]

    def row(self, i: Any) -> "_View":
        return dataclasses.replace(self, index=(*self.index, i))

    def holds_in_one_piece(self, shape: tuple[int, ...]) -> bool:
        """Return whether a block of this shape is contiguous in the accumulator, or the accumulator is not flat."""
        return not self.flat or shape[1:] == self.shape[1:]

    def add(self, total: Any, part: Any, at: Sequence[Any] | None = None) -> Any:
        """Return the accumulator with a block added, whose first element is `at` these indices of the view."""
        if part.shape == total.shape == self.leaf:
            return total + part.astype(total.dtype)
        at = (*self.index, *([0] * part.ndim if at is None else at))
        if self.flat:
            strides = [math.prod(self.leaf[k + 1 :]) for k in range(len(self.leaf))]
            at = (sum(i * stride for i, stride in zip(at, strides, strict=True)),)
            block = part.reshape(-1)
        else:
            block = part.reshape((1,) * len(self.index) + part.shape)
        start = [jnp.asarray(i, self.zero.dtype) + self.zero for i in at]
        old = lax.dynamic_slice(total, start, block.shape)
        return lax.dynamic_update_slice(total, old + block.astype(total.dtype), start)

    def scatter(self, total: Any, indices: Any, updates: Any, params: dict[str, Any]) -> Any | None:
        """Return the accumulator with the blocks added that a scatter-add adds to the view; None where it cannot."""
        if not self.flat:
            return into_rows(total, self.index, indices, updates, params)
        strides = [math.prod(self.leaf[d + 1 :]) for d in range(len(self.index))]
        first = self.zero + sum(i * stride for i, stride in zip(self.index, strides, strict=True))
        return into_flat(total, self.shape, first, indices, updates, params)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A variable whose value is to be added to a view of accumulator `k`."""

    var: Any
    k: int
    view: _View


class _Walk:
    """Run one program, whose equations compute parts of gradients.

    Args:
        closed: the program.
        wanted: its gradients.
        carried: inputs that are an accumulator themselves (a scan's carry, to which the body adds), and so are not
            added to it.
    """

    def __init__(self, closed: Any, wanted: Sequence[_Wanted], carried: Sequence[Any] = ()):
        self.closed, jaxpr = closed, closed.jaxpr
        read = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
        self.uses = collections.Counter(variables(read))
        self.made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.sums_alone: set[int] = set()  # equations that only add parts
        self.parts: dict[Any, list[_Wanted]] = {}
        self.literals: list[tuple[Any, _Wanted]] = []
        for want in wanted:
            for part in self.parts_of(want.var):
                if isinstance(part, core.Literal):
                    self.literals.append((part.val, want))
                elif part not in carried:
                    self.parts.setdefault(part, []).append(want)

    def parts_of(self, var: Any, mark: bool = True) -> list[Any]:
        """Return the variables whose sum `var` is; if `mark`, note the equations that add them."""
        eqn = None if isinstance(var, core.Literal) or self.uses[var] > 1 else self.made_by.get(var)
        if eqn is None or not (eqn.primitive.name == "add_any" or _only_widens(eqn)):
            return [var]
        if mark:
            self.sums_alone.add(id(eqn))
        return [part for v in eqn.invars for part in self.parts_of(v, mark)]

    def is_zero(self, var: Any) -> bool:
        if isinstance(var, core.Literal):
            return not np.any(var.val)
        eqn = self.made_by.get(var)
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and self.is_zero(eqn.invars[0])

    def run(self, args: Sequence[Any], totals: list[Any]) -> dict[Any, Any]:
        """Return the values of all variables except the sums of parts, and change `totals` in place."""
        jaxpr = self.closed.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self.closed.consts, *args], strict=True))
        for value, want in self.literals:
            self.add(want, jnp.full(want.view.shape, value), totals)
        for var in [*jaxpr.constvars, *jaxpr.invars]:
            for want in self.parts.get(var, ()):
                self.add(want, env[var], totals)
        for eqn in jaxpr.eqns:
            if id(eqn) in self.sums_alone:
                continue
            inputs = [value_of(v, env) for v in eqn.invars]
            own = {
                position: self.parts[var][0]
                for position, var in enumerate(eqn.outvars)
                if self.uses[var] == 1 and len(self.parts.get(var, ())) == 1
            }
            rule = _RULES.get(eqn.primitive.name)
            outputs = rule(self, eqn, inputs, own, totals) if rule and own else None
            if outputs is None:
                outputs, own = dict(enumerate(bound(eqn, inputs))), {}
            for position, value in outputs.items():
                var = eqn.outvars[position]
                env[var] = value
                for want in self.parts.get(var, ()):
                    self.add(want, value, totals)
        return env

    @staticmethod
    def add(want: _Wanted, part: Any, totals: list[Any]) -> None:
        totals[want.k] = want.view.add(totals[want.k], part)


def _only_widens(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    narrow, wide = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(narrow, jnp.floating) and jnp.promote_types(narrow, wide) == wide


# A rule adds the outputs in `own` (parts that nothing else reads) to `totals`, and returns the equation's other outputs
# as {position: value}. It returns None, and changes nothing, where it does not apply.


def _scan(
    walk: _Walk, eqn: Any, inputs: list[Any], own: dict[int, _Wanted], totals: list[Any]
) -> dict[int, Any] | None:
    """Add a row of a stacked output, or the next term of a carried sum, in each iteration."""
    params, body = eqn.params, laid_open(eqn.params["jaxpr"])
    num_consts, num_carry = scan_parts(params)
    consts, init, xs = inputs[:num_consts], inputs[num_consts:][:num_carry], inputs[num_consts + num_carry :]
    carry_vars = body.jaxpr.invars[num_consts:][:num_carry]
    inner = _Walk(body, ())
    added = {
        p: want
        for p, want in own.items()
        if p >= num_carry
        or (inner.uses[carry_vars[p]] == 1 and carry_vars[p] in inner.parts_of(body.jaxpr.outvars[p], mark=False))
    }
    if not added:
        return None
    for p, want in added.items():
        if p < num_carry and not walk.is_zero(eqn.invars[num_consts + p]):
            walk.add(want, init[p], totals)
    kept = [p for p in range(len(eqn.outvars)) if p not in added]
    kept_carry = [p for p in kept if p < num_carry]
    ks = sorted({want.k for want in added.values()})

    def step(carry: Any, x: Any) -> Any:
        (values, held), (i, x) = carry, x
        wanted = [
            _Wanted(body.jaxpr.outvars[p], want.k, want.view if p < num_carry else want.view.row(i))
            for p, want in added.items()
        ]
        here = [held[ks.index(k)] if k in ks else None for k in range(len(totals))]
        of_carry: list[Any] = [None] * num_carry
        for p, value in zip(kept_carry, values, strict=True):
            of_carry[p] = value
        sums_in = [carry_vars[p] for p in added if p < num_carry]
        env = _Walk(body, wanted, sums_in).run([*consts, *of_carry, *x], here)
        new = [value_of(body.jaxpr.outvars[p], env) for p in kept]
        return (new[: len(kept_carry)], [here[k] for k in ks]), new[len(kept_carry) :]

    start = [init[p] for p in kept_carry], [totals[k] for k in ks]
    rows = jnp.arange(params["length"], dtype=jnp.int32), xs
    how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    (carry, held), ys = lax.scan(step, start, rows, **how)
    for k, total in zip(ks, held, strict=True):
        totals[k] = total
    return dict(zip(kept, [*carry, *ys], strict=True))


def _checkpoint(walk: _Walk, eqn: Any, inputs: list[Any], own: dict[int, _Wanted], totals: list[Any]) -> dict[int, Any]:
    """Run the body, behind the optimization barrier that JAX's own lowering sets."""
    body, barred = laid_open(closed_of(eqn.params["jaxpr"])), eqn.params["prevent_cse"]
    barred = (barred,) * len(inputs) if isinstance(barred, bool) else barred
    if eqn.params["differentiated"] and any(barred):
        behind = iter(lax.optimization_barrier([v for v, b in zip(inputs, barred, strict=True) if b]))
        inputs = [next(behind) if b else v for v, b in zip(inputs, barred, strict=True)]
    wanted = [_Wanted(body.jaxpr.outvars[p], want.k, want.view) for p, want in own.items()]
    env = _Walk(body, wanted).run(inputs, totals)
    return {p: value_of(v, env) for p, v in enumerate(body.jaxpr.outvars) if p not in own}


def _pad(walk: _Walk, eqn: Any, inputs: list[Any], own: dict[int, _Wanted], totals: list[Any]) -> dict[int, Any] | None:
    """Add the gradient of a static slice."""
    config, view = eqn.params["padding_config"], own[0].view
    part = inputs[0]
    inside = all(low >= 0 and high >= 0 and between == 0 for low, high, between in config)
    if not (inside and walk.is_zero(eqn.invars[1]) and view.holds_in_one_piece(part.shape)):
        return None
    totals[own[0].k] = view.add(totals[own[0].k], part, [int(low) for low, _, _ in config])
    return {}


def _update_slice(
    walk: _Walk, eqn: Any, inputs: list[Any], own: dict[int, _Wanted], totals: list[Any]
) -> dict[int, Any] | None:
    """Add the gradient of a slice at a computed index."""
    part, view = inputs[1], own[0].view
    if not (walk.is_zero(eqn.invars[0]) and view.holds_in_one_piece(part.shape)):
        return None
    # a slice that reaches beyond the end is moved back inside, so its gradient is, too
    at = [jnp.clip(i, 0, size - n) for i, size, n in zip(inputs[2:], view.shape, part.shape, strict=True)]
    totals[own[0].k] = view.add(totals[own[0].k], part, at)
    return {}


def _scatter_add(
    walk: _Walk, eqn: Any, inputs: list[Any], own: dict[int, _Wanted], totals: list[Any]
) -> dict[int, Any] | None:
    """Add the gradient of a gather: rows of a table."""
    k, view = own[0].k, own[0].view
    total = view.scatter(totals[k], *inputs[1:], eqn.params) if walk.is_zero(eqn.invars[0]) else None
    if total is None:
        return None
    totals[k] = total
    return {}


_RULES = {
    "scan": _scan,
    "pad": _pad,
    "dynamic_update_slice": _update_slice,
    "scatter-add": _scatter_add,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
}
