"""Refuse modules given as weights that are more than weights, with the lines that split them.

    Flax NNX     a module: Param, and BatchStat, RngState, Cache, ..., which it changes in place when it is called
    Equinox      a module: arrays, and numbers and functions among its leaves
    Flax linen   variables: "params", and "batch_stats", ..., which `apply(mutable=...)` returns

A function that is cut returns what it changes: a change in place would be lost, and what is not a weight would be
trained and decayed as one. None of these libraries is imported here.
"""

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Function, Params, Value

_CHANGED_BY_NNX: Final = ("BatchStat", "Cache", "Intermediate", "RngState")
_FREEZE: Final = """params{} is a {}, which the function reads, and leaves as it is: it is not a weight, and would be
trained as one. Freeze all but the weights:

    from flax import nnx
    is_variable = lambda node: isinstance(node, nnx.Variable)
    frozen = jax.tree.map(lambda v: not isinstance(v, nnx.Param), model, is_leaf=is_variable)

    # and Pipeline.from_function({}, model, micro_batch, frozen=frozen, ...)
"""
_CHANGED_BY_LINEN: Final = ("batch_stats", "cache", "intermediates")


def name_of_function(loss: Function) -> str:
    """Return the name of a function, or "loss" for one without a name that code can use."""
    name = getattr(loss, "__name__", "")
    return name if name.isidentifier() and name != "lambda" else "loss"


def check_equinox(loss: Function, params: Params, takes_key: bool) -> None:
    """Raise `ValueError` if an Equinox module among the weights has leaves that are not float arrays."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return
    modules = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, equinox.Module))
    for at, module in modules:
        if not isinstance(module, equinox.Module):
            continue
        for path, leaf in jax.tree.leaves_with_path(module):
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
                key = ", key" * takes_key
                raise ValueError(
                    f"params{jax.tree_util.keystr((*at, *path))} is {leaf!r:.60}, in an Equinox module, whose leaves "
                    "are not all weights. Give the float arrays:\n\n"
                    "    import equinox as eqx\n"
                    "    params, static = eqx.partition(model, eqx.is_inexact_array)\n\n"
                    f"    def pure_loss(params, micro_batch{key}):\n"
                    f"        return {name_of_function(loss)}(eqx.combine(params, static), micro_batch{key})\n\n"
                    "    # and Pipeline.from_function(pure_loss, params, micro_batch, ...)\n"
                )


def check_linen(params: Params, frozen: Sequence[bool]) -> None:
    """Raise `ValueError` if collections of Flax's variables that are not weights are among the weights, not frozen."""
    if not (isinstance(params, Mapping) and "params" in params):
        return
    flags = dict(zip((path for path, _ in jax.tree.leaves_with_path(params)), frozen, strict=True))
    trained = {getattr(path[0], "key", None) for path, is_frozen in flags.items() if not is_frozen}
    found = [name for name in _CHANGED_BY_LINEN if name in trained]
    if found:
        names = ", ".join(map(repr, found))
        raise ValueError(
            f"params[{found[0]!r}] is a collection of Flax's variables, which apply(mutable=[{names}]) replaces. It is "
            f"not a weight: freeze it, frozen={{'params': False, {found[0]!r}: True}}, or give it as state. Where "
            "loss(variables, micro_batch) returns the loss and what apply returned for it:\n\n"
            f"    state = {{name: variables[name] for name in [{names}]}}\n\n"
            "    def pure_loss(params, state, micro_batch):\n"
            "        return loss({'params': params, **state}, micro_batch)\n\n"
            "    # and Pipeline.from_function(pure_loss, variables['params'], micro_batch, state=state, ...)\n"
        )


