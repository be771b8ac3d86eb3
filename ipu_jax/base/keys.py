"""Recognise typed random keys, and send or store them as their data."""

from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Tree, Value


def is_key(value: Value) -> bool:
    """Return whether `value` has the dtype of typed keys, whatever its shape.

    >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2, jnp.uint32)), is_key(None)
    (True, False, False)
    """
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_one_key(value: Value) -> bool:
    """Return whether `value` is a single typed key.

    >>> is_one_key(jax.random.key(0)), is_one_key(jax.random.split(jax.random.key(0)))
    (True, False)
    """
    return is_key(value) and value.shape == ()


def without_keys(value: Any) -> Any:
    """Return the data of typed keys; anything else as it is."""
    return jax.random.key_data(value) if is_key(value) else value


def with_keys(value: Any, like: Tree) -> Any:
    """Return typed keys with this data if `like`, perhaps only a shape, has their dtype; else the value as it is.

    >>> key = jax.random.key(7)
    >>> bool(with_keys(without_keys(key), like=jax.ShapeDtypeStruct((), key.dtype)) == key)
    True
    """
    # jax.random.key_impl takes no shapes
    return jax.random.wrap_key_data(value, impl=like.dtype._impl.name) if is_key(like) else value
