"""Define the errors between instances of a run, and how they name instances and what differs between them.

Nothing here imports jax.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ipu_jax.base.checks import shown

ABSENT: Final = "none"
"""Stands for a value that an instance does not have."""

_LONGEST: Final = 200


class InstancesDifferError(RuntimeError):
    """The instances of a run don't match: one has different flags, versions or counts. The message names it."""


class InstancesMissingError(TimeoutError):
    """Some instances did not arrive in time at a point where all of them must meet. The message names them."""


class PortTakenError(OSError):
    """Another program is listening on the coordinator's port."""


def named(numbers: Sequence[int]) -> str:
    """Return "instance 3" or "instances 0 and 2"."""
    return f"instance{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def listed(numbers: Sequence[int]) -> str:
    """Return instance numbers in words.

    >>> listed([0]), listed([0, 2]), listed([0, 1, 2, 5, 6])
    ('0', '0 and 2', '0 to 2, 5 and 6')
    """
    words: list[str] = []
    for run in runs_of(numbers):
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers in order, in lists of consecutive ones.

    >>> runs_of([0, 1, 2, 5])
    [[0, 1, 2], [5]]
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def difference(fingerprints: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return which instances differ from the others, and in what; None if all are equal.

    The most frequent value counts as right; in a tie, the value of the first instance.

    Args:
        fingerprints: values as texts, by name, of each instance.

    >>> alike, other = {"jax": "0.10.2", "flags": "--epochs 2"}, {"jax": "0.10.2", "flags": "--epochs 3"}
    >>> print(difference({0: alike, 1: alike, 2: other}))
    instance 2 has flags '--epochs 3', instances 0 and 1 have '--epochs 2'
    >>> difference({0: alike, 1: alike}) is None
    True
    """
    told: list[str] = []
    for name in sorted({name for one in fingerprints.values() for name in one}):
        having: dict[str, list[int]] = {}
        for instance, one in sorted(fingerprints.items()):
            having.setdefault(one.get(name, ABSENT), []).append(instance)
        if len(having) > 1:
            usual = max(having, key=lambda text: (len(having[text]), -having[text][0]))
            others = [f"{_having(having[text])} {name} {shown(text, _LONGEST)!r}" for text in having if text != usual]
            told.append(f"{', '.join(others)}, {_having(having[usual])} {shown(usual, _LONGEST)!r}")
    return "; ".join(told) or None


def _having(numbers: Sequence[int]) -> str:
    return f"{named(numbers)} {'have' if len(numbers) > 1 else 'has'}"
