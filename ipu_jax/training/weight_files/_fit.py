"""Decide which saved arrays each leaf is made of, and report everything that does not fit in one error."""

import difflib
import fnmatch
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_jax.training.weight_files._tensors import TensorInfo, WeightSource
from ipu_jax.training.weight_files.saved import Saved

_COMPARISONS = 10_000  # of names, to find the nearest one: with thousands of wrong names it would take minutes
_NAMED = 100  # problems that an error names


def fit(
    wanted: Mapping[str, TensorInfo],
    source: WeightSource,
    mapping: Mapping[str, Saved | str] | None,
    ignore: Iterable[str],
    *,
    cast: bool,
) -> dict[str, Saved]:
    """Return, per leaf, how it is made from saved arrays.

    Args:
        wanted: per leaf, its shape and dtype.
        source: the saved arrays.
        mapping: per leaf, the name of its array or a `Saved`. Other leaves are made of the array of the same name.
        ignore: patterns of names of arrays that no leaf needs.
        cast: whether a leaf's dtype may hold fewer values than the array's dtype.

    Raises:
        ValueError: names each leaf without an array, array without a leaf, wrong shape and wrong dtype.
    """
    plans = {name: Saved(name) for name in wanted} | {
        name: saved if isinstance(saved, Saved) else Saved(saved) for name, saved in (mapping or {}).items()
    }
    used = {name for leaf in wanted for name in plans[leaf].names}
    patterns = [ignore] if isinstance(ignore, str) else list(ignore)
    unused = sorted(
        name for name in source.tensors.keys() - used if not any(fnmatch.fnmatchcase(name, p) for p in patterns)
    )
    guess = _Guesses()
    problems = [
        f"mapping has {name!r}, which is no leaf{guess.nearest(name, wanted)}" for name in plans.keys() - wanted.keys()
    ]
    for name, info in wanted.items():
        problems += _problems(name, info, plans[name], source, unused, guess, cast)
    missing = [leaf for leaf in wanted if not source.tensors.keys() >= set(plans[leaf].names)]
    problems += [
        f"unexpected: {name!r} {source.tensors[name]}, which no leaf takes{guess.nearest(name, missing)}"
        for name in unused
    ]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:_NAMED])
        lines += f"\n  and {len(problems) - _NAMED:,} more" if len(problems) > _NAMED else ""
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise ValueError(
            f"{source.label} does not fit `like`, {count}:{lines}\nSay mapping={{leaf: Saved(name)}} for other names "
            "or shapes, ignore=[pattern] for arrays that no leaf needs, cast=True to round"
        )
    return {name: plans[name] for name in wanted}


def holds(stored: np.dtype[Any] | str, wanted: np.dtype[Any] | str) -> bool:
    """Return whether the dtype `wanted` can hold every value of the dtype `stored`.

    >>> holds(np.dtype("float16"), np.dtype("float32")), holds(np.dtype("float32"), np.dtype("float16"))
    (True, False)
    """
    if isinstance(stored, str) or isinstance(wanted, str):
        return False
    return stored == wanted or np.can_cast(stored, wanted, "safe")


class _Guesses:
    """Finds the nearest name for each of the first wrong names."""

    def __init__(self):
        self._left = _COMPARISONS

    def nearest(self, name: str, names: Collection[str]) -> str:
        """Return ": did you mean ...?", or nothing."""
        self._left -= len(names)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.75) if self._left >= 0 else []
        return f": did you mean {near[0]!r}?" if near else ""


def _problems(
    name: str, info: TensorInfo, saved: Saved, source: WeightSource, unused: list[str], guess: _Guesses, cast: bool
) -> list[str]:
    absent = [part for part in saved.names if part not in source.tensors]
    if absent:
        whose = lambda part: "" if part == name else f", for leaf {name!r}"  # noqa: E731
        return [f"missing: {part!r}{whose(part)}{guess.nearest(part, unused)}" for part in absent]
    unknown = [source.tensors[part] for part in saved.names if isinstance(source.tensors[part].dtype, str)]
    if unknown:
        origin = _origin(name, saved)
        return [f"dtype: leaf {name!r} is {info}, and the array {unknown[0]}{origin}, which has no meaning here"]
    try:
        made = saved.info(source.tensors)
    except ValueError as error:
        return [f"leaf {name!r} {info} is {saved}, which cannot be made: {error}"]
    return [] if made is None else misfit(name, info, saved, made, cast=cast)


def misfit(name: str, info: TensorInfo, saved: Saved, made: TensorInfo, *, cast: bool) -> list[str]:
    """Return, as texts, what is wrong with a leaf that would be made with the shape and dtype `made`."""
    origin, problems = _origin(name, saved), list[str]()
    if made.shape != info.shape:
        problems.append(f"shape: leaf {name!r} is {info}, and the array {made}{origin}{_hint(info.shape, made.shape)}")
    if not (cast or holds(made.dtype, info.dtype)):
        problems.append(
            f"dtype: leaf {name!r} is {info}, and the array {made}{origin}, which may lose digits: cast=True rounds"
        )
    return problems


def _origin(name: str, saved: Saved) -> str:
    return "" if saved.names == (name,) and repr(saved) == f"Saved({name!r})" else f", by {saved}"


def _hint(wanted: Sequence[int], made: Sequence[int]) -> str:
    orders = [(1, 0), (2, 3, 1, 0)]  # torch's Linear and Conv2d
    orders += itertools.permutations(range(3))
    for order in orders:
        if len(order) == len(made) and tuple(made[d] for d in order) == tuple(wanted):
            return f": .transpose({', '.join(map(str, order))}) would fit"
    return ""
