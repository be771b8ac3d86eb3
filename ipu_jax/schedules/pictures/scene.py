"""Compose the picture of a schedule of shapes: title, legend, the parts of the update, rows of IPUs, and the axis.

    grouped: 4 stages on 4 IPUs, 8 micro-batches, 14 ticks, bubble 27.3%
    legend
            ramp-up  main                     ramp-down    weight update
    IPU 0   0  1  2  3  0 ...                              |
    IPU 1      0  1  2  0 ...                              |
    tick    0  1  2  3    ...

The picture is as wide as a page. Where cells are too small for the numbers of their micro-batches, dots in those of a
few micro-batches show how these pass through the IPUs instead. Where cells would be too narrow to be told apart, the
rows go on in further bands below, like lines of music.
"""

import math
import statistics

from ipu_jax.schedules.pictures.band import ABOVE, BELOW, UPDATE_GAP, UPDATE_WIDTH, Frame, band_of
from ipu_jax.schedules.pictures.grid import Grid
from ipu_jax.schedules.pictures.legend import entries_of, legend_of
from ipu_jax.schedules.pictures.numbers import Cells
from ipu_jax.schedules.pictures.paints import CARD, FAINT_INK, INK
from ipu_jax.schedules.pictures.shapes import Dot, Rectangle, Scene, Shape, Words, size_for, width_of

_WIDTH = 960.0
_MARGIN = 16.0
_TITLE = 16.0
_WIDEST_UNIT = 64.0
_NARROWEST_CELL = 3.0
_MOST_BANDS = 6
_BETWEEN_BANDS = 8.0


def scene_of(grid: Grid) -> Scene:
    """Return the picture of a schedule."""
    title = title_of(grid)
    rows = grid.table.ipus
    row = 38.0 if rows <= 4 else 30.0 if rows <= 8 else 20.0 if rows <= 16 else max(3.0, 400.0 / rows)
    left = _MARGIN + max(width_of(f"IPU {rows - 1}", 11.0), width_of("time", 11.0)) + 8.0
    room = _WIDTH - _MARGIN - UPDATE_WIDTH - UPDATE_GAP - left
    cell = statistics.median(box.end - box.start for box in grid.boxes) * room / grid.end
    parts = grid.parts(math.ceil(_NARROWEST_CELL / max(cell, _NARROWEST_CELL / _MOST_BANDS)))
    unit = room / max(part.end for part in parts)
    if grid.ticks:
        unit = min(unit, _WIDEST_UNIT)
    cells = Cells(grid, unit, row)
    shapes: list[Shape] = [
        Words(_MARGIN, _MARGIN + _TITLE, title, size_for(title, _WIDTH - 2 * _MARGIN, _TITLE), INK, bold=True),
        Words(_MARGIN, _MARGIN + _TITLE + 18.0, _meaning_of_bubble(grid), 11.0, FAINT_INK),
    ]
    entries = entries_of(grid, numbers=cells.numbers, stages=cells.stages, dots=cells.marked)
    legend, y = legend_of(entries, _MARGIN, _MARGIN + _TITLE + 32.0, _WIDTH - _MARGIN)
    shapes += legend
    for part in parts:
        y += _BETWEEN_BANDS + ABOVE
        frame = Frame(_MARGIN, left, y, part.end, unit, row, 3.0 if row >= 12.0 else 1.0, rows)
        shapes += band_of(part, frame, cells, is_last=part is parts[-1])
        y = frame.bottom + BELOW
    height = y + _MARGIN
    return Scene(
        _WIDTH,
        height,
        title,
        _description(grid),
        (Rectangle(0.0, 0.0, _WIDTH, height, CARD), *(shape for shape in shapes if isinstance(shape, Rectangle))),
        tuple(sorted((shape for shape in shapes if isinstance(shape, Dot)), key=lambda dot: dot.paint.light)),
        tuple(sorted((shape for shape in shapes if isinstance(shape, Words)), key=_style)),
    )


def _style(word: Words) -> tuple[str, float, str]:
    """Return what words are sorted by, so that those of one style are written at once."""
    return word.paint.light, word.size, word.anchor


# words about all of it


def title_of(grid: Grid) -> str:
    """Return the title, in the words of the schedule's text."""
    table = grid.table
    ticks = _count(len(grid.ticks) - 1, "tick") if grid.ticks else f"makespan {grid.end:.4g}"
    return (
        f"{table.name}: {_count(len(table.placement), 'stage')} on {_count(table.ipus, 'IPU')}, "
        f"{_count(len(table.forward[0]), 'micro-batch', 'es')}, {ticks}, bubble {grid.bubble:.1%}"
    )


def _count(number: int, name: str, ending: str = "s") -> str:
    return f"{number} {name}{'' if number == 1 else ending}"


def _meaning_of_bubble(grid: Grid) -> str:
    if not grid.ticks:
        return "Bubble: the idle share of the IPUs' time in this simulation, without the weight update"
    costs = "F, B and W of a stage cost the same" if grid.table.weight is not None else "B of a stage costs twice its F"
    return f"Bubble: the idle share of the IPUs' time if {costs}"


def _description(grid: Grid) -> str:
    """Return what the picture shows, for those who do not see it."""
    table = grid.table
    unit = "tick" if grid.ticks else "time"
    spans = []
    for span in grid.spans:
        if grid.ticks:
            first, last = grid.ticks.index(span.start), grid.ticks.index(span.end) - 1
            spans.append(f"{span.name}: ticks {first} to {last}" if last > first else f"{span.name}: tick {first}")
        else:
            spans.append(f"{span.name}: {span.start:g} to {span.end:g}")
    places = [
        f"stage {stage} on " + ("all IPUs" if ipu is None else f"IPU {ipu}")
        for stage, ipu in enumerate(table.placement)
    ]
    return (
        f"A row for each IPU, from left to right what it does {'in each tick' if grid.ticks else 'in time'}. "
        f"{'; '.join(spans)}; then the weight update. The {unit} axis is below. Placement: {', '.join(places)}."
    )