def check_unchanged(
    loss: Function,
    params: Params,
    before: tuple[list[Value], Any],
    frozen: Sequence[bool],
    *,
    has_aux: bool,
    takes_key: bool,
) -> None:
    """Raise `ValueError` if a function has changed leaves of its weights in place, or their types are not of weights.

    A dict or a list that the function changes is its own copy, as under `jax.grad`.

    Args:
        loss: the function.
        params: the tree that it was called with, after the call.
        before: the leaves and the structure of the tree before the call.
        frozen: per leaf, whether it is frozen.
        has_aux: whether the function returns more than the loss.
        takes_key: whether it takes a key.
    """
    leaves, types = jax.tree.leaves(params), _nnx_types(params)
    if not types and len(leaves) == len(before[0]) and all(map(operator.is_, leaves, before[0])):
        return
    after, no_weights, any_is_changed = dict(jax.tree.leaves_with_path(params)), dict[str, Any](), False
    old = jax.tree.leaves_with_path(jax.tree.unflatten(before[1], before[0]))
    for (path, leaf), is_frozen in zip(old, frozen, strict=True):
        is_own = isinstance(path[-1], jax.tree_util.GetAttrKey | jax.tree_util.FlattenedIndexKey) if path else False
        is_changed = is_own and after.get(path) is not leaf
        kind = types.get(path)
        names = [base.__name__ for base in kind.__mro__] if kind is not None else []
        if is_changed or (not is_frozen and set(names).intersection(_CHANGED_BY_NNX)):
            no_weights[jax.tree_util.keystr(path)] = kind
            any_is_changed |= after.get(path) is not leaf
    if no_weights and not any_is_changed:
        path, kind = next(iter(no_weights.items()))
        raise ValueError(_FREEZE.format(path, _name_of(kind), name_of_function(loss)))
    if no_weights:
        raise ValueError(_refusal(loss, no_weights, has_aux=has_aux, takes_key=takes_key))


def _nnx_types(params: Params) -> dict[Any, Any]:
    """Return the type of the NNX variable that each leaf is in, by the leaf's path."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    is_variable = lambda node: isinstance(node, nnx.Variable)
    return {
        (*at, *path): type(variable)
        for at, variable in jax.tree.leaves_with_path(params, is_leaf=is_variable)
        if is_variable(variable)
        for path, _ in jax.tree.leaves_with_path(variable)
    }


def _name_of(kind: Any) -> str:
    return f"nnx.{kind.__name__}" if kind.__module__.startswith("flax.") else kind.__name__


def _refusal(loss: Function, no_weights: Mapping[str, Any], *, has_aux: bool, takes_key: bool) -> str:
    path, kind = next(iter(no_weights.items()))
    if any(k is None or "Param" in [base.__name__ for base in k.__mro__] for k in no_weights.values()):
        return (
            f"the function changes params{path} in place, and the new value would be lost: give it as state=, and "
            "return it after the loss"
        )
    kinds = list(dict.fromkeys(no_weights.values()))
    of_state = [k for k in kinds if all(base.__name__ != "RngState" for base in k.__mro__)]
    names = ", ".join(map(_name_of, of_state))
    filters = f"({names})" if len(of_state) > 1 else names
    has_state, has_keys = bool(of_state), len(of_state) < len(kinds)
    own, results = ["params", *["state"] * has_state], ["value", *["aux"] * has_aux]
    split, merged = (["graphdef", *own, *[keys] * has_keys, "rest"] for keys in ("keys", "own_keys"))
    by = ["model", "nnx.Param", *[filters] * has_state, *["nnx.RngKey"] * has_keys, "..."]
    arguments = [*own, "micro_batch", *["key"] * (has_keys or takes_key)]
    fold = "    own_keys = jax.tree.map(lambda own: jax.random.fold_in(key, jax.random.bits(own)), keys)"
    lines = [
        "from flax import nnx",
        f"{', '.join(split)} = nnx.split({', '.join(by)})",
        "",
        f"def pure_loss({', '.join(arguments)}):",
        *[fold] * has_keys,
        f"    net = nnx.merge({', '.join(merged)}, copy=True)",
        f"    {', '.join(results)} = {name_of_function(loss)}(net, micro_batch{', key' * takes_key})",
        f"    return {', '.join([*results, *[f'nnx.state(net, {filters})'] * has_state])}",
        "",
        f"# and Pipeline.from_function(pure_loss, params, micro_batch{', state=state' * has_state}, ...)",
    ]
    indented = "\n".join(f"    {line}".rstrip() for line in lines)
    return (
        f"params{path} is a {_name_of(kind)}, which the function changes in place: it is not a weight, and its new "
        f"value would be lost. Split the module:\n\n{indented}\n"
    )
