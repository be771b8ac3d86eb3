"""Write `jax.checkpoint` and `checkpoint_name` in one form, with or without jax's flag `jax_remat3`.

Under the flag both are objects of jax's newer kind of primitive, and jax 0.10 forgets `prevent_cse`:

    b = call_hi_primitive[_prim=RematTraced[...]] a      becomes      b = remat2[jaxpr=... policy=... prevent_cse=...] a
"""

from typing import Any

import jax
from jax.extend import core
from jax.extend.core.primitives import name_p, remat_p

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Tree
from ipu_jax.base.jaxprs import all_equations


def checkpointed(fn: Function, *, policy: Any = None, prevent_cse: Any = True) -> Function:
    """Return what `jax.checkpoint` returns without the flag, for a function of pytrees of arrays."""

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        flat, treedef = jax.tree.flatten((args, kwargs))

        def flat_fn(*leaves: Any) -> Tree:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat_fn, return_shape=True)(*flat)
        how = {"policy": policy, "prevent_cse": prevent_cse, "differentiated": False}
        outputs = remat_p.bind(*closed.consts, *flat, jaxpr=closed_over(plain(closed)), **how)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def how_of(eqn: Eqn) -> dict[str, Any]:
    """Return the options of a checkpoint's equation, for `checkpointed`."""
    barred = eqn.params["prevent_cse"]
    return {"policy": eqn.params["policy"], "prevent_cse": barred if isinstance(barred, bool) else any(barred)}


def plain(closed: Jaxpr) -> Jaxpr:
    """Return the same program with its checkpoints and names as they are without the flag."""
    is_new = any(eqn.primitive.name == "call_hi_primitive" for eqn in all_equations(closed))
    return _plain(closed) if is_new else closed


def _plain(value: Any) -> Any:
    """Return a parameter of an equation with all jaxprs in it in plain form."""
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if not hasattr(value, "eqns"):
        return value
    is_open = not hasattr(value, "consts")
    jaxpr = (value if is_open else value.jaxpr).replace(eqns=[*map(_plain_equation, value.eqns)])
    return jaxpr if is_open else type(value)(jaxpr, value.consts)


def _plain_equation(eqn: Eqn) -> Eqn:
    new = eqn.params.get("_prim")
    if type(new).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return eqn.replace(primitive=name_p, params={"name": new.name})
    if type(new).__name__ != "RematTraced":
        return eqn.replace(params={name: _plain(value) for name, value in eqn.params.items()})
    closed = _plain(new.jaxpr)
    constants = [core.Literal(value, v.aval) for value, v in zip(closed.consts, closed.jaxpr.constvars, strict=True)]
    barred = getattr(new, "prevent_cse", True)  # jax 0.10 sets a barrier in any case
    barred = barred if isinstance(barred, bool) else (*[False] * len(constants), *barred)
    how = {"policy": new.policy, "prevent_cse": barred, "differentiated": False}
    return eqn.replace(
        primitive=remat_p, invars=[*constants, *eqn.invars], params={"jaxpr": closed_over(closed), **how}
    )


def closed_over(closed: Jaxpr) -> Jaxpr:
    """Return an open jaxpr whose first inputs are the constants."""
    jaxpr = closed.jaxpr
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=debug_info)
