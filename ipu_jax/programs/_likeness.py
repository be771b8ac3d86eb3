"""Tells whether two traced programs compute the same of their arguments, so that one can run for both.

Two programs are alike where they say the same and hold the same: equal text, equal literals and constants, and equal
parameters of every equation. A parameter that is neither a plain value nor a program, such as a host callback or an
exported function, is equal to itself alone, unless its own type says what equality is.
"""

import dataclasses
import enum
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from ipu_jax._jaxprs import CHECKPOINTS

_SMALL = 4096  # numbers; larger constants are not compared
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, np.generic, type(None))
# parameters that say how a derivative is taken: what runs here has been through that
_RULES = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
    **dict.fromkeys(CHECKPOINTS, ("policy",)),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The text and the constants of a program; equal for programs that compute the same."""

    said: tuple[Any, ...]
    held: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature) or self.said != other.said or len(self.held) != len(other.held):
            return False
        return all(_equal(one, two) for one, two in zip(self.held, other.held, strict=True))

    def __hash__(self) -> int:
        return hash(self.said[0])


def signature_of(programs: Sequence[Any], *more: Any) -> Signature | None:
    """Return the signature of closed jaxprs, and of what else must be equal; None where they hold large constants."""
    held = [thing for closed in programs for thing in _held(closed)]
    if any(isinstance(thing, _Array) and thing.is_large for thing in held):
        return None
    # an address says which object it is: the object itself stands among what is held
    texts = tuple(re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr)) for closed in programs)
    return Signature((texts, *more), tuple(held))


@dataclasses.dataclass(frozen=True)
class _Array:
    value: Any

    @property
    def is_large(self) -> bool:
        return np.size(self.value) > _SMALL


def _held(closed: Any) -> Iterator[Any]:
    """Yield the constants, the literals and the parameters of a program and of those inside it."""
    jaxpr = closed.jaxpr if hasattr(closed, "jaxpr") else closed
    yield from map(_Array, getattr(closed, "consts", ()))
    for eqn in jaxpr.eqns:
        yield from (_Array(v.val) for v in eqn.invars if isinstance(v, core.Literal))
        for name, value in sorted(eqn.params.items()):
            if name not in _RULES.get(eqn.primitive.name, ()):
                yield from _parameter(value)
    yield from (_Array(v.val) for v in jaxpr.outvars if isinstance(v, core.Literal))


def _parameter(value: Any) -> Iterator[Any]:
    if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
        yield from _held(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parameter(part)
    elif isinstance(value, (np.ndarray, jax.Array)):
        yield _Array(value)
    elif not isinstance(value, _PLAIN):
        yield value


def _equal(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, _Array):
        return _same_bits(one.value, two.value)
    try:
        return bool(one == two)
    except Exception:  # an equality that raises tells nothing
        return False


def _same_bits(one: Any, two: Any) -> bool:
    if one is two:
        return True
    unknown = isinstance(one, Tracer) or isinstance(two, Tracer)
    if unknown or jnp.result_type(one) != jnp.result_type(two):
        return False
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        return _same_bits(jax.random.key_data(one), jax.random.key_data(two))
    one, two = np.asarray(one), np.asarray(two)
    return one.shape == two.shape and one.dtype == two.dtype and one.tobytes() == two.tobytes()
