"""Compose the picture of a schedule of shapes: title, legend, the parts of the update, rows of IPUs, and the axis.

    grouped: 4 stages on 4 IPUs, 8 micro-batches, 14 ticks, bubble 27.3%
    legend
            ramp-up  main                     ramp-down    weight update
    IPU 0   0  1  2  3  0 ...                              |
    IPU 1      0  1  2  0 ...                              |
    tick    0  1  2  3    ...

The rows' width is that of a page whatever the schedule is. Where a cell is too small for the number of its
micro-batch, dots in the cells of a few micro-batches show how these pass through the IPUs instead.
"""

import dataclasses

from ipu_jax.schedules.pictures.axis import tick_words, time_words
from ipu_jax.schedules.pictures.grid import Box, Grid
from ipu_jax.schedules.pictures.legend import entries_of, legend_of
from ipu_jax.schedules.pictures.paints import CARD, FAINT_INK, IDLE, INK, LINE, UPDATE, paint_of, text_on
from ipu_jax.schedules.pictures.shapes import Anchor, Dot, Rectangle, Scene, Words, baseline, size_for, width_of

_WIDTH = 960.0
_MARGIN = 16.0
_TITLE = 16.0
_TEXT = 12.0
_LEAST = 6.0  # smaller text cannot be read
_WIDEST_UNIT = 64.0
_UPDATE, _UPDATE_GAP = 44.0, 8.0
_MOST_MARKED = 8  # at most so many micro-batches are marked by dots
_UPDATE_NAME = "weight", "update"  # in two lines


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Where the rows are.

    Attributes:
        left, right, top: of the rows; the weight update is to the right of them.
        unit: the width of one unit of the axis.
        row, gap: the height of a row and of the gap below it.
    """

    left: float
    right: float
    top: float
    unit: float
    row: float
    gap: float
    rows: int

    @property
    def bottom(self) -> float:
        return self.top + self.rows * (self.row + self.gap) - self.gap

    @property
    def update(self) -> float:
        return self.right + _UPDATE_GAP

    def x(self, at: float) -> float:
        return self.left + at * self.unit

    def y(self, ipu: int) -> float:
        return self.top + ipu * (self.row + self.gap)


def scene_of(grid: Grid) -> Scene:
    """Return the picture of a schedule."""
    title = title_of(grid)
    numbers = _Numbers(grid, _frame(grid, 0.0))
    heading = [Words(_MARGIN, _MARGIN + _TITLE, title, size_for(title, _WIDTH - 2 * _MARGIN, _TITLE), INK, bold=True)]
    heading.append(Words(_MARGIN, _MARGIN + _TITLE + 18.0, _meaning_of_bubble(grid), 11.0, FAINT_INK))
    entries = entries_of(grid, numbers=numbers.shown, stages=numbers.stages, dots=_marked(grid, numbers))
    legend, below = legend_of(entries, _MARGIN, _MARGIN + _TITLE + 32.0, _WIDTH - _MARGIN)
    frame = _frame(grid, below + 46.0)
    gridlines = _gridlines(grid, frame)
    axis = (
        tick_words(grid.ticks, frame.left, frame.unit) if grid.ticks else time_words(grid.end, frame.left, frame.unit)
    )
    axis_y = frame.bottom + 18.0
    rectangles = [
        Rectangle(0.0, 0.0, _WIDTH, axis_y + _MARGIN, CARD),
        *(r for r in legend if isinstance(r, Rectangle)),
        *(
            Rectangle(frame.left, frame.y(k), frame.x(grid.end) - frame.left, frame.row, IDLE)
            for k in range(frame.rows)
        ),
        *gridlines,
        *_cells(grid, frame),
        *_span_lines(grid, frame),
        *(Rectangle(frame.update, frame.y(k), _UPDATE, frame.row, UPDATE) for k in range(frame.rows)),
    ]
    words = [
        *heading,
        *(word for word in legend if isinstance(word, Words)),
        *_span_words(grid, frame),
        *_row_words(frame),
        Words(_MARGIN, axis_y, "tick" if grid.ticks else "time", 11.0, FAINT_INK),
        *(Words(x, axis_y, text, 11.0, FAINT_INK, "middle") for x, text in axis),
        *numbers.words(frame),
    ]
    dots = [*(dot for dot in legend if isinstance(dot, Dot)), *_dots(grid, frame, numbers)]
    return Scene(_WIDTH, axis_y + _MARGIN, title, _description(grid), tuple(rectangles), tuple(dots), tuple(words))


# words about all of it


def title_of(grid: Grid) -> str:
    """Return the title, in the words of the schedule's text."""
    table = grid.table
    ticks = _count(len(grid.ticks) - 1, "tick") if grid.ticks else f"makespan {grid.end:g}"
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


