"""Decide what stands in the cells: the number of the micro-batch, and how it differs from others of its colour."""

from collections.abc import Iterable

from ipu_jax.schedules.pictures.grid import Box, Grid
from ipu_jax.schedules.pictures.paints import text_on
from ipu_jax.schedules.pictures.shapes import Dot, Shape, Words, baseline, size_for

_LARGEST = 12.0
_LEAST = 6.0  # smaller text cannot be read
_LARGEST_BELOW, _LEAST_BELOW = 9.0, 7.0
_ROW_OF_TWO_LINES = 26.0
_EDGES = 3.0  # of a cell's width, without text
_MOST_MARKED = 8


class Cells:
    """Hold the texts that stand in the cells of a picture.

    Attributes:
        numbers: whether cells have the numbers of their micro-batches, where they fit.
        stages: whether some cells have the numbers of their stages below them.
        marked: the micro-batches that dots mark: a few at equal distances, if there are no numbers.
    """

    def __init__(self, grid: Grid, unit: float, row: float):
        """Decide for a whole schedule.

        Args:
            grid: what the picture shows.
            unit: the width of one unit of the axis.
            row: the height of a row.
        """
        micro_batches = len(grid.table.forward[0])
        self._longest = str(micro_batches - 1)
        self._has_chunks, self._has_joint = grid.chunks > 1, len(grid.joint) > 1
        widths = [(box.end - box.start) * unit for box in grid.boxes]
        self.numbers = 2 * sum(self._size(width, row) >= _LEAST for width in widths) > len(widths)
        self.stages = self.numbers and any(
            self._below(box, width, row).startswith("s") for box, width in zip(grid.boxes, widths, strict=True)
        )
        self.marked = () if self.numbers else tuple(range(0, micro_batches, -(-micro_batches // _MOST_MARKED)))
        self._is_marked = frozenset(self.marked)

    def shapes(self, box: Box, left: float, top: float, width: float, height: float) -> Iterable[Shape]:
        """Return what stands in a cell."""
        x, middle, paint = left + width / 2 - 0.5, top + height / 2, text_on(box.kind, box.chunk)
        if box.microbatch in self._is_marked:
            return [Dot(x, middle, min(2.0, 0.35 * width, 0.3 * height), paint)]
        size = self._size(width, height)
        if not self.numbers or size < _LEAST:
            return []
        below = self._below(box, width, height)
        if not below:
            return [Words(x, baseline(middle, size), str(box.microbatch), size, paint, "middle")]
        small = size_for(below, width - _EDGES, _LARGEST_BELOW)
        return [
            Words(x, baseline(middle - 6.0, size), str(box.microbatch), size, paint, "middle"),
            Words(x, baseline(middle + 9.0, small), below, small, paint, "middle"),
        ]

    def _size(self, width: float, height: float) -> float:
        return size_for(self._longest, width - _EDGES, min(_LARGEST, 0.6 * height))

    def _below(self, box: Box, width: float, height: float) -> str:
        """Return the second line of a cell: its stages, and F or B of a concurrent one; "" if not needed or no room."""
        text = box.kind if box.chunk is None else ""
        if self._has_joint if box.chunk is None else self._has_chunks:
            first, last = box.stages[0], box.stages[-1]
            text = (f"s{first}" if first == last else f"s{first}-{last}") + text
        fits = size_for(text, width - _EDGES, _LARGEST_BELOW) >= _LEAST_BELOW
        return text if fits and height >= _ROW_OF_TWO_LINES else ""
