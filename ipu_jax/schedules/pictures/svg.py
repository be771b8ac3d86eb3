"""Write a picture as SVG: self-contained, small, the same bytes for the same picture, and dark on a dark page.

Shapes of one colour are one path, so that a cell takes about 20 bytes. Colours are attributes, which every program
understands; those that differ on a dark page are also set by a style, which browsers understand.
"""

import zlib
from collections.abc import Iterable
from itertools import groupby
from xml.sax.saxutils import escape

from ipu_jax.schedules.pictures.paints import CARD, FAINT_INK, IDLE, INK, LINE, UPDATE, Paint
from ipu_jax.schedules.pictures.shapes import Dot, Rectangle, Scene, Words

_CLASS = "ipu-schedule"
_ADAPTED = {CARD: "card", IDLE: "idle", INK: "ink", FAINT_INK: "faint", LINE: "line", UPDATE: "update"}


def svg_of(scene: Scene) -> str:
    """Return the picture as the text of an SVG file, which can also stand in a page of HTML."""
    width, height = _number(scene.width), _number(scene.height)
    # a page may have several pictures, whose names must differ
    name = f"{_CLASS}-{zlib.crc32(repr(scene).encode()):08x}"
    dark = "".join(f".{_CLASS} .{style}{{fill:{paint.dark}}}" for paint, style in _ADAPTED.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_CLASS}" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" style="max-width:100%;height:auto" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" font-family="Helvetica, Arial, sans-serif">',
            f'<title id="{name}-title">{escape(scene.title)}</title>',
            f'<desc id="{name}-desc">{escape(scene.description)}</desc>',
            f"<style>@media(prefers-color-scheme:dark){{{dark}}}</style>",
            *(
                f'<path {_fill(paint)} d="{"".join(map(_path, rectangles))}"/>'
                for paint, rectangles in groupby(scene.rectangles, lambda rectangle: rectangle.paint)
            ),
            *_dots(scene.dots),
            *_words(scene.words),
            "</svg>\n",
        ]
    )


def _path(rectangle: Rectangle) -> str:
    x, y, width, height = map(_number, (rectangle.x, rectangle.y, rectangle.width, rectangle.height))
    return f"M{x} {y}h{width}v{height}h-{width}z"


def _dots(dots: Iterable[Dot]) -> Iterable[str]:
    for paint, same in groupby(dots, lambda dot: dot.paint):
        yield f"<g {_fill(paint)}>"
        for dot in same:
            yield f'<circle cx="{_number(dot.x)}" cy="{_number(dot.y)}" r="{_number(dot.radius)}"/>'
        yield "</g>"


def _words(words: Iterable[Words]) -> Iterable[str]:
    style = lambda word: (word.paint, word.size, word.anchor, word.bold)  # noqa: E731
    for (paint, size, anchor, bold), same in groupby(words, style):
        weight = ' font-weight="bold"' if bold else ""
        yield f'<g {_fill(paint)} font-size="{_number(size)}" text-anchor="{anchor}"{weight}>'
        for word in same:
            yield f'<text x="{_number(word.x)}" y="{_number(word.y)}">{escape(word.text)}</text>'
        yield "</g>"


def _fill(paint: Paint) -> str:
    adapted = f' class="{_ADAPTED[paint]}"' if paint in _ADAPTED else ""
    return f'fill="{paint.light}"{adapted}'


def _number(value: float) -> str:
    """Return a number with two digits at most behind the point, which are enough to draw it anywhere."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
