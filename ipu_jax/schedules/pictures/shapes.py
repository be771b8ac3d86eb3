"""Define the shapes of which a picture is made, in pixels from its upper left corner; SVG and matplotlib draw them."""

import dataclasses
from typing import Literal

from ipu_jax.schedules.pictures.paints import Paint

Anchor = Literal["start", "middle", "end"]

# How wide a letter is at most on average, over the font's size: of DejaVu Sans, which is wider than most. Where fonts
# differ, texts still have room.
_LETTER = 0.62
# How far the middle of a digit is above its baseline.
_MIDDLE = 0.36


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    paint: Paint


@dataclasses.dataclass(frozen=True)
class Dot:
    """A filled circle around a point."""

    x: float
    y: float
    radius: float
    paint: Paint


@dataclasses.dataclass(frozen=True)
class Words:
    """A text whose baseline begins, is centred or ends at a point."""

    x: float
    y: float
    text: str
    size: float
    paint: Paint
    anchor: Anchor = "start"
    bold: bool = False

    @property
    def left(self) -> float:
        return self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width_of(self.text, self.size)

    @property
    def right(self) -> float:
        return self.left + width_of(self.text, self.size)


Shape = Rectangle | Dot | Words


@dataclasses.dataclass(frozen=True)
class Scene:
    """A picture, whichever program draws it.

    Attributes:
        width, height: in pixels.
        title, description: for those who do not see it.
        rectangles, dots, words: drawn in this order.
    """

    width: float
    height: float
    title: str
    description: str
    rectangles: tuple[Rectangle, ...]
    dots: tuple[Dot, ...]
    words: tuple[Words, ...]


def width_of(text: str, size: float) -> float:
    """Return how wide a text is at most."""
    return _LETTER * size * len(text)


def size_for(text: str, width: float, largest: float) -> float:
    """Return the size, not above `largest`, at which a text is not wider than `width`."""
    return min(largest, width / (_LETTER * max(1, len(text))))


def baseline(middle: float, size: float) -> float:
    """Return the baseline of a text of which the digits' middle is at a height."""
    return middle + _MIDDLE * size
