"""What the ops are given besides data: whole numbers, real numbers, words, one axis name, and what counts as an array.

Each function returns its argument as plain Python or jax has it, or refuses it before anything is traced. NumPy's
numbers are as good as Python's; a bool is never a number; an array is never an option, since what is compiled depends
on it.
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
    """Return `value` as an int, if it is a whole number in the range: Python's or NumPy's, not a bool.

    Args:
        name: of the argument.
        value: anything.
        at_least: the least that will do; None: no bound.
        at_most: the greatest that will do; None: no bound.
        instead: what else the caller may do, to be read after "give an int ..., or ".

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
    if at_least is not None and at_most is not None:
        wanted = f"an int from {at_least} to {at_most}"
    else:
        wanted = "an int" + (f" of at least {at_least}" if at_least is not None else "")
        wanted += f" of at most {at_most}" if at_most is not None else ""
    mend = f"give {wanted}" + (f", or {instead}" if instead else "")
    # NumPy registers its integers as such, and not its bools.
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
    """Return `value` as a float, if it is a finite number in the range: Python's or NumPy's, not a bool.

    Args:
        name: of the argument.
        value: anything.
        at_least: the least that will do; None: no bound.
        above: what it must be greater than; None: no bound.
        at_most: the greatest that will do; None: no bound.
        instead: what else the caller may do, to be read after "give a number ..., or ".

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
    if at_least is not None and at_most is not None:
        wanted = f"a number from {at_least} to {at_most}"
    elif at_least is not None:
        wanted += f" of at least {at_least}"
    elif above is not None:
        wanted += f" above {above}"
    if at_most is not None and at_least is None:
        wanted += f" of at most {at_most}" if above is None else f", at most {at_most}"
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
        ValueError: it is a tuple of names, or no name.

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
    """Return `value`, if it is one of these words.

    Raises:
        ValueError: names the argument, its value, `what` is wrong with it, and what there is.

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
    """Return `value` as jax's array or NumPy's, whichever it is, if jax's own functions would take it for one.

    They take no lists, as it cannot be seen of one how large it was meant to be; nor does any op here.

    Raises:
        ValueError: it is a list, None or the like.

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
    """Return `value` as a jax array, if `array_like` takes it. Python's numbers get jax's default dtypes.

    Raises:
        ValueError: it is a list, None or the like.
    """
    return jnp.asarray(value if isinstance(value, bool | int | float | complex) else array_like(name, value))


def shown(value: Any) -> str:
    """Return `value` in a message: short, and of an array its dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"<{value.dtype}{list(value.shape)} array>"
    return f"{value}" if isinstance(value, np.number) else reprlib.repr(value)


def _is_real(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    # ml_dtypes' numbers, such as bfloat16's, are NumPy's but not registered as real.
    narrow = isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    return isinstance(value, numbers.Real) or narrow
