"""Draw one band of a picture: the rows of all IPUs over a part of the axis, with what stands above and below them."""

import dataclasses

from ipu_jax.schedules.pictures.axis import tick_words, time_words
from ipu_jax.schedules.pictures.grid import Grid
from ipu_jax.schedules.pictures.numbers import Cells
from ipu_jax.schedules.pictures.paints import FAINT_INK, IDLE, INK, LINE, UPDATE, paint_of
from ipu_jax.schedules.pictures.shapes import Anchor, Rectangle, Shape, Words, baseline, width_of

ABOVE = 38.0
"""The height of what stands above the rows."""
BELOW = 18.0
"""The height of what stands below them."""
UPDATE_WIDTH, UPDATE_GAP = 44.0, 8.0
"""The width of the weight update, and how far from the rows it is."""

_UPDATE_NAME = "weight", "update"  # in two lines


@dataclasses.dataclass(frozen=True)
class Frame:
    """Hold the places of the rows.

    Attributes:
        margin: where the names of the rows begin.
        left, top: of the rows.
        end: the end of the axis, in its units.
        unit: the width of one unit of the axis.
        row, gap: the height of a row and of the gap below it.
    """

    margin: float
    left: float
    top: float
    end: float
    unit: float
    row: float
    gap: float
    rows: int

    @property
    def bottom(self) -> float:
        return self.top + self.rows * (self.row + self.gap) - self.gap

    @property
    def right(self) -> float:
        return self.x(self.end)

    @property
    def update(self) -> float:
        return self.right + UPDATE_GAP

    def x(self, at: float) -> float:
        return self.left + at * self.unit

    def y(self, ipu: int) -> float:
        return self.top + ipu * (self.row + self.gap)


def band_of(grid: Grid, frame: Frame, cells: Cells, *, is_last: bool) -> list[Shape]:
    """Return the shapes of a band, those that lie on others behind them.

    Args:
        grid: the part of the schedule that it shows.
        frame: where its rows are.
        cells: what stands in the cells.
        is_last: whether the weight update follows.
    """
    rows = range(frame.rows)
    middle = frame.update + UPDATE_WIDTH / 2
    shapes: list[Shape] = [
        *(Rectangle(frame.left, frame.y(k), frame.right - frame.left, frame.row, IDLE) for k in rows),
        *_gridlines(grid, frame),
        *_cells(grid, frame),
        *_span_lines(grid, frame),
        *_row_words(frame),
        *_axis(grid, frame),
        *_span_words(grid, frame),
    ]
    if is_last:
        shapes += [Rectangle(frame.update, frame.y(k), UPDATE_WIDTH, frame.row, UPDATE) for k in rows]
        shapes.append(Rectangle(frame.update, frame.top - 8.0, UPDATE_WIDTH, 2.0, INK))
        shapes += [
            Words(middle, frame.top - 14.0 - 13.0 * i, name, 11.0, INK, "middle")
            for i, name in enumerate(reversed(_UPDATE_NAME))
        ]
    for box in grid.boxes:
        left, width = frame.x(box.start), (box.end - box.start) * frame.unit
        shapes += cells.shapes(box, left, frame.y(box.ipu), width, frame.row)
    return shapes


def _axis(grid: Grid, frame: Frame) -> list[Words]:
    if grid.ticks:
        labels = tick_words(grid.ticks, grid.first_tick, frame.left, frame.unit)
    else:
        labels = time_words(grid.first_time, grid.first_time + grid.end, frame.left, frame.unit)
    y = frame.bottom + BELOW
    name = Words(frame.margin, y, "tick" if grid.ticks else "time", 11.0, FAINT_INK)
    return [name, *(Words(x, y, text, 11.0, FAINT_INK, "middle") for x, text in labels)]


def _row_words(frame: Frame) -> list[Words]:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * (frame.row + frame.gap) >= 11.0)
    return [
        Words(frame.margin, baseline(frame.y(k) + frame.row / 2, 11.0), f"IPU {k}", 11.0, INK)
        for k in range(0, frame.rows, step)
    ]


def _cells(grid: Grid, frame: Frame) -> list[Rectangle]:
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


def _gridlines(grid: Grid, frame: Frame) -> list[Rectangle]:
    """Return lines where ticks begin, if they leave room to see what is between them."""
    if not grid.ticks or (grid.end / (len(grid.ticks) - 1)) * frame.unit < 8.0:
        return []
    height = frame.bottom - frame.top + 4.0
    return [Rectangle(frame.x(at) - 1.0, frame.top, 1.0, height, LINE) for at in grid.ticks]


# the parts of the update


def _span_lines(grid: Grid, frame: Frame) -> list[Rectangle]:
    """Return a line over each part, and one down where the next part begins."""
    y = frame.top - 8.0
    lines = [
        Rectangle(frame.x(span.start), y, max(1.0, (span.end - span.start) * frame.unit - 3.0), 2.0, INK)
        for span in grid.spans
    ]
    lines += [
        Rectangle(frame.x(span.start) - 2.0, y, 1.0, frame.bottom - y, INK) for span in grid.spans if span.start > 0
    ]
    return lines


def _span_words(grid: Grid, frame: Frame) -> list[Words]:
    """Return the names over the parts. A part that is too narrow lends room from its neighbours, if they have it."""
    y = frame.top - 14.0
    names: list[Words] = []
    # the outer parts first: they have one neighbour only
    for span in sorted(grid.spans, key=lambda span: span.name == "main"):
        at, anchor = frame.x((span.start + span.end) / 2), "middle"
        if width_of(span.name, 11.0) > (span.end - span.start) * frame.unit:
            at, anchor = _lent(grid, frame, span.start, span.end)
        name = Words(at, y, span.name, 11.0, INK, anchor)
        if all(name.right + 4.0 < other.left or other.right + 4.0 < name.left for other in names):
            names.append(name)
    return names


def _lent(grid: Grid, frame: Frame, start: float, end: float) -> tuple[float, Anchor]:
    """Return where the name of a narrow part begins or ends: it reaches into the rows, not out of them."""
    return (frame.x(start), "start") if start + end < grid.end else (frame.x(end), "end")
