"""Draw everything that is random in a case; seed, number and kind of the case determine all draws."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

Item = TypeVar("Item")


class Dice:
    """Draws for one case; the same seed gives the same draws under any version of jax."""

    def __init__(self, kind: str, seed: int, case: int):
        self._rng = np.random.default_rng([seed, case, zlib.crc32(kind.encode())])

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def one_of(self, items: Sequence[Item]) -> Item:
        return items[int(self._rng.integers(len(items)))]

    def weighted(self, weights: dict[Item, float]) -> Item:
        ends = np.cumsum([*weights.values()])
        # because of rounding, the draw may be at the very end
        at = min(int(np.searchsorted(ends, self._rng.random() * ends[-1], side="right")), len(ends) - 1)
        return list(weights)[at]

    def between(self, least: int, most: int) -> int:
        """Return an int from `least` to `most`, both included."""
        return int(self._rng.integers(least, most + 1))

    def some_of(self, items: Sequence[Item], probability: float) -> list[Item]:
        return [item for item in items if self.chance(probability)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        return [items[i] for i in self._rng.permutation(len(items))]

    def number(self) -> int:
        """Return a seed for something that is made later."""
        return int(self._rng.integers(2**31))


def normal(seed: int, shape: tuple[int, ...], scale: float = 0.5) -> np.ndarray:
    """Return random numbers that depend only on their own seed and shape."""
    return np.random.default_rng(seed).normal(scale=scale, size=shape)


def described(value: Any) -> str:
    """Return the text of a dataclass's fields that differ from their defaults."""
    shown = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"
