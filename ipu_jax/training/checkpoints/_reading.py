"""Read a state from a checkpoint: array by array onto the IPUs, or leaf by leaf on the host for another topology."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ipu_jax.base.keys import is_key
from ipu_jax.core.weights.place import Place
from ipu_jax.training.checkpoints._arrays import named, with_arrays
from ipu_jax.training.checkpoints._description import KINDS, places
from ipu_jax.training.checkpoints._store import Store
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep


def read_as_saved(store: Store, path: Path, step: TrainStep, like: TrainState) -> TrainState:
    """Return the state of a checkpoint with the same arrays as this step. Each process reads its own shards."""
    specs = named(step.placement.specs(like))
    shardings = {name: NamedSharding(step.model.mesh, spec) for name, spec in specs.items()}
    state = with_arrays(like, store.read(path, named(like), shardings))
    return dataclasses.replace(state, nonfinite=step.placement.no_streak())


def read_by_leaves(
    store: Store, path: Path, step: TrainStep, like: TrainState, *, saved: Mapping[str, Any], here: Mapping[str, Any]
) -> TrainState:
    """Return the state of a checkpoint of another topology.

    Each host reads all arrays, a few at a time, and holds the whole state until it is placed, like `TrainStep.restore`.
    """
    leaves: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    single: dict[str, Any] = {}
    in_array: dict[str, list[tuple[str, Place]]] = {name: [] for name in saved["arrays"]}
    for kind in KINDS:
        for place in places(saved, kind):
            in_array[place.array].append((kind, place))
    for name, array in store.whole(path, dict(saved["arrays"]), list(in_array)):
        if not in_array[name]:
            single[name] = array
        for kind, place in in_array[name]:
            if is_key(array):
                leaves[kind][place.path] = array
            else:  # other arrays may have other rows of it
                own = place.leaf(array)
                leaves[kind].setdefault(place.path, np.empty(place.whole_shape, own.dtype))[place.within] = own
    paths = {kind: dict.fromkeys(place.path for place in places(here, kind)) for kind in KINDS}
    ordered = {kind: [leaves[kind][leaf] for leaf in paths[kind]] for kind in KINDS}
    scale = like.scale
    if scale is not None:
        values = {name: jnp.asarray(single[f"scale.{name}"]) for name in ("scale", "good_steps")}
        scale = dataclasses.replace(scale, **values)
    trees = step.placement.assembled(like, ordered)
    return step.restore({**trees, "scale": scale, "step": int(single["step"]), "key": single.get("key")})
