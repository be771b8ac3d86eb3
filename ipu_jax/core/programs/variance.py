"""Find which values of a traced program may differ along a mesh axis, and which collectives might wait for ever.

A value computed from values that are the same on all devices of the axis is itself the same on all of them. A shard, a
device's own index, and everything computed from these may differ, until a collective such as psum or all_gather
combines them into one value. If the predicate of a branch or a loop may differ, perhaps only some devices run its body:
a collective over the axis inside it is refused, and its results may differ.

The same rules show whether a concurrent backward pass needs cotangents only as sums over the IPUs. If so, the IPU that
has a cotangent keeps it, the others take zeros, and nothing is sent. Else every IPU gets an equal part of it: a rule
may take n times its own part for the whole, as the cross-entropies' rules do.
"""

from collections.abc import Callable, Sequence

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Var
from ipu_jax.base.jaxprs import CALLS, all_equations, closed_of, in_scan_parts, variables
from ipu_jax.core.mesh.axes import axes_of, waits
from ipu_jax.core.mesh.devices import IPU_AXIS

# the result of these over the axis is the same on all devices
_MAKES_EQUAL = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")

_SAME, _DIFFERS, _ZERO, _PART = range(4)  # _PART: the sum over the IPUs is linear in the sum of the cotangents
_KEEP = ("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "reduce_sum", "reshape", "squeeze")
_ADD = ("add", "add_any", "concatenate", "sub", "transpose", *_KEEP)

Refuse = Callable[[Eqn, str], None]


def differing(jaxpr: Jaxpr, inputs: Sequence[bool], axis: str, refuse: Refuse) -> list[bool]:
    """Return, per output of a jaxpr, whether it may differ along an axis.

    Args:
        jaxpr: an open jaxpr, traced with the axis in scope under `check_vma=False`.
        inputs: per input, whether it may differ.
        axis: the mesh axis.
        refuse: called with an equation that waits and that some devices may not reach, and with "cond" or "while" for
            the construct around it; it raises.
    """
    return _Axis(axis, refuse).differing(jaxpr, inputs)


class _Axis:
    """Apply the rules of `differing` for one axis."""

    def __init__(self, axis: str, refuse: Refuse):
        self.axis, self.refuse = axis, refuse

    def differing(self, jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
        differs = {var for var, may in zip(jaxpr.invars, inputs, strict=True) if may}

        def of(atoms: Sequence[Var]) -> list[bool]:
            return [not isinstance(v, core.Literal) and v in differs for v in atoms]

        for eqn in jaxpr.eqns:
            of_inputs = of(eqn.invars)
            differs.update(v for v, may in zip(eqn.outvars, self.results(eqn, of_inputs), strict=True) if may)
            if any(of_inputs):  # the value may be written into a Ref
                differs.update(v for v in variables(eqn.invars) if hasattr(v.aval, "inner_aval"))
        return of(jaxpr.outvars)

    def results(self, eqn: Eqn, of_inputs: list[bool]) -> list[bool]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in CALLS:
            return self.differing(closed_of(eqn.params[CALLS[name]]).jaxpr, of_inputs)
        if name == "cond":
            return self._cond(eqn, of_inputs)
        if name == "while":
            return self._while(eqn, of_inputs)
        if name == "scan":
            return self._scan(eqn, of_inputs)
        if self.axis in axes_of(eqn):
            return [not _makes_equal(eqn)] * count
        brings_its_own = any(
            self.axis in axes_of(inner) and not _makes_equal(inner)
            for jaxpr in core.jaxprs_in_params(eqn.params)
            for inner in all_equations(jaxpr)
        )
        return [any(of_inputs) or brings_its_own] * count

    def _refuse_inside(self, jaxprs: Sequence[Jaxpr], name: str) -> None:
        for jaxpr in jaxprs:
            for eqn in all_equations(jaxpr):
                if waits(eqn, self.axis):
                    self.refuse(eqn, name)

    def _cond(self, eqn: Eqn, of_inputs: list[bool]) -> list[bool]:
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        if of_inputs[0]:
            self._refuse_inside(branches, "cond")
            return [True] * len(eqn.outvars)
        of_branches = [self.differing(branch, of_inputs[1:]) for branch in branches]
        return [any(of_output) for of_output in zip(*of_branches, strict=True)]

    def _while(self, eqn: Eqn, of_inputs: list[bool]) -> list[bool]:
        params = eqn.params
        predicate, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        of_predicate, rest = of_inputs[: params["cond_nconsts"]], of_inputs[params["cond_nconsts"] :]
        of_body, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
        while True:  # until no more of the carry turns out to differ
            (decides,) = self.differing(predicate, [*of_predicate, *carry])
            if decides:
                self._refuse_inside([predicate, body], "while")
                return [True] * len(carry)
            after = [a or b for a, b in zip(carry, self.differing(body, [*of_body, *carry]), strict=True)]
            if after == carry:
                return carry
            carry = after

    def _scan(self, eqn: Eqn, of_inputs: list[bool]) -> list[bool]:
        consts, carry, xs = in_scan_parts(eqn.params, of_inputs)
        while True:
            found = self.differing(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])
            after = [a or b for a, b in zip(carry, found[: len(carry)], strict=True)]
            if after == carry:
                return [*carry, *found[len(carry) :]]
            carry = after


def _makes_equal(eqn: Eqn) -> bool:
    return eqn.primitive.name in _MAKES_EQUAL and eqn.params.get("axis_index_groups") is None


def needs_sums_only(jaxpr: Jaxpr, may_differ: Sequence[bool], num_dy: int, summed: Sequence[bool]) -> bool:
    """Return whether the results of B depend only on the sum of the IPUs' cotangents.

    What is not known to be so counts as not so.

    Args:
        jaxpr: B, an open jaxpr.
        may_differ: per input, whether it may differ between IPUs.
        num_dy: how many of the last inputs are cotangents.
        summed: per output, whether the IPUs' values are added up afterwards.
    """
    inputs = [_DIFFERS if may else _SAME for may in may_differ]
    found = _walk(jaxpr, [*inputs[: len(inputs) - num_dy], *[_PART] * num_dy])
    return found is not None and all(of != _PART or adds for of, adds in zip(found, summed, strict=True))


def _walk(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int] | None:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Var) -> int:
        if isinstance(atom, core.Literal):
            return _ZERO if atom.val == 0 else _SAME
        return known.get(atom, _SAME)

    for eqn in jaxpr.eqns:
        results = _results(eqn, list(map(of, eqn.invars)))
        if results is None:
            return None
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _results(eqn: Eqn, given: list[int]) -> list[int] | None:
    """Return what the results of an equation are, or None if it uses a part of a cotangent by itself."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if _PART not in given:
        if given == [_ZERO] and name in _KEEP:
            return [_ZERO]
        found = _Axis(IPU_AXIS, lambda *_: None).results(eqn, [of == _DIFFERS for of in given])
        return [_DIFFERS if may else _SAME for may in found]
    if name in CALLS:
        return _walk(closed_of(eqn.params[CALLS[name]]).jaxpr, given)
    if IPU_AXIS in axes_of(eqn):
        adds = name in ("psum", "reduce_scatter") and eqn.params.get("axis_index_groups") is None
        return [_SAME if name == "psum" else _DIFFERS] * count if adds else None
    others = [of for of in given if of != _PART]
    keeps = (
        (name in _ADD and set(others) <= {_ZERO})
        or (name in ("mul", "dot_general") and len(others) == 1 and _DIFFERS not in others)
        or (name == "div" and given == [_PART, _SAME])
        or (name == "select_n" and given[0] == _SAME and set(others[1:]) <= {_ZERO})
    )
    return [_PART] * count if keeps else None
