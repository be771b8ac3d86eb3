"""Describe a training as plain data, and refuse to continue it with another model or optimizer, naming the difference.

A checkpoint contains the description of the arrays that it stores. For every leaf of weights, optimizer, state and
average it contains the path, shape, dtype and place. Two descriptions with the same leaves are of the same training. If
the places are also the same, arrays are read as they are; otherwise leaves are read out of them.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from ipu_jax.base.version import __version__
from ipu_jax.core.weights.place import Place
from ipu_jax.training.checkpoints._arrays import described, named
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

KINDS: Final = {"params": "weights", "optimizer": "optimizer state", "stages": "state of stages", "ema": "average"}

_SINGLE: Final = {
    "scale.scale": "a dynamic loss scale: give the step TrainOptions(loss_scale=DynamicScale())",
    "key": "a random key: the model or the rounding must be random",
}


def description_of(step: TrainStep, state: TrainState) -> dict[str, Any]:
    """Return the description of a training. Any state of the step will do; its values don't matter."""
    places = step.placement.places(state)
    return {
        "arrays": described(named(state)),
        "leaves": {kind: [place.plain() for place in places[kind]] for kind in KINDS},
        "ipus": step.model.ipus,
        "replicas": step.model.replicas,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint, to help find out why it cannot be read."""
    return {"ipu_jax": __version__} | {name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "optax")}


def same_places(saved: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether two trainings hold the same leaves in the same arrays."""
    return saved["arrays"] == here["arrays"] and saved["leaves"] == here["leaves"]


def check_words(where: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the user's descriptions of two trainings are equal; the message names a difference."""
    for name in sorted({*saved, *here}):
        if name not in saved or name not in here or saved[name] != here[name]:
            one, other = (repr(each[name]) if name in each else "not given" for each in (saved, here))
            raise ValueError(
                f"{where} is of {name} {one}, but this training's {name} is {other}: resume with the same {name}, or "
                "save to another folder"
            )


def check_model(where: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless two trainings hold the same leaves; the message names the first difference."""
    for kind, what in KINDS.items():
        of_saved, of_here = ({place["path"]: _text(place) for place in each["leaves"][kind]} for each in (saved, here))
        if bool(of_saved) != bool(of_here) and kind == "ema":
            mend = "give the step TrainOptions(ema_decay=...)" if of_saved else "leave ema_decay out"
            raise ValueError(f"{where} has {'an' if of_saved else 'no'} average of the weights: {mend}")
        missing, unknown = sorted(of_here.keys() - of_saved.keys()), sorted(of_saved.keys() - of_here.keys())
        if missing or unknown:
            parts = [f"has no {missing[0]}, which this training has"] if missing else []
            parts += [f"has {unknown[0]}, which this training does not have"] if unknown else []
            raise ValueError(
                f"{where} has other {what}: it {', and '.join(parts)}; resume with the model and the "
                "optimizer that it was saved with, or save to another folder"
            )
        for path, text in of_here.items():
            if of_saved[path] != text:
                raise ValueError(
                    f"{where} has other {what}: {path} is {of_saved[path]} in it, and {text} in this training; resume "
                    "with the sizes and the precision that it was saved with, or save to another folder"
                )
    for name, mend in _SINGLE.items():
        one, other = (each["arrays"].get(name) for each in (saved, here))
        if one != other:
            has = ["no" if each is None else each["dtype"] for each in (one, other)]
            raise ValueError(
                f"{where} has {has[0]} {name.split('.')[0]}, and this training has {has[1]}. It is {mend}, "
                "as when it was saved"
            )


def wrong_with(saved: Mapping[str, Any]) -> str:
    """Return what is missing from a seal's description, or differs from the form of `description_of`, or ""."""
    try:
        leaves = [place for kind in KINDS for place in places(saved, kind)]
        shapes = [*(place.shape for place in leaves), *(array["shape"] for array in saved["arrays"].values())]
        texts = [*(place.dtype for place in leaves), *(array["dtype"] for array in saved["arrays"].values())]
        texts += [text for place in leaves for text in (place.path, place.array)]
        is_right = all(isinstance(n, int) for shape in shapes for n in shape)
        return (
            "" if is_right and all(isinstance(text, str) for text in texts) else "its model has other shapes or names"
        )
    except (KeyError, TypeError, AttributeError):
        return "its model is not described"


def places(described: Mapping[str, Any], kind: str) -> list[Place]:
    """Return the places of the leaves of one kind."""
    return [Place.of_plain(plain) for plain in described["leaves"][kind]]


def _text(place: Mapping[str, Any]) -> str:
    return f"{place['dtype']}[{', '.join(map(str, Place.of_plain(place).whole_shape))}]"