# the rows


def _frame(grid: Grid, top: float) -> _Frame:
    rows = grid.table.ipus
    row = 38.0 if rows <= 4 else 30.0 if rows <= 8 else 20.0 if rows <= 16 else max(3.0, 400.0 / rows)
    left = _MARGIN + max(width_of(f"IPU {rows - 1}", 11.0), width_of("time", 11.0)) + 8.0
    room = _WIDTH - _MARGIN - _UPDATE - _UPDATE_GAP - left
    unit = room / grid.end
    if grid.ticks:
        unit = min(unit, _WIDEST_UNIT)
    return _Frame(left, left + unit * grid.end, top, unit, row, 3.0 if row >= 12.0 else 1.0, rows)


def _row_words(frame: _Frame) -> list[Words]:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * (frame.row + frame.gap) >= 11.0)
    return [
        Words(_MARGIN, baseline(frame.y(k) + frame.row / 2, 11.0), f"IPU {k}", 11.0, INK)
        for k in range(0, frame.rows, step)
    ]


def _cells(grid: Grid, frame: _Frame) -> list[Rectangle]:
    cells: list[Rectangle] = []
    for box in grid.boxes:
        width = (box.end - box.start) * frame.unit
        inset = min(1.0, 0.15 * width)  # so that neighbouring cells are seen as two
        # a concurrent stage bridges the gaps between the rows: all IPUs work on it together
        height = frame.row + (frame.gap if box.chunk is None and box.ipu + 1 < frame.rows else 0.0)
        paint = paint_of(box.kind, box.chunk, grid.chunks)
        if width > 0:
            cells.append(Rectangle(frame.x(box.start), frame.y(box.ipu), width - inset, height, paint))
    return sorted(cells, key=lambda cell: cell.paint.light)  # those of one colour are drawn at once


def _gridlines(grid: Grid, frame: _Frame) -> list[Rectangle]:
    """Return lines where ticks begin, if they leave room to see what is between them."""
    if not grid.ticks or (grid.end / (len(grid.ticks) - 1)) * frame.unit < 8.0:
        return []
    height = frame.bottom - frame.top + 4.0
    return [Rectangle(frame.x(at) - 1.0, frame.top, 1.0, height, LINE) for at in grid.ticks]


# the parts of the update


def _span_lines(grid: Grid, frame: _Frame) -> list[Rectangle]:
    """Return a line over each part and the weight update, and one down where the next part begins."""
    y = frame.top - 8.0
    lines = [
        Rectangle(frame.x(span.start), y, max(1.0, (span.end - span.start) * frame.unit - 3.0), 2.0, INK)
        for span in grid.spans
    ]
    lines += [
        Rectangle(frame.x(span.start) - 2.0, y, 1.0, frame.bottom - y, INK) for span in grid.spans if span.start > 0
    ]
    return [*lines, Rectangle(frame.update, y, _UPDATE, 2.0, INK)]


def _span_words(grid: Grid, frame: _Frame) -> list[Words]:
    """Return the names over the parts. A part that is too narrow lends room from its neighbours, if they have it."""
    y = frame.top - 14.0
    middle = frame.update + _UPDATE / 2
    names = [Words(middle, y - 13.0 * i, name, 11.0, INK, "middle") for i, name in enumerate(reversed(_UPDATE_NAME))]
    # the outer parts first: they have one neighbour only
    for span in sorted(grid.spans, key=lambda span: span.name == "main"):
        at, anchor = frame.x((span.start + span.end) / 2), "middle"
        if width_of(span.name, 11.0) > (span.end - span.start) * frame.unit:
            at, anchor = _lent(grid, frame, span.start, span.end)
        name = Words(at, y, span.name, 11.0, INK, anchor)
        if all(name.right + 4.0 < other.left or other.right + 4.0 < name.left for other in names):
            names.append(name)
    return names


