"""Name the arrays of a training's state, as a checkpoint stores them, and put arrays back by their names.

    TrainState  -- named -->  {"params.slots.0": array, "optimizer.0.1": array, "step": array, ...}
                <-- with_arrays --

The names are the same as in `Placement.places`. Random keys are stored as their data.
"""

import dataclasses
from typing import Any

import jax

from ipu_jax.base.keys import is_key
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.core.weights.place import array_names, arrays_by_name
from ipu_jax.training.update.state import TrainState


def named(state: TrainState) -> dict[str, Any]:
    """Return the arrays of a state by name, or the values in their places, such as PartitionSpecs."""
    arrays = {**_tree("params", state.params), **_tree("stages", state.stages), "step": state.step}
    optimizer = state.optimizer
    for k, of_block in enumerate(optimizer.per_block):
        arrays |= {f"optimizer.{k}.{i}": array for i, array in enumerate(of_block)}
    arrays |= {f"optimizer.replicated.{i}": array for i, array in enumerate(optimizer.replicated)}
    arrays |= {f"ema.{k}": array for k, array in enumerate(state.ema or [])}
    if state.scale is not None:
        arrays |= {"scale.scale": state.scale.scale, "scale.good_steps": state.scale.good_steps}
    if state.key is not None:
        arrays["key"] = state.key
    return arrays


def with_arrays(like: TrainState, arrays: dict[str, Any]) -> TrainState:
    """Return a state with the structure of `like` and these arrays: the inverse of `named`."""
    optimizer, scale = like.optimizer, like.scale
    per_block = [
        [arrays[f"optimizer.{k}.{i}"] for i in range(len(of_block))] for k, of_block in enumerate(optimizer.per_block)
    ]
    replicated = [arrays[f"optimizer.replicated.{i}"] for i in range(len(optimizer.replicated))]
    if scale is not None:
        scale = dataclasses.replace(scale, scale=arrays["scale.scale"], good_steps=arrays["scale.good_steps"])
    return TrainState(
        params=_with_tree("params", like.params, arrays),
        optimizer=dataclasses.replace(optimizer, per_block=per_block, replicated=replicated),
        stages=_with_tree("stages", like.stages, arrays),
        scale=scale,
        step=arrays["step"],
        key=arrays.get("key"),
        ema=None if like.ema is None else [arrays[f"ema.{k}"] for k in range(len(like.ema))],
    )


def described(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return shapes and dtypes for JSON; the dtype of a key names its generator."""
    return {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()}


def key_impl(dtype: str) -> str | None:
    """Return the generator that a key dtype names, or None if it is not a key dtype.

    >>> key_impl(str(jax.random.key(0).dtype)), key_impl("float32")
    ('fry', None)
    """
    return dtype.removeprefix("key<").removesuffix(">") if dtype.startswith("key<") else None


def stored(array: Any) -> Any:
    """Return an array as it is stored: a key's data, or the array itself."""
    return jax.random.key_data(array) if is_key(array) else array


def _tree(name: str, tree: Any) -> dict[str, Any]:
    if isinstance(tree, Sharded):
        return arrays_by_name(tree, name)
    return {f"{name}.{i}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _with_tree(name: str, like: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(like, Sharded):
        return jax.tree.map(arrays.__getitem__, array_names(like.layout, name))
    treedef = jax.tree.structure(like)
    return jax.tree.unflatten(treedef, [arrays[f"{name}.{i}"] for i in range(treedef.num_leaves)])


def size_of(arrays: dict[str, Any]) -> int:
    """Return the number of bytes of all arrays, each counted once."""
    return sum(data.size * data.dtype.itemsize for data in map(stored, arrays.values()))
