"""Draw a covering array: few cases in which each two values of two factors meet."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, int]]


def covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool], *, seed: int, candidates: int = 30
) -> list[Case]:
    """Return cases that together contain each pair of values that an allowed case can contain.

    Each case is the best of some random ones. The same arguments give the same cases under any version of Python.

    Args:
        factors: the values of each factor.
        allowed: whether a case may be drawn.
        seed: of the draws.
        candidates: how many are drawn for each case.
    """
    dice = random.Random(seed)
    left = pairs_of(factors)
    cases: list[Case] = []
    while left:
        wanted = min(left, key=lambda pair: sorted(pair))
        drawn = [numbers for numbers in (_with(wanted, factors, allowed, dice) for _ in range(candidates)) if numbers]
        if not drawn:
            left.discard(wanted)  # no allowed case has it
            continue
        best = max(drawn, key=lambda numbers: len(left & _pairs_in(numbers)))
        left -= _pairs_in(best)
        cases.append(_values(best, factors))
    return cases


def pairs_of(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return all pairs of values of two factors, each value as its number."""
    return {
        frozenset({(one, i), (two, j)})
        for one, two in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[two]))
    }


def _with(
    pair: Pair, factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool], dice: random.Random
) -> Any:
    """Return a random case with a pair, as numbers; None if none of many is allowed."""
    for _ in range(2000):
        numbers = {name: dice.randrange(len(values)) for name, values in factors.items()} | dict(pair)
        if allowed(_values(numbers, factors)):
            return numbers
    return None


def _values(numbers: Mapping[str, int], factors: Mapping[str, Sequence[Any]]) -> Case:
    return {name: factors[name][number] for name, number in numbers.items()}


def _pairs_in(numbers: Mapping[str, int]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(numbers.items(), 2)}
