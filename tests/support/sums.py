"""Accumulators of gradients, for tests that run a backward pass by itself."""

from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.programs.gradient_sums import Sum


def empty_sums(params: Any) -> list[Sum]:
    """Return an accumulator of zeros for each leaf, of its own shape and dtype."""
    return [Sum(jnp.zeros_like(leaf), leaf.shape) for leaf in jax.tree.leaves(params)]
