"""Recognise typed random keys, and send or store them as their data."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Dtype, Tree, Value

_IMPLS: Final = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}
"""Generators whose names dtypes shorten."""


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


def key_impl(dtype: str) -> str | None:
    """Return the generator that a key dtype names, or None if it is not a key dtype.

    >>> key_impl(str(jax.random.key(0).dtype)), key_impl("float32")
    ('threefry2x32', None)
    """
    short = dtype.removeprefix("key<").removesuffix(">")
    return _IMPLS.get(short, short) if dtype.startswith("key<") else None


def dtype_named(name: str) -> Dtype:
    """Return the dtype of this name, also of keys.

    >>> dtype_named("bfloat16"), dtype_named(str(jax.random.key(0).dtype))
    (dtype(bfloat16), key<fry>)
    """
    impl = key_impl(name)
    return jnp.dtype(name) if impl is None else jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
