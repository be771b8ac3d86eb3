"""Compute the small arrays of ints that a trace knows, such as places at which it takes rows. Nothing is compiled."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jax.core import Tracer
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Value, Var

_MOST: Final = 1024
"""How many numbers a value may have that is computed when the function is cut."""
KEEPS_ZEROS: Final = ("broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy", "squeeze")
"""Primitives of one input that make zeros of zeros."""
_ELEMENTWISE: Final[dict[str, Callable[..., Any]]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "rem": np.fmod},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal},
    **{"ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    **{"neg": np.negative, "abs": np.abs, "sign": np.sign, "copy": np.copy, "convert_element_type": np.copy},
    "div": lambda x, y: np.trunc(np.divide(x, y)),
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
}


class Numbers:
    """The numbers of values that depend on no argument of a function."""

    def __init__(self, operations: Sequence[Eqn], constants: Mapping[Var, Value]):
        self._made, self._constants = {v: op for op in operations for v in op.outvars}, constants
        self._known: dict[Var, Any] = {}

    def of(self, atom: Var) -> Any:
        """Return the numbers of a value, as an array of numpy; None if they are unknown, or too many."""
        if isinstance(atom, core.Literal):
            return np.asarray(atom.val)
        if not _has_few_ints(atom):
            return None
        if atom not in self._known:
            op, value = self._made.get(atom), self._constants.get(atom)
            if op is not None:
                value = numbers_of(op, list(map(self.of, op.invars)))
            self._known[atom] = None if value is None or isinstance(value, Tracer) else np.asarray(value)
        return self._known[atom]


def numbers_of(eqn: Eqn, inputs: Sequence[Any]) -> Any:
    """Return the result of an equation on known numbers; None if an input is unknown, or the operation."""
    if any(x is None for x in inputs) or len(eqn.outvars) > 1 or not _has_few_ints(eqn.outvars[0]):
        return None
    name, params, aval = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
    if name in _ELEMENTWISE:
        found = _ELEMENTWISE[name](*inputs)
    elif name == "iota":
        shape = [size if d == params["dimension"] else 1 for d, size in enumerate(aval.shape)]
        found = np.broadcast_to(np.arange(aval.shape[params["dimension"]]).reshape(shape), aval.shape)
    elif name == "broadcast_in_dim":
        shape = [1] * aval.ndim
        for d, size in zip(params["broadcast_dimensions"], np.shape(inputs[0]), strict=True):
            shape[operator.index(d)] = size
        found = np.broadcast_to(np.reshape(inputs[0], shape), aval.shape)
    elif name in ("reshape", "squeeze"):
        found = np.reshape(inputs[0], aval.shape)
    elif name == "concatenate":
        found = np.concatenate(inputs, params["dimension"])
    elif name == "slice":
        steps = params["strides"] or [1] * aval.ndim
        places = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
        found = inputs[0][tuple(slice(*place) for place in places)]
    elif name == "rev":
        found = np.flip(inputs[0], params["dimensions"])
    else:
        return None
    return np.asarray(found, aval.dtype)


def _has_few_ints(var: Var) -> bool:
    aval = var.aval
    return getattr(getattr(aval, "dtype", None), "kind", "f") in "biu" and aval.size <= _MOST


def is_zero(atom: Var, made: Mapping[Var, Eqn]) -> bool:
    """Return whether a value is zeros for any arguments, from the equations of other values."""
    while not isinstance(atom, core.Literal):
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name not in KEEPS_ZEROS or len(eqn.invars) > 1:
            return False
        (atom,) = eqn.invars
    return not bool(atom.val)
