"""Choose the numbers below the rows: ticks or times, at equal distances and with room between them."""

import itertools
import math
from collections.abc import Iterator

from ipu_jax.schedules.pictures.shapes import width_of

_SIZE = 11.0
_ROOM = 6.0

Labels = list[tuple[float, str]]
"""The middle of each text, and the text."""


def tick_words(ticks: tuple[float, ...], first: int, left: float, unit: float) -> Labels:
    """Return the numbers of ticks, each below the middle of its tick: all of them, every second, fifth, and so on.

    Args:
        ticks: the start of each tick, and the end of the last.
        first: the number of the first tick.
        left: where the axis begins.
        unit: the width of one unit.
    """
    for step in _steps(1):
        numbers = range(-(-first // int(step)) * int(step), first + len(ticks) - 1, int(step))
        labels = [(left + unit * (ticks[i - first] + ticks[i - first + 1]) / 2, str(i)) for i in numbers]
        if _have_room(labels):
            return labels
    raise AssertionError("a single number always has room")


def time_words(start: float, end: float, left: float, unit: float) -> Labels:
    """Return times from `start` to `end`, at round distances.

    Args:
        start, end: the times at both ends of the axis.
        left, unit: as above.
    """
    for step in _steps(10.0 ** math.floor(math.log10(end - start) - 2)):
        numbers = range(math.ceil(start / step), math.floor(end / step) + 1)
        labels = [(left + unit * (step * i - start), f"{step * i:g}") for i in numbers]
        if _have_room(labels):
            return labels
    raise AssertionError("a single number always has room")


def _steps(least: float) -> Iterator[float]:
    return (least * 10**power * digit for power in itertools.count() for digit in (1, 2, 5))


def _have_room(labels: Labels) -> bool:
    return all(
        x + width_of(text, _SIZE) / 2 + _ROOM <= following - width_of(after, _SIZE) / 2
        for (x, text), (following, after) in itertools.pairwise(labels)
    )
