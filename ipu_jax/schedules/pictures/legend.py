"""Draw the legend: a patch of each colour that a picture shows, and what its numbers and dots mean."""

import dataclasses

from ipu_jax.schedules._timetable import Kind
from ipu_jax.schedules.pictures.grid import Grid
from ipu_jax.schedules.pictures.paints import FAINT_INK, IDLE, INK, LINE, Paint, paint_of
from ipu_jax.schedules.pictures.shapes import Dot, Rectangle, Shape, Words, baseline, width_of

_SIZE = 11.0
_LINE = 20.0
_PATCH = 12.0
_LONGEST = 60  # letters of a list of stages


@dataclasses.dataclass(frozen=True)
class Entry:
    """A text behind patches of some colours, or a dot, or nothing."""

    text: str
    paints: tuple[Paint, ...] = ()
    is_dot: bool = False

    @property
    def patches(self) -> float:
        return len(self.paints) * _PATCH + (6.0 if self.paints else 0.0) + (10.0 if self.is_dot else 0.0)

    @property
    def width(self) -> float:
        return self.patches + width_of(self.text, _SIZE)


def legend_of(entries: list[Entry], left: float, top: float, right: float) -> tuple[list[Shape], float]:
    """Return the shapes of entries, in as many lines between `left` and `right` as they need, and where these end."""
    shapes: list[Shape] = []
    x, y = left, top
    for entry in entries:
        if x > left and x + entry.width > right:
            x, y = left, y + _LINE
        for number, paint in enumerate(entry.paints):
            if paint == IDLE:  # too pale to be seen on the page without an edge
                shapes.append(Rectangle(x - 1.0, y - 1.0, _PATCH + 2.0, _PATCH + 2.0, LINE))
            shapes.append(Rectangle(x + number * _PATCH, y, _PATCH, _PATCH, paint))
        if entry.is_dot:
            shapes.append(Dot(x + 3.0, y + _PATCH / 2, 2.0, INK))
        shapes.append(Words(x + entry.patches, baseline(y + _PATCH / 2, _SIZE), entry.text, _SIZE, FAINT_INK))
        x += entry.width + 18.0
    return shapes, y + _PATCH


def entries_of(grid: Grid, *, numbers: bool, stages: bool, dots: tuple[int, ...]) -> list[Entry]:
    """Return the entries that explain a picture.

    Args:
        grid: what the picture shows.
        numbers: whether cells have the numbers of their micro-batches.
        stages: whether cells have those of their stages, too.
        dots: the micro-batches that are marked by dots.
    """
    table = grid.table
    is_split = table.weight is not None
    names: dict[Kind, str] = {
        "F": "F: forward",
        "B": "B: backward by input" if is_split else "B: backward",
        "W": "W: backward by weight",
    }
    seen = {box.kind for box in grid.boxes if box.chunk is not None}
    entries = [
        Entry(name, tuple(paint_of(kind, chunk, grid.chunks) for chunk in range(grid.chunks)))
        for kind, name in names.items()
        if kind in seen
    ]
    if grid.joint:
        entries.append(
            Entry(f"F, B of {_stages(grid.joint)}, on all IPUs together", (paint_of("F", None), paint_of("B", None)))
        )
    entries.append(Entry("idle", (IDLE,)))
    if numbers:
        entries.append(Entry("number: micro-batch"))
    if dots:
        entries.append(Entry(f"micro-batches {_listed(dots)}", is_dot=True))
    if grid.chunks > 1:
        entries.append(Entry("the paler, the later among the stages of its IPU"))
    if stages:
        entries.append(Entry("s1: stage 1"))
    return entries


def _stages(segments: tuple[range, ...]) -> str:
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in segments]
    text = ", ".join(texts)
    if len(text) > _LONGEST:
        return f"{sum(map(len, segments))} concurrent stages"
    return f"concurrent {'stages' if sum(map(len, segments)) > 1 else 'stage'} {text}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