def _lent(grid: Grid, frame: _Frame, start: float, end: float) -> tuple[float, Anchor]:
    """Return where the name of a narrow part begins or ends: it reaches into the rows, not out of them."""
    return (frame.x(start), "start") if start + end < grid.end else (frame.x(end), "end")


# numbers and dots


class _Numbers:
    """Decide which cells show the number of their micro-batch, and how large.

    Attributes:
        shown: whether cells show numbers. If not, some micro-batches are marked by dots.
        stages: whether cells show their stages below it.
    """

    def __init__(self, grid: Grid, frame: _Frame):
        self.grid = grid
        self.longest = str(len(grid.table.forward[0]) - 1)
        sizes = [self._size(box, frame) for box in grid.boxes]
        self.shown = 2 * sum(size >= _LEAST for size in sizes) > len(sizes)
        self.stages = self.shown and any(self._below(box, frame).startswith("s") for box in grid.boxes)

    def words(self, frame: _Frame) -> list[Words]:
        words = [word for box in self.grid.boxes for word in self._words(box, frame)] if self.shown else []
        return sorted(words, key=lambda word: (word.paint.light, word.size))  # those of one style are written at once

    def _size(self, box: Box, frame: _Frame) -> float:
        return size_for(self.longest, (box.end - box.start) * frame.unit - 3.0, min(_TEXT, 0.6 * frame.row))

    def _below(self, box: Box, frame: _Frame) -> str:
        """Return the second line of a cell, or "" if there is none."""
        text = below_number(box, self.grid)
        fits = size_for(text, (box.end - box.start) * frame.unit - 3.0, 9.0) >= 7.0
        return text if fits and frame.row >= 26.0 else ""

    def _words(self, box: Box, frame: _Frame) -> list[Words]:
        size = self._size(box, frame)
        if size < _LEAST:
            return []
        x = frame.x((box.start + box.end) / 2) - 0.5
        middle = frame.y(box.ipu) + frame.row / 2
        paint = text_on(box.kind, box.chunk)
        below = self._below(box, frame)
        if not below:
            return [Words(x, baseline(middle, size), str(box.microbatch), size, paint, "middle")]
        small = size_for(below, (box.end - box.start) * frame.unit - 3.0, 9.0)
        return [
            Words(x, baseline(middle - 6.0, size), str(box.microbatch), size, paint, "middle"),
            Words(x, baseline(middle + 9.0, small), below, small, paint, "middle"),
        ]


def below_number(box: Box, grid: Grid) -> str:
    """Return what tells a cell apart from others of its colour: its stages, or F or B of a concurrent stage."""
    kind = box.kind if box.chunk is None else ""
    if (len(grid.joint) if box.chunk is None else grid.chunks) == 1:
        return kind
    first, last = box.stages[0], box.stages[-1]
    return (f"s{first}" if first == last else f"s{first}-{last}") + kind


def _marked(grid: Grid, numbers: _Numbers) -> tuple[int, ...]:
    """Return the micro-batches that are marked by dots: a few at equal distances, if cells have no numbers."""
    micro_batches = len(grid.table.forward[0])
    return () if numbers.shown else tuple(range(0, micro_batches, -(-micro_batches // _MOST_MARKED)))


def _dots(grid: Grid, frame: _Frame, numbers: _Numbers) -> list[Dot]:
    marked = set(_marked(grid, numbers))
    return [
        Dot(
            frame.x((box.start + box.end) / 2) - 0.5,
            frame.y(box.ipu) + frame.row / 2,
            min(2.0, 0.35 * (box.end - box.start) * frame.unit, 0.3 * frame.row),
            text_on(box.kind, box.chunk),
        )
        for box in grid.boxes
        if box.microbatch in marked
    ]
