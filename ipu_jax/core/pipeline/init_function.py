"""Trace a user's function of a key that makes weights, so that each IPU can make its own leaves.

init = InitFunction.traced(init_fn, (key,))      once; nothing is computed
init.shapes                                      the tree that it returns, as shapes
init.born([layout], mesh)                        its leaves, each on the IPUs that hold it
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import Mesh

from ipu_jax.base.annotations import Function, Jaxpr, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.base.jaxprs import all_equations, depending, laid_open, variables
from ipu_jax.base.keys import is_key
from ipu_jax.core.cutting.users_code import at_line, name_of
from ipu_jax.core.layout.born import born
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import check_array
from ipu_jax.core.layout.packing import Sharded, shard_tree


def is_init_function(given: Any) -> bool:
    """Return whether an argument is a function that makes weights, rather than weights, which may be callable, too.

    >>> is_init_function(lambda key: {"w": key}), is_init_function({"w": 1.0})
    (True, False)
    """
    return callable(given) and jax.tree.structure(given) == jax.tree.structure(0)


@dataclasses.dataclass(frozen=True)
class InitFunction:
    """A function that makes weights, traced.

    Attributes:
        closed: the program, with jitted calls laid open. It returns the leaves of `shapes`.
        args: its arguments, flat.
        shapes: the shapes of what it returns.
        calls_host: an operation that runs on the host, such as "pure_callback (model.py:12)", or "".
    """

    closed: Jaxpr
    args: list[Value]
    shapes: Tree
    calls_host: str

    @classmethod
    def traced(cls, init_fn: Function, args: Sequence[Tree]) -> "InitFunction":
        """Trace a function of arrays and keys.

        Raises:
            ValueError: it is not a function, an argument is not an array, or the function returns something else than
                a pytree of arrays.
        """
        if not is_init_function(init_fn):
            raise ValueError(
                f"init_fn={in_line(init_fn):.60} is not a function: give one that returns the weights, such as "
                "lambda key: model.init(key, inputs), or place weights that exist by shard(params)"
            )
        named, treedef = jax.tree.flatten_with_path(tuple(args))
        for (at, *path), value in named:
            if isinstance(value, Tracer):
                raise ValueError("init was called inside jax.jit, with a traced argument: call it outside")
            if not is_key(value) and not isinstance(value, bool | int | float | complex):
                where = f"argument {at.idx + 1} of init_fn{jax.tree_util.keystr(tuple(path))}"
                check_array(where, value)
        returned: list[Any] = []

        def run(*flat: Value) -> list[Value]:
            tree = init_fn(*jax.tree.unflatten(treedef, flat))
            leaves, structure = jax.tree.flatten_with_path(tree)
            for path, leaf in leaves:
                if not isinstance(leaf, bool | int | float):
                    check_array(f"params{jax.tree_util.keystr(path)}, which init_fn returns,", leaf)
            returned.append(structure)
            return [leaf for _, leaf in leaves]

        flat = [value for _, value in named]
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*flat)
        on_host = (eqn for eqn in all_equations(closed.jaxpr) if "callback" in eqn.primitive.name or eqn.effects)
        calls_host = next((f"{name_of(eqn)}{at_line(eqn)}" for eqn in on_host), "")
        return cls(laid_open(closed), flat, jax.tree.unflatten(returned[-1], shapes), calls_host)

    def then(self, program: Callable[[Tree], Sequence[Tree]]) -> "InitFunction":
        """Return the function followed by another one of its result, traced without calling the user's again."""
        treedef = jax.tree.structure(self.shapes)
        made = core.jaxpr_as_fun(self.closed)
        both = lambda *args: program(jax.tree.unflatten(treedef, made(*args)))
        closed, shapes = jax.make_jaxpr(both, return_shape=True)(*self.closed.in_avals)
        return dataclasses.replace(self, closed=laid_open(closed), shapes=shapes)

    def whole(self) -> Tree:
        """Return the tree, computed whole on one device."""
        leaves = jax.jit(core.jaxpr_as_fun(self.closed))(*self.args)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)

    def born(self, layouts: Sequence[PackedLayout], mesh: Mesh) -> list[Sharded]:
        """Return what it returns, one tree per layout, each leaf made on the IPUs that hold it."""
        return born(self.closed, self.args, layouts, mesh)

    def warn(self, layout: PackedLayout, *, stacklevel: int) -> None:
        """Warn of leaves that do not come from the arguments, and of work on the host."""
        if self.calls_host:
            warnings.warn(
                f"init_fn calls the host, by {self.calls_host}: one device makes the weights whole, and "
                "they are placed from there. Draw them by jax.random, and each IPU makes its own",
                stacklevel=stacklevel + 1,
            )
            return
        jaxpr = self.closed.jaxpr
        constants = [v for v in jaxpr.constvars if v.aval.shape and jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        given, drawn = depending(jaxpr.eqns, constants), depending(jaxpr.eqns, jaxpr.invars)
        both = zip(layout.paths, layout.frozen, jaxpr.outvars, strict=True)
        found = [
            (path, v) for path, frozen, v in both if not frozen and variables([v]) and v in given and v not in drawn
        ]
        if found:
            size = sum(v.aval.size * v.aval.dtype.itemsize for _, v in found)
            more = f" and {len(found) - 1} more" * (len(found) > 1)
            warnings.warn(
                f"init_fn makes {found[0][0]}{more} of NumPy arrays, {size:,} bytes, which the host holds whole "
                "and no key changes: draw them by jax.random",
                stacklevel=stacklevel + 1,
            )


def weights_of(init: InitFunction, layout: PackedLayout, mesh: Mesh, *, stacklevel: int) -> Sharded:
    """Return the weights that a function makes, placed; it warns as `InitFunction.warn` does."""
    init.warn(layout, stacklevel=stacklevel + 1)
    if init.calls_host:
        return shard_tree(init.whole(), layout, mesh)
    return init.then(layout.leaves_of).born([layout], mesh)[0]
