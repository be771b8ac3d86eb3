"""Draw the bytes of each IPU over the ticks of a step, which `PipelineReport.bytes_by_tick` returns.

IPU 0                           9.1 MB in use at most, of 9.4 MB
10 MB  - - - - - - - - - - - - - - - - - - - - - - - - - - limit
        //////____o____//////////////  allocated, but not in use
        _____/         \\_____________  stash
 0 B    _____________________________  batch, gradients, weights
tick    0   1   2   3   4   5   6   7
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ipu_jax.core.programs.cost import in_units
from ipu_jax.core.schedules.figures import (
    BYTES,
    FAINT,
    IDLE,
    INK,
    LIMIT,
    LINE,
    MARGIN,
    TEXT,
    WIDTH,
    drawn,
    headed,
    numbered,
    outlined,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _ABOVE, _BELOW = 56.0, 22.0, 24.0
_FARTHEST_LIMIT = 1.5  # times the most bytes of an IPU; farther away, the line would leave them no room

ByTick = Mapping[str, Sequence[int]]


def bytes_figure(
    title: str, caption: str, ipus: Sequence[ByTick], totals: Sequence[int], limit: float | None
) -> "Figure":
    """Return the picture.

    Args:
        title, caption: texts.
        ipus: per IPU, the bytes in use by kind and tick.
        totals: per IPU, the bytes that are allocated.
        limit: the bytes that an IPU can hold, if known.
    """
    columns = 1 if len(ipus) <= 4 else 2 if len(ipus) <= 16 else 4
    lines = math.ceil(len(ipus) / columns)
    width, height = (WIDTH - MARGIN) / columns - _LEFT, 64.0 if lines <= 4 else 40.0
    highest = max([*totals, *(sum(tick) for ipu in ipus for tick in zip(*ipu.values(), strict=True)), 1])
    if limit is not None:
        is_shown = limit <= _FARTHEST_LIMIT * highest
        caption += f" An IPU can hold {in_units(limit, 'B')}{' (dashed)' * is_shown}."
        limit = limit if is_shown else None
    legend = {kind: colour for kind, colour in BYTES.items() if any(any(ipu.get(kind, ())) for ipu in ipus)}

    def draw(figure: "Figure") -> None:
        below, legend["allocated, but not in use"] = lines * (_ABOVE + height) + _BELOW, IDLE
        top, page = headed(figure, below, title, caption, legend)
        for k, (ipu, total) in enumerate(zip(ipus, totals, strict=True)):
            column, line = divmod(k, lines)
            left, bottom = _LEFT + column * (width + _LEFT), top + (line + 1) * (_ABOVE + height)
            place = left / WIDTH, 1 - bottom / page, width / WIDTH, height / page
            axes = figure.add_axes(place, ylim=(0.0, 1.04 * max(highest, limit or 0.0)), frame_on=False)
            _panel(axes, f"IPU {k}", ipu, total, limit, has_room=columns < 4)
            is_lowest = line == lines - 1 or k == len(ipus) - 1
            _scales(axes, len(next(iter(ipu.values()))), width, height, is_lowest=is_lowest)
            if k == lines - 1:
                at = (left - 5.0) / WIDTH, 1 - (bottom + 12.5) / page
                figure.text(*at, "tick", ha="right", size=TEXT, color=FAINT)

    return drawn(draw)


def _panel(axes: "Axes", name: str, kinds: ByTick, total: int, limit: float | None, *, has_room: bool) -> None:
    """Draw the bytes of one IPU, its kinds above each other, and the most that are in use at once."""
    ticks = len(next(iter(kinds.values())))
    lower = [0] * ticks
    for kind, colour in BYTES.items():
        if any(kinds.get(kind, ())):
            upper = [below + size for below, size in zip(lower, kinds[kind], strict=True)]
            _area(axes, lower, upper, colour)
            lower = upper
    most = max(lower)
    _area(axes, lower, [max(total, size) for size in lower], IDLE)
    axes.plot(lower.index(most) + 0.5, most, "o", ms=3.5, color=INK, clip_on=False, zorder=4.0)
    if limit is not None:
        axes.axhline(limit, color=LIMIT, lw=1.0, ls="--", zorder=3.0)
    above: dict[str, Any] = {"transform": axes.transAxes, "size": TEXT, "va": "bottom"}
    axes.text(0.0, 1.02, name, color=INK, weight="bold", **above)
    text = f"{in_units(most, 'B')}{' in use at most,' * has_room} of {in_units(total, 'B')}"
    axes.text(1.0, 1.02, text, color=FAINT, ha="right", **above)


def _scales(axes: "Axes", ticks: int, width: float, height: float, *, is_lowest: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    shown = range(0, ticks, numbered(ticks, width / ticks)) if is_lowest else ()
    axes.set_xlim(0.0, ticks)
    axes.set_xticks([tick + 0.5 for tick in shown], [*map(str, shown)])
    most = axes.get_ylim()[1]
    sizes = [size for size in MaxNLocator(int(height / 16), steps=[1, 2, 5, 10]).tick_values(0.0, most) if size <= most]
    axes.set_yticks(sizes, [in_units(size, "B").replace(".0 ", " ") for size in sizes])
    axes.tick_params(length=0, labelsize=TEXT, pad=5.0, colors=FAINT)
    axes.hlines(sizes, 0.0, ticks, color=LINE, lw=0.5, zorder=0.5)


def _area(axes: "Axes", lower: Sequence[int], upper: Sequence[int], colour: str) -> None:
    edges = list(itertools.pairwise(range(len(lower) + 1)))
    above = [(x, y) for tick, y in zip(edges, upper, strict=True) for x in tick]
    below = [(x, y) for tick, y in zip(edges, lower, strict=True) for x in tick]
    outlined(axes, [[*_corners(above), *reversed(_corners(below))]], colour)


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points at which a line of steps turns, and its ends."""
    between = zip(points, points[1:], points[2:], strict=False)
    return [points[0], *(b for a, b, c in between if not a[1] == b[1] == c[1]), points[-1]]
