"""Check that IPUs can hold a leaf, and train it, before anything is placed."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Dtype, Value

_REPLACED: Final = "_overwrite_with_gradient"


def check_array(where: str, value: Value) -> None:
    """Raise `ValueError` unless `value` is an array that IPUs can hold, or has the shape and dtype of one."""
    dtype = getattr(value, "dtype", None)
    is_number = isinstance(dtype, np.dtype) and dtype.isnative and jnp.issubdtype(dtype, jnp.number)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or is_number or dtype == np.bool_:
        return
    if isinstance(value, (str, bytes)):
        raise ValueError(
            f"{where} is {value!r:.60}, a text, and must be an array of numbers: give the numbers of its tokens, or "
            "leave it out"
        )
    if dtype is None and callable(value):
        raise ValueError(f"{where} is a function, {value!r:.60}: leave it out, and let the function name it itself")
    if isinstance(value, (bool, int, float, complex)):
        # a list is a tree of its numbers
        array = f"np.asarray({where.partition('[0]')[0]})"
        raise ValueError(f"{where} is {value!r:.60}, and must be an array of numbers: give {array}")
    if isinstance(dtype, np.dtype):
        raise ValueError(f"{where} has dtype {dtype}: IPUs hold numbers and bools, in native byte order: convert it")
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    mend = "tensor.numpy()" if hasattr(value, "numpy") else "np.asarray(...), or batch.data of a FeedBatch"
    raise ValueError(f"{where} is a {kind}, and must be a NumPy or jax array: give {mend}")


def check_weight(where: str, dtype: Dtype, frozen: bool = False) -> None:
    """Raise `ValueError` unless a leaf of this dtype can be trained, or is frozen and can be held."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ValueError(
            f"{where} is {dtype}: a key is not held among numbers; hold jax.random.key_data(...) of it, or let the "
            "function take a key"
        )
    if frozen:
        return
    if _REPLACED in where:
        raise ValueError(
            f"{where} is in Flax's collection {_REPLACED!r}: its gradient is its new value, which an optimizer would "
            "take for a gradient. Freeze it, and the scales stay as they are (of a cut function, frozen={'params': "
            f"False, {_REPLACED!r}: True}}), or compute in bfloat16"
        )
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"{where} is {dtype}: weights must be real; hold two real leaves, and join them in the function, "
            "jax.lax.complex(re, im)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where} is {dtype}: weights must be floating; freeze it, or carry other data in the batch")
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{where} is {dtype}: weights that are trained must have at least 16 bits; hold it in bfloat16 and cast "
            "it in the function, or freeze it"
        )
