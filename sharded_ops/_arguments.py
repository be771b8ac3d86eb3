"""Check the ops' arguments: whole numbers, real numbers, words, the name of an axis, and arrays.

Each function returns its argument as a plain Python or jax value, or raises before anything is traced. NumPy's numbers
are accepted like Python's. A bool is never accepted as a number. An array is never accepted as an option, because the
compiled program depends on options.
"""

import math
import numbers
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def whole_number(
    name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None, instead: str = ""
) -> int:
    """Return `value` as an int, if it is a Python or NumPy integer in the range. Bools are not accepted.

    Args:
        name: of the argument, for messages.
        value: anything.
        at_least: the least allowed value; None for no bound.
        at_most: the greatest allowed value, beside `at_least`; None for no bound.
        instead: an alternative for the caller, which the message states after "give an int ..., or ".

    Raises:
        ValueError: names the argument, its value and the range.

    Example:
        >>> whole_number("size", np.int64(3), at_least=1)
        3
        >>> whole_number("token_chunk", 0, at_least=1, instead="leave it out to have it chosen")
        Traceback (most recent call last):
        ...
        ValueError: token_chunk=0 is out of range: give an int of at least 1, or leave it out to have it chosen
    """
    wanted = "an int" if at_least is None else f"an int of at least {at_least}"
    if at_most is not None:
        wanted = f"an int from {at_least} to {at_most}"
    mend = f"give {wanted}" + (f", or {instead}" if instead else "")
    # NumPy registers its integers as numbers.Integral, but not its bools.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={shown(value)} is not an int: {mend}")
    number = int(value)
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise ValueError(f"{name}={number} is out of range: {mend}")
    return number


def real_number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    instead: str = "",
) -> float:
    """Return `value` as a float, if it is a finite Python or NumPy number in the range. Bools are not accepted.

    Args:
        name: of the argument, for messages.
        value: anything.
        at_least: the least allowed value; None for no bound.
        above: a bound that the value must be greater than; None for no bound.
        at_most: the greatest allowed value, beside `at_least`; None for no bound.
        instead: an alternative for the caller, which the message states after "give a number ..., or ".

    Raises:
        ValueError: names the argument, its value and the range.

    Example:
        >>> real_number("epsilon", np.float32(0.5), at_least=0)
        0.5
        >>> real_number("epsilon", float("nan"), at_least=0)
        Traceback (most recent call last):
        ...
        ValueError: epsilon=nan is out of range: give a finite number of at least 0
    """
    wanted = "a finite number"
    if at_most is not None:
        wanted = f"a number from {at_least} to {at_most}"
    elif at_least is not None:
        wanted += f" of at least {at_least}"
    elif above is not None:
        wanted += f" above {above}"
    mend = f"give {wanted}" + (f", or {instead}" if instead else "")
    if not _is_real(value):
        raise ValueError(f"{name}={shown(value)} is not a plain number: {mend}")
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = float("inf")
    inside = math.isfinite(number)
    inside &= at_least is None or number >= at_least
    inside &= above is None or number > above
    inside &= at_most is None or number <= at_most
    if not inside:
        raise ValueError(f"{name}={number} is out of range: {mend}")
    return number


def one_axis(axis: Any) -> str:
    """Return `axis`, if it is the name of one mesh axis.

    Raises:
        ValueError: it is a tuple of names, or not a name.

    Example:
        >>> one_axis(("data", "ipu"))
        Traceback (most recent call last):
        ...
        ValueError: axis=('data', 'ipu') is not the name of one mesh axis: give a single name, such as 'ipu'
    """
    if not isinstance(axis, str):
        raise ValueError(f"axis={shown(axis)} is not the name of one mesh axis: give a single name, such as 'ipu'")
    return axis


def one_of(name: str, value: Any, choices: tuple[str, ...], what: str = "is unknown") -> str:
    """Return `value`, if it is one of `choices`.

    Raises:
        ValueError: names the argument, its value, the fault (`what`), and the choices.

    Example:
        >>> one_of("reduction", "mead", ("none", "mean", "sum"))
        Traceback (most recent call last):
        ...
        ValueError: reduction='mead' is unknown: use 'none', 'mean' or 'sum'
    """
    if not isinstance(value, str) or value not in choices:
        words = [repr(choice) for choice in choices]
        raise ValueError(f"{name}={shown(value)} {what}: use {', '.join(words[:-1])} or {words[-1]}")
    return value


def array_like(name: str, value: Any) -> jax.Array | np.ndarray:
    """Return `value` as a jax or NumPy array, whichever it is, if jax's own functions would accept it as an array.

    Neither jax's functions nor the ops accept lists, whose dtype and shape would have to be guessed.

    Raises:
        ValueError: it is a list, None or something else that is not an array.

    Example:
        >>> array_like("ids", [3, 4])
        Traceback (most recent call last):
        ...
        ValueError: ids=[3, 4] is not an array: give a jax or NumPy array, such as jnp.asarray makes
    """
    if isinstance(value, jax.Array):
        return value
    known = isinstance(value, np.ndarray | np.generic | bool | int | float | complex)
    if not known or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSUMm"):
        raise ValueError(f"{name}={shown(value)} is not an array: give a jax or NumPy array, such as jnp.asarray makes")
    return np.asarray(value)


def array(name: str, value: ArrayLike) -> jax.Array:
    """Return `value` as a jax array, if `array_like` accepts it. Python's numbers get jax's default dtypes.

    Raises:
        ValueError: it is a list, None or something else that is not an array.
    """
    return jnp.asarray(value if isinstance(value, bool | int | float | complex) else array_like(name, value))


def shown(value: Any) -> str:
    """Return a short text for `value` in a message; for an array it gives dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"<{value.dtype}{list(value.shape)} array>"
    return f"{value}" if isinstance(value, np.number) else reprlib.repr(value)


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    # Scalars of ml_dtypes, such as bfloat16 scalars, are NumPy scalars but not registered as numbers.Real.
    is_ml_dtype = isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    return isinstance(value, numbers.Real) or is_ml_dtype
