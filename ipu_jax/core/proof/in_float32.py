"""Compute a traced program in float32 where it computes in less, so that two programs round alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CALLS, ClosedJaxpr, closed_of, is_float, variables

_OPAQUE = ("bitcast_convert_type", "pallas_call", "ffi_call", "pure_callback", "io_callback", "dot_product_attention")
"""How the names of primitives begin whose results depend on the dtypes of their inputs."""


def in_float32(closed: Jaxpr) -> Jaxpr:
    """Return the same program with float32 in the place of each narrower float, but for opaque primitives.

    Constants stay as they were rounded, such as the 0.3 of `jnp.clip(x, 0, 0.3)`. jax rounds them already where it
    inlines a call, and not where the call remains.

    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x.astype("bfloat16")))(jnp.ones(2))
    >>> in_float32(jaxpr).out_avals
    [ShapedArray(float32[2])]
    """
    variables_of: dict[Var, Var] = {}
    constants: dict[Var, Value] = {}  # None for other values

    def wide(part: Any) -> Any:
        if isinstance(part, np.dtype):
            return np.dtype("float32") if jnp.issubdtype(part, jnp.floating) and part.itemsize < 4 else part
        if isinstance(part, core.Literal):
            return type(part)(wide_constant(part.val), wide(part.aval))
        if isinstance(part, core.Var):
            if part not in variables_of:
                variables_of[part] = type(part)(wide(part.aval))
            return variables_of[part]
        if isinstance(part, (ShapedArray, jax.ShapeDtypeStruct)):
            return part.update(dtype=wide(part.dtype))
        if isinstance(part, core.Jaxpr):
            names = ("constvars", "invars", "outvars")
            eqns = [new for eqn in part.eqns for new in equations(eqn)]
            new = part.replace(eqns=eqns, **{name: [*map(wide, getattr(part, name))] for name in names})
            consts = getattr(part, "consts", ())  # since jax 0.12
            return ClosedJaxpr(new, [*map(wide_constant, consts)]) if consts else new
        if hasattr(part, "consts"):
            return ClosedJaxpr(wide(part.jaxpr), [*map(wide_constant, part.consts)])
        return part

    def wide_constant(value: Value) -> Value:
        dtype = jnp.result_type(value)
        return value if wide(dtype) == dtype else np.asarray(value).astype(np.float32)

    def with_constant(eqn: Eqn) -> Eqn:
        name, inputs = (
            eqn.primitive.name,
            [v.val if isinstance(v, core.Literal) else constants.get(v) for v in eqn.invars],
        )
        if name in CALLS and not hasattr(eqn.params[CALLS[name]], "expand"):
            constants.update(zip(closed_of(eqn.params[CALLS[name]]).jaxpr.invars, inputs, strict=True))
        constants.update(dict.fromkeys(eqn.outvars))  # another call of the same body may have had constants
        if name != "convert_element_type" or inputs[0] is None or not is_float(eqn.outvars[0]):
            return eqn
        (out,) = eqn.outvars
        with np.errstate(over="ignore"):
            constants[out] = np.asarray(inputs[0]).astype(out.aval.dtype)
        return eqn.replace(invars=[core.Literal(constants[out], out.aval)])

    def equations(eqn: Eqn) -> list[Eqn]:
        eqn = with_constant(eqn)
        if not eqn.primitive.name.startswith(_OPAQUE):
            changed = {name: [*map(wide, getattr(eqn, name))] for name in ("invars", "outvars")}
            return [eqn.replace(params=jax.tree.map(wide, eqn.params), **changed)]
        read, made = ([v for v in vs if wide(v.aval) != v.aval] for vs in (variables(eqn.invars), eqn.outvars))
        invars = [v if isinstance(v, core.Literal) or v in read else wide(v) for v in eqn.invars]
        kept = eqn.replace(invars=invars, outvars=[v if v in made else wide(v) for v in eqn.outvars])
        return [*(_converted(wide(v), v) for v in read), kept, *(_converted(v, wide(v)) for v in made)]

    return wide(closed)


def _converted(old: Var, new: Var) -> Eqn:
    """Return the equation that converts a variable to another's dtype."""
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(new.aval.dtype))(old.aval).jaxpr.eqns
    return eqn.replace(invars=[old], outvars=[new])
