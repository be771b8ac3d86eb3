"""Define the errors between instances of a run, and how they name instances.

Nothing here imports jax.
"""

from collections.abc import Iterable, Sequence


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
