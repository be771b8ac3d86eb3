"""Pick few cases that contain every possible pair of choices: a covering array, by greedy search.

All combinations would be thousands of programs. But most faults come from one choice or from a pair of choices.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """Return all pairs of choices of a case."""
    return set(itertools.combinations(case.items(), 2))


def covering(choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool], *, seed: int = 0) -> list[Case]:
    """Return cases such that every possible pair of choices is in one of them; every call returns the same cases.

    A pair is left out if many random cases cannot contain it, because some other choice forbids it.

    Args:
        choices: the values of each choice.
        possible: whether a case, or a pair of choices alone, can occur.
        seed: the seed of the random cases from which the best are picked.
    """
    rng = random.Random(seed)
    missing = possible_pairs(choices, possible)
    found: list[Case] = []
    while missing:
        tries = [{name: rng.choice(values) for name, values in choices.items()} for _ in range(200)]
        wanted = min(missing, key=repr)
        of_wanted = [case for case in (each | dict(wanted) for each in tries) if possible(case)]
        if not of_wanted:
            missing.discard(wanted)
            continue
        found.append(max(of_wanted, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(found[-1])
    return found


def possible_pairs(choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool]) -> set[Pair]:
    """Return all pairs of choices that are possible on their own."""
    return {
        pair
        for (a, of_a), (b, of_b) in itertools.combinations(choices.items(), 2)
        for pair in (((a, x), (b, y)) for x in of_a for y in of_b)
        if possible(dict(pair))
    }
