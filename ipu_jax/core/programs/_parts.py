"""Find whether a concurrent backward pass needs cotangents only as sums over the IPUs.

If so, the IPU that has a cotangent keeps it, the others take zeros, and nothing is sent. Else every IPU gets an equal
part of it: a rule may take n times its own part for the whole, as the cross-entropies' rules do.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from ipu_jax.base.jaxprs import closed_of
from ipu_jax.core.collectives import axes_of
from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.programs._variance import CALLS, differing_results

_SAME, _DIFFERS, _ZERO, _PART = range(4)  # _PART: the sum over the IPUs is linear in the sum of the cotangents
_KEEP = ("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "neg", "reduce_sum", "reshape", "squeeze")
_ADD = ("add", "add_any", "concatenate", "sub", "transpose", *_KEEP)


def needs_sums_only(jaxpr: Any, may_differ: Sequence[bool], num_dy: int, summed: Sequence[bool]) -> bool:
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


def _walk(jaxpr: Any, inputs: Sequence[int]) -> list[int] | None:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        if isinstance(atom, core.Literal):
            return _ZERO if atom.val == 0 else _SAME
        return known.get(atom, _SAME)

    for eqn in jaxpr.eqns:
        results = _results(eqn, list(map(of, eqn.invars)))
        if results is None:
            return None
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _results(eqn: Any, given: list[int]) -> list[int] | None:
    """Return what the results of an equation are, or None if it uses a part of a cotangent by itself."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if _PART not in given:
        if given == [_ZERO] and name in _KEEP:
            return [_ZERO]
        return [
            _DIFFERS if may else _SAME for may in differing_results(eqn, [of == _DIFFERS for of in given], IPU_AXIS)
        ]
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
