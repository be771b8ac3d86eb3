"""Scale the loss so that gradients are not too small for float16, and divide the scaled gradients in float32 at least.

    dynamic    scale 32768 ... 1000 good steps ... 65536 -> inf: skip this update, 32768 -> ...

Source: Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740, section 3.2.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Value
from ipu_jax.core.options import DynamicScale, TrainOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """A dynamic loss scale.

    Attributes:
        scale: float32, the factor by which the loss is multiplied.
        good_steps: int32, the number of updates made since the scale last changed.
    """

    scale: Value
    good_steps: Value


def initial_scale(options: TrainOptions) -> Scale | None:
    """Return the dynamic scale that training starts with, or None if the scale never changes."""
    chosen = options.loss_scale
    if not isinstance(chosen, DynamicScale):
        return None
    return Scale(jnp.float32(chosen.initial), jnp.int32(0))


def current_scale(options: TrainOptions, scale: Scale | None) -> Value:
    """Return the factor by which the loss is multiplied."""
    if scale is not None:
        return scale.scale.astype(float)  # under x64 its quotients are as exact as float64 gradients
    return 1.0 if isinstance(options.loss_scale, DynamicScale) else options.loss_scale


def next_scale(chosen: DynamicScale, scale: Scale, finite: Value) -> Scale:
    """Return the scale after an update that was made (if `finite`) or skipped.

    >>> chosen = DynamicScale(initial=8.0, growth_interval=1)
    >>> scale = Scale(jnp.float32(8), jnp.int32(0))
    >>> float(next_scale(chosen, scale, True).scale), float(next_scale(chosen, scale, False).scale)
    (16.0, 4.0)
    """
    good_steps = jnp.where(finite, scale.good_steps + 1, 0)
    grows = good_steps == chosen.growth_interval
    grown = jnp.minimum(scale.scale * chosen.factor, chosen.largest)
    shrunk = jnp.maximum(scale.scale / chosen.factor, chosen.smallest)
    new = jnp.where(finite, jnp.where(grows, grown, scale.scale), shrunk)
    return Scale(new.astype(jnp.float32), jnp.where(grows, 0, good_steps).astype(jnp.int32))
