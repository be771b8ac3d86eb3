"""Add values that Flax modules sow to the loss, and warn of sown values that are dropped.

self.sow("losses", "balance", value)     losses={"losses": 0.01}  ->  0.01 x the sum of its elements, to the loss
self.sow("metrics", "load", value)       not named                ->  dropped, with one warning
self.sow("intermediates", "h", value)    not named                ->  dropped, as Flax itself does
"""

import math
import numbers
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Value

Losses = Mapping[Any, float] | None
"""The weight of each collection (linen) or variable type (NNX) of sown values in the loss."""


def check_losses(name: str, losses: Losses, example: str) -> dict[Any, float]:
    """Return the weights of the losses of stage `name`; `example` is a key for the error message.

    Raises:
        ValueError: `losses` is not a mapping to finite numbers.
    """
    if losses is None:
        return {}
    weights = losses.values() if isinstance(losses, Mapping) else [None]
    if not all(isinstance(w, numbers.Real) and not isinstance(w, bool) and math.isfinite(w) for w in weights):
        raise ValueError(
            f"losses={losses!r} of stage {name!r} does not give each of them a finite weight: give a dict such as "
            f"{{{example}: 0.01}}"
        )
    return {what: float(weight) for what, weight in losses.items()}


def add_up(name: str, losses: Mapping[Any, float], sown: Mapping[Any, Value]) -> Value:
    """Return the weighted sum of all sown elements; None if all weights are 0.

    Args:
        name: the name of the stage.
        losses: the weights.
        sown: trees of arrays, named like the weights.

    Raises:
        ValueError: nothing was sown under one of the names.
    """
    total = None
    for what, weight in losses.items():
        if weight == 0:
            continue
        leaves = jax.tree.leaves(sown.get(what))
        if not leaves:
            raise ValueError(
                f"losses of stage {name!r} names {shown(what)}, into which its module sows nothing in training: leave "
                "it out, or give the name that the module's sow has"
            )
        for leaf in leaves:
            added = weight * jnp.sum(leaf, dtype=jnp.promote_types(jnp.result_type(leaf), jnp.float32))
            total = added if total is None else total + added
    return total


def warn_dropped(name: str, dropped: Iterable[Any]) -> None:
    """Warn that the module of stage `name` sows values under these names, and that they are dropped."""
    for what in sorted(map(shown, dropped)):
        warnings.warn(
            f"the module of stage {name!r} sows into {what}, which is dropped: give losses={{{what}: weight}} to add "
            f"it to the loss, or losses={{{what}: 0}} to drop it without this warning",
            stacklevel=2,
        )


def shown(what: Any) -> str:
    """Return a collection or a variable type as written in a program."""
    return what.__name__ if isinstance(what, type) else repr(what)
