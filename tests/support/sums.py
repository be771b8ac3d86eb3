"""Accumulators of gradients, for tests that run a backward pass on its own."""

from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.core.programs.gradient_sums import Sum


def empty_sums(params: Any) -> list[Sum]:
    """Return an accumulator of zeros for each leaf, with the leaf's shape and dtype."""
    return [Sum(jnp.zeros_like(leaf), leaf.shape) for leaf in jax.tree.leaves(params)]
