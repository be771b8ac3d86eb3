"""Check single arguments: each check raises a `ValueError` that gives the value, the rule and a remedy."""

import difflib
import math
import numbers


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, if it is one of `choices`; else raise `ValueError`, naming the nearest choice if one is near."""
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{name}={value!r} is unknown: {hint}Choose one of {', '.join(map(repr, choices))}")


def check_count(name: str, value: object) -> int:
    """Return `value` as an int, if it is an integer of at least 1; else raise `ValueError`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is not a count: give an int of at least 1")
    return int(value)


def check_positive(name: str, value: object) -> float:
    """Return `value` as a float, if it is a finite number above 0; else raise `ValueError`."""
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r} is not a positive number: give a finite one above 0")
    return number
