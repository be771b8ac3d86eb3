"""Check single arguments: errors give the value, the rule and a fix.

Neither jax nor NumPy is imported here, since every command line is checked by this.
"""

import difflib
import math
import numbers
from collections.abc import Iterable

from ipu_jax.base.annotations import Value
from ipu_jax.base.other_words import value_here


def as_int(value: object) -> int | None:
    """Return `value` as a Python int if it is a Python or NumPy integer, else None. A bool is not an integer.

    >>> import numpy as np
    >>> as_int(np.int64(3)), as_int(True), as_int(3.0)
    (3, None, None)
    """
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def in_line(value: object) -> str:
    """Return the repr of a value, of several lines the first.

    >>> import numpy as np
    >>> in_line(np.eye(2))
    'array([[1., 0.],'
    """
    return repr(value).partition("\n")[0]


def shown(text: str, most: int = 60) -> str:
    """Return a text as it is shown in an error: of a long one, the beginning and the end.

    >>> shown("12"), shown(100 * "1")
    ('12', '1111111111111111111111111...1111111111111111111111111')
    """
    half = (most - 10) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def check_count(name: str, value: object) -> int:
    """Return `value` as a Python int, if it is a Python or NumPy integer of at least 1.

    Raises:
        ValueError: it is not (a bool is not a count).

    >>> import numpy as np
    >>> check_count("micro_batches", np.int64(4))
    4
    """
    count = as_int(value)
    if count is None or count < 1:
        raise ValueError(f"{name}={value!r} is not a count: give an int of at least 1")
    return count


def check_bool(name: str, value: object) -> bool:
    """Return `value` as a Python bool, if it is a Python or NumPy bool.

    Raises:
        ValueError: it is not.

    >>> import numpy as np
    >>> check_bool("weighted", np.True_)
    True
    """
    if not _is_bool(value):
        raise ValueError(f"{name}={value!r} is not a bool: give True or False")
    return bool(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, if it is one of `choices`.

    Raises:
        ValueError: it is not. The message names the nearest choice if there is one, ignoring case.

    >>> check_choice("schedule", "groupd", ("sequential", "grouped"))
    Traceback (most recent call last):
    ...
    ValueError: schedule='groupd' is unknown: did you mean 'grouped'? Choose one of 'sequential', 'grouped'
    """
    if isinstance(value, str) and value in choices:
        return value
    hint = value_here(name, value) or nearest(value, choices)
    mend = f"{hint} Choose" if hint else "choose"
    raise ValueError(f"{name}={in_line(value)} is unknown: {mend} one of {', '.join(map(repr, choices))}")


def nearest(value: object, choices: Iterable[str]) -> str:
    """Return the question whether the nearest of the choices was meant, ignoring case, or "" if none is near.

    >>> nearest("heads", ("mlp", "head"))
    "did you mean 'head'?"
    """
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(value.lower(), lowered, n=1, cutoff=0.65) if isinstance(value, str) else []
    return f"did you mean {lowered[near[0]]!r}?" if near else ""


def check_positive(name: str, value: object) -> float:
    """Return `value` as a Python number, if it is a finite Python or NumPy number above 0.

    Raises:
        ValueError: it is not.

    >>> import numpy as np
    >>> check_positive("loss_scale", np.float32(128))
    128.0
    """
    number: Value = value.item() if isinstance(value, numbers.Real) and hasattr(value, "item") else value  # pyright: ignore
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name}={value!r} is not a positive number: give a finite one above 0")
    return number


def check_cost(name: str, value: object, kind: str = "cost") -> float:
    """Return `value` as a float, if `float` accepts it as a finite number of at least 0, and it is not text or a bool.

    Args:
        name: the name of the argument.
        value: its value.
        kind: the word for the number in error messages.

    Raises:
        ValueError: it is not.

    >>> import numpy as np
    >>> check_cost("transfer", np.int64(3))
    3.0
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) or _is_bool(value) else float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}={value!r} is not a {kind}: give a finite number of at least 0")
    return number


def _is_bool(value: object) -> bool:
    kind = type(value)  # NumPy's has had two names
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))
