"""Recognise typed random keys."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """Return whether `value` has the dtype of typed keys, whatever its shape.

    >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2, jnp.uint32)), is_key(None)
    (True, False, False)
    """
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_one_key(value: Any) -> bool:
    """Return whether `value` is a single typed key.

    >>> is_one_key(jax.random.key(0)), is_one_key(jax.random.split(jax.random.key(0)))
    (True, False)
    """
    return is_key(value) and value.shape == ()
