"""Describe what the instances of a run must have in common, and name their differences.

Nothing here imports jax.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from ipu_jax.distributed.environment import Place, text_of

# what decides the compiled program: it must be equal on all instances, or the order of its collectives differs
_PACKAGES: Final = ("ipu-jax", "jax", "jaxlib", "numpy", "optax", "flax", "equinox")
_VARIABLES: Final = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
    "XLA_FLAGS",
)
_ABSENT: Final = "none"
_LONGEST: Final = 200


def fingerprint(place: Place | None, *, flags: bool = True) -> dict[str, str]:
    """Return what this process must have in common with the other instances, as texts by name.

    Args:
        place: the place of this instance, if known.
        flags: whether to include the command line.
    """
    found = {"Python": platform.python_version()}
    if place is not None:
        found |= {
            "number of instances": str(place.instances),
            "number of replicas": str(place.replicas),
            "IPUs per replica": str(place.ipus_per_replica),
            "further axes": text_of(place.axes) or _ABSENT,
            "attempt": str(place.attempt),
        }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = _ABSENT
    found |= {name: os.environ.get(name, _ABSENT) for name in _VARIABLES}
    if flags:
        found["flags"] = " ".join(sys.argv[1:]) or _ABSENT
    return found


def difference(fingerprints: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return which instances differ from the others, and in what; None if all are equal.

    The most frequent value counts as right; in a tie, the value of the first instance.

    Args:
        fingerprints: the fingerprints by instance number.

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
            having.setdefault(one.get(name, _ABSENT), []).append(instance)
        if len(having) > 1:
            usual = max(having, key=lambda text: (len(having[text]), -having[text][0]))
            others = [
                f"{named(having[text])} {_has(having[text])} {name} {_quoted(text)}" for text in having if text != usual
            ]
            told.append(f"{', '.join(others)}, {named(having[usual])} {_has(having[usual])} {_quoted(usual)}")
    return "; ".join(told) or None


def listed(numbers: Sequence[int]) -> str:
    """Return instance numbers in words.

    >>> listed([0]), listed([0, 2]), listed([0, 1, 2, 5, 6])
    ('0', '0 and 2', '0 to 2, 5 and 6')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def named(numbers: Sequence[int]) -> str:
    """Return "instance 3" or "instances 0 and 2"."""
    return f"instance{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _has(numbers: Sequence[int]) -> str:
    return "have" if len(numbers) > 1 else "has"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")
