"""Decide whether two traced programs compute the same function, so that one can run for both.

They do if their jaxprs have equal text, equal literals and constants, and equal parameters of every equation. A
parameter that is neither a plain value nor a jaxpr, such as a host callback or an exported function, equals only
itself, unless its type defines equality. A dataclass of jax, such as the grid of a Pallas kernel, is compared field by
field, because the jaxprs in it equal only themselves, and its text leaves them out.
"""

import dataclasses
import enum
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Tree, Value
from ipu_jax.base.jaxprs import CHECKPOINTS, bound_with, closed_of, is_float, shape_of

_SMALL = 4096  # elements; larger constants are not compared
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, np.generic, type(None))
# parameters that define derivatives
_RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
    **dict.fromkeys(CHECKPOINTS, ("policy",)),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """Hold the text and the constants of programs. Programs with equal signatures compute the same function."""

    texts: tuple[object, ...]
    constants: tuple[object, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature) or self.texts != other.texts or len(self.constants) != len(other.constants):
            return False
        return all(_equal(one, two) for one, two in zip(self.constants, other.constants, strict=True))

    def __hash__(self) -> int:
        return hash(self.texts[0])


def signature_of(programs: Sequence[Jaxpr], *more: Tree, has_derivatives: bool = False) -> Signature | None:
    """Return the signature of closed jaxprs and of `more`, or None if they contain large constants.

    Args:
        programs: the closed jaxprs.
        more: hashable values.
        has_derivatives: whether programs will be differentiated, so that functions with rules of their own are equal
            only if their rules are.
    """
    constants = [thing for closed in programs for thing in _constants_of(closed, has_derivatives)]
    if any(isinstance(thing, _Array) and np.size(thing.value) > _SMALL for thing in constants):
        return None
    return Signature((tuple(_text(closed.jaxpr) for closed in programs), *more), tuple(constants))


def _text(jaxpr: Jaxpr) -> str:
    # an address in the text names an object; the object itself is compared among the constants
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))


@dataclasses.dataclass(frozen=True)
class _Array:
    value: Value


def _constants_of(closed: Jaxpr, has_derivatives: bool = False) -> Iterator[Value]:
    """Yield the constants, literals and parameters of a jaxpr and of the jaxprs inside it."""
    jaxpr = closed.jaxpr if hasattr(closed, "jaxpr") else closed
    yield from map(_Array, getattr(closed, "consts", ()))
    for eqn in jaxpr.eqns:
        yield from (_Array(v.val) for v in eqn.invars if isinstance(v, core.Literal))
        rules = _RULES.get(eqn.primitive.name, ())
        for name, value in sorted(eqn.params.items()):
            if name not in rules:
                yield from _parameter(value, has_derivatives)
        if has_derivatives and rules:
            yield from _rule_of(eqn) if eqn.primitive.name == "custom_jvp_call" else map(eqn.params.get, rules)
    yield from (_Array(v.val) for v in jaxpr.outvars if isinstance(v, core.Literal))


def _rule_of(eqn: Eqn) -> Iterator[object]:
    """Yield what defines the derivative of a function with a rule for tangents: the rule's program."""
    if eqn.params["symbolic_zeros"]:  # it may depend on which tangents are zero
        yield eqn.params["jvp_jaxpr_fun"]
        return
    primals = [shape_of(v.aval) for v in eqn.invars]
    floats = [k for k, v in enumerate(eqn.invars) if is_float(v)]

    def pushed(primals: list[Value], tangents: list[Value]) -> tuple[Tree, Tree]:
        return jax.jvp(lambda *moved: bound_with(eqn, primals, floats, moved), [primals[k] for k in floats], tangents)

    # functions that the rule calls are not differentiated again
    yield from _parameter(jax.make_jaxpr(pushed)(primals, [primals[k] for k in floats]), False, in_text=False)


def _parameter(value: Value, has_derivatives: bool, *, in_text: bool = True) -> Iterator[object]:
    """Yield the parts of a parameter to compare; `in_text` says that the program's text shows the others."""
    if hasattr(value, "expand"):
        if has_derivatives:
            yield value
        yield from _parameter(closed_of(value), has_derivatives, in_text=False)
    elif hasattr(value, "eqns"):
        if not in_text:
            yield _text(value)
        yield from _constants_of(value, has_derivatives)
    elif isinstance(value, (tuple, list)):
        if not in_text:
            yield len(value)
        for part in value:
            yield from _parameter(part, has_derivatives, in_text=in_text)
    elif isinstance(value, (np.ndarray, jax.Array)):
        yield _Array(value)
    elif dataclasses.is_dataclass(value) and type(value).__module__.split(".")[0] == "jax":
        yield type(value)
        for field in dataclasses.fields(value):
            yield from _parameter(getattr(value, field.name), has_derivatives, in_text=False)
    elif not (in_text and isinstance(value, _PLAIN)):
        yield value


def _equal(one: Value, two: Value) -> bool:
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, _Array):
        return _same_bits(one.value, two.value)
    try:
        return bool(one == two)
    except Exception:  # an equality that raises decides nothing
        return False


def _same_bits(one: Value, two: Value) -> bool:
    if one is two:
        return True
    unknown = isinstance(one, Tracer) or isinstance(two, Tracer)
    if unknown or jnp.result_type(one) != jnp.result_type(two):
        return False
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        return _same_bits(jax.random.key_data(one), jax.random.key_data(two))
    one, two = np.asarray(one), np.asarray(two)
    return one.shape == two.shape and one.dtype == two.dtype and one.tobytes() == two.tobytes()
