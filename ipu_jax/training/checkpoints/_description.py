"""Describe a training run as plain data, and refuse to resume it with another model or optimizer, naming what differs.

A checkpoint contains the description of the arrays that it stores. For every leaf of weights, optimizer, state and
average it contains the path, shape, dtype and place. Two descriptions with the same leaves are of the same training. If
the places are also the same, arrays are read as they are; otherwise leaves are read out of them.

    TrainState  -- named -->  {"params.slots.0": array, "optimizer.0.1": array, "step": array, ...}
                <-- with_arrays --

Random keys are stored as their data.
"""

import dataclasses
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Final

import jax

from ipu_jax.base.annotations import Json, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.base.version import __version__
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

KINDS: Final = {"params": "weights", "optimizer": "optimizer state", "stages": "state of stages", "ema": "average"}

_SINGLE: Final = {
    "scale.scale": "a dynamic loss scale: give the step TrainOptions(loss_scale=DynamicScale())",
    "key": "a random key: the model or the rounding must be random",
}


def description_of(step: TrainStep, state: TrainState) -> dict[str, Json]:
    """Return the description of a training run. Any state of the step will do; its values don't matter."""
    layouts, arrays = step.placement.layouts(state), named(state)
    leaves: dict[str, list[Json]] = {kind: [] for kind in KINDS}
    for kind, layout in layouts.items():
        names = [f"{kind}.{array.name}" for array in layout.arrays]
        leaves[kind] = [leaf.plain(names[leaf.array]) for leaf in layout.leaves if leaf.array >= 0]
    return {
        "arrays": {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()},
        "leaves": leaves,
        "ipus": step.model.ipus,
        "replicas": step.model.replicas,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint, to help find out why it cannot be read."""
    return {"ipu_jax": __version__} | {name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "optax")}


def check_words(where: str, saved: Mapping[str, Json], here: Mapping[str, Json]) -> None:
    """Raise `ValueError` unless the user's descriptions of two runs are equal; the message names a difference."""
    for name in sorted({*saved, *here}):
        if name not in saved or name not in here or saved[name] != here[name]:
            one, other = (repr(each[name]) if name in each else "not given" for each in (saved, here))
            raise ValueError(
                f"{where} is of {name} {one}, but this run's {name} is {other}: resume with the same {name}, or "
                "save to another folder"
            )


def check_model(where: str, saved: Mapping[str, Json], here: Mapping[str, Json]) -> None:
    """Raise `ValueError` unless two runs hold the same leaves; the message names the first difference."""
    for kind, what in KINDS.items():
        of_saved, of_here = ({place["path"]: _text(place) for place in each["leaves"][kind]} for each in (saved, here))
        if bool(of_saved) != bool(of_here) and kind == "ema":
            mend = "give the step TrainOptions(ema_decay=...)" if of_saved else "leave ema_decay out"
            raise ValueError(f"{where} has {'an' if of_saved else 'no'} average of the weights: {mend}")
        missing, unknown = sorted(of_here.keys() - of_saved.keys()), sorted(of_saved.keys() - of_here.keys())
        if missing or unknown:
            parts = [f"has no {missing[0]}, which this run has"] if missing else []
            parts += [f"has {unknown[0]}, which this run does not have"] if unknown else []
            raise ValueError(
                f"{where} has other {what}: it {', and '.join(parts)}; resume with the model and the "
                "optimizer that it was saved with, or save to another folder"
            )
        for path, text in of_here.items():
            if of_saved[path] != text:
                raise ValueError(
                    f"{where} has other {what}: {path} is {of_saved[path]} in it, and {text} in this run; resume "
                    "with the sizes and the precision that it was saved with, or save to another folder"
                )
    for name, mend in _SINGLE.items():
        one, other = (each["arrays"].get(name) for each in (saved, here))
        if one != other:
            has = ["no" if each is None else each["dtype"] for each in (one, other)]
            raise ValueError(
                f"{where} has {has[0]} {name.split('.')[0]}, and this run has {has[1]}. It is {mend}, "
                "as when it was saved"
            )


def wrong_with(saved: Mapping[str, Json]) -> str:
    """Return what is missing from a seal's description, or differs from the form of `description_of`, or ""."""
    try:
        named = [of for kind in KINDS for of in leaves(saved, kind)]
        shapes = [*(leaf.shape for _, leaf in named), *(array["shape"] for array in saved["arrays"].values())]
        texts = [*(leaf.dtype for _, leaf in named), *(array["dtype"] for array in saved["arrays"].values())]
        texts += [text for array, leaf in named for text in (leaf.path, array)]
        is_right = all(isinstance(n, int) for shape in shapes for n in shape)
        return (
            "" if is_right and all(isinstance(text, str) for text in texts) else "its model has other shapes or names"
        )
    except (KeyError, TypeError, AttributeError):
        return "its model is not described"


def leaves(described: Mapping[str, Json], kind: str) -> list[tuple[str, Leaf]]:
    """Return the leaves of one kind, each with the name of its array."""
    return [(plain["array"], Leaf.of_plain(plain)) for plain in described["leaves"][kind]]


def has_same_places(saved: Mapping[str, Json], here: Mapping[str, Json]) -> bool:
    """Return whether two descriptions of one training have the same arrays, and the same leaves in them."""
    leaves_of = lambda described, kind: sorted(json.dumps(plain, sort_keys=True) for plain in described["leaves"][kind])
    return saved["arrays"] == here["arrays"] and all(leaves_of(saved, kind) == leaves_of(here, kind) for kind in KINDS)


def _text(plain: Mapping[str, Json]) -> str:
    return f"{plain['dtype']}[{', '.join(map(str, Leaf.of_plain(plain).whole_shape))}]"


# arrays by name


def named(state: TrainState) -> dict[str, Value]:
    """Return the arrays of a state by name, or the values in their places, such as PartitionSpecs."""
    arrays = {name: array for kind in KINDS for name, array in _arrays_of(kind, state)} | {"step": state.step}
    if state.scale is not None:
        arrays |= {"scale.scale": state.scale.scale, "scale.good_steps": state.scale.good_steps}
    if state.key is not None:
        arrays["key"] = state.key
    return arrays


def with_arrays(like: TrainState, arrays: dict[str, Value]) -> TrainState:
    """Return a state with the structure of `like` and these arrays: the inverse of `named`."""
    scale = like.scale
    if scale is not None:
        scale = dataclasses.replace(scale, scale=arrays["scale.scale"], good_steps=arrays["scale.good_steps"])
    trees: dict[str, Tree] = {}
    for kind in KINDS:
        found = [arrays[name] for name, _ in _arrays_of(kind, like)]
        trees[kind] = jax.tree.unflatten(jax.tree.structure(getattr(like, kind)), found)
    return TrainState(**trees, scale=scale, step=arrays["step"], key=arrays.get("key"))


def stored(array: Value) -> Value:
    """Return an array as it is stored: a key's data, or the array itself."""
    return jax.random.key_data(array) if is_key(array) else array


def _arrays_of(kind: str, state: TrainState) -> list[tuple[str, Value]]:
    tree = getattr(state, kind)
    arrays = jax.tree.leaves(tree)
    names = [of.name for of in tree.layout.arrays] if isinstance(tree, Sharded) else map(str, range(len(arrays)))
    return [(f"{kind}.{name}", array) for name, array in zip(names, arrays, strict=True)]


def size_of(arrays: dict[str, Value]) -> int:
    """Return the number of bytes of all arrays, each counted once."""
    return sum(data.size * data.dtype.itemsize for data in map(stored, arrays.values()))
