"""Draw a schedule with matplotlib, an extra that is imported when a picture is made.

    grouped: 4 stages on 4 IPUs, 8 micro-batches, 14 ticks, bubble 27.3%
    what numbers, the bubble and colours mean
           ramp-up   main                    ramp-down
    IPU 0  0  1  2 | 3  0 ...               |           update
    IPU 1     0  1 | 2  0 ...               |
    tick   0  1  2   3    ...

Drawn by ticks, a task is one unit wide, and a tick is as wide as the IPU with the most tasks in it needs, so ramp-up
has no half-empty ticks. Drawn by time, a task is as wide as its time in a `Simulation`. Ticks are drawn where the share
that is hatched is then the bubble in the title. It is not if cells stand for unlike times: two stages in a cell, or a
concurrent stage, which all IPUs share. Long schedules continue in bands below, like lines of music. Lengths are in
points (1/72 inch).
"""

import bisect
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ipu_jax.base.showing import counted
from ipu_jax.core.schedules._simulate import Simulation
from ipu_jax.core.schedules._timetable import Kind, Task, Timetable, segments_of, tables_of, tasks_of, tick_of
from ipu_jax.core.schedules.figures import (
    CONCURRENT,
    DIGIT,
    FAINT,
    IDLE,
    INK,
    LINE,
    LOCAL,
    MARGIN,
    TEXT,
    UPDATE,
    WIDTH,
    drawn,
    headed,
    name_of,
    numbered,
    outlined,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TASKS = 200_000  # 20 MB of SVG, and about one task per pixel of a page

_LEFT, _ABOVE, _BELOW, _UPDATE_GAP, _UPDATE_WIDTH = 48.0, 22.0, 22.0, 6.0, 16.0
_ROOM = WIDTH - _LEFT - _UPDATE_GAP - _UPDATE_WIDTH - MARGIN
_WIDEST_UNIT, _NARROWEST_CELL, _NARROWEST_WITH_EDGE, _MOST_BANDS = 48.0, 2.25, 6.0, 6
_LEAST_TEXT, _MOST_DARK = 6.0, 8


def figure_of(table: Timetable, simulation: Simulation | None, usual: Callable[[], Simulation]) -> "Figure":
    """Return the picture as a figure, which a notebook shows; `Schedule.plot` documents the arguments.

    Args:
        usual: returns the simulation with the costs of `Schedule.bubble`.
    """
    size = sum(len(row) for _, rows in tables_of(table) for row in rows)
    if size > _MOST_TASKS:
        raise ValueError(
            f"schedule {table.name!r} has {size:,} tasks, more than a picture can show: draw one of "
            f"{_MOST_TASKS:,} at most; with fewer micro-batches it looks alike"
        )
    if simulation is not None:
        _check(table, simulation)

    def draw(figure: "Figure") -> None:
        run = simulation or usual()
        cells, ticks = _cells(table, simulation)
        busy = sum((cell.end - cell.start) * len(cell.rows) for cell in cells)
        if ticks and abs(1.0 - busy / (ticks[-1] * table.ipus) - run.bubble) > 5e-4:  # as titles round it
            cells, ticks = _cells(table, run)
        _Picture(table, cells, ticks, has_costs=simulation is not None).draw(figure, run.bubble)

    return drawn(draw)


class _Cell(NamedTuple):
    """F, B or W of one segment and micro-batch. `chunk` is the segment's number on its IPU, or None if concurrent."""

    start: float
    end: float
    kind: Kind
    microbatch: int
    stages: range
    rows: range
    chunk: int | None


def _cells(table: Timetable, simulation: Simulation | None) -> tuple[list[_Cell], list[float]]:
    """Return the cells, and the start of each tick and the end of the last. By time, there are no ticks."""
    seen, segments = Counter[int](), {}
    for stages in segments_of(table.placement):
        ipu = table.placement[stages[0]]
        rows, chunk = (range(table.ipus), None) if ipu is None else (range(ipu, ipu + 1), seen[ipu])
        segments[stages[0]] = stages, rows, chunk
        seen.update(rows if ipu is not None else ())
    cells: list[_Cell] = []
    ticks, free = [0.0], [0.0] * table.ipus
    for task in tasks_of(table):  # in the order of the clock
        if task.stage not in segments:
            continue
        stages, rows, chunk = segments[task.stage]
        if simulation is not None:
            last = Task(stages[-1], task.kind, task.microbatch)  # an IPU does a segment's stages one after the other
            start = min(simulation.start_times[task], simulation.start_times[last])
            end = max(simulation.end_times[task], simulation.end_times[last])
        else:
            while len(ticks) <= tick_of(table, task):  # a tick without tasks also counts
                ticks.append(max(*free, ticks[-1] + 1.0))
                free = [ticks[-1]] * table.ipus
            start = max(free[rows.start : rows.stop])
            end = start + 1.0
            free[rows.start : rows.stop] = [end] * len(rows)
        cells.append(_Cell(start, end, task.kind, task.microbatch, stages, rows, chunk))
    return cells, [*ticks, max(free)] if simulation is None else []


def _check(table: Timetable, simulation: object) -> None:
    if not isinstance(simulation, Simulation):
        raise ValueError(f"simulation={simulation!r} is not a simulation: give what schedule.simulate(...) returns")
    times, tasks = simulation.start_times, tasks_of(table)
    if len(times) != len(tasks) or any(task not in times for task in tasks):
        raise ValueError(
            f"simulation has other tasks ({len(times)}) than schedule {table.name!r} ({len(tasks)}): simulate the "
            "schedule that you draw"
        )
    if not simulation.makespan > 0:
        raise ValueError("simulation takes no time, so there is nothing to draw: simulate with costs above 0")


class _Picture:
    """Draws cells, by ticks or, without ticks, by time. `_row` is a row's height, and `_unit` the width of a unit."""

    def __init__(self, table: Timetable, cells: list[_Cell], ticks: list[float], *, has_costs: bool):
        self._table, self._cells, self._ticks, self._has_costs = table, cells, ticks, has_costs
        rows, micro_batches = table.ipus, len(table.forward[0])
        self._row = 28.0 if rows <= 4 else 22.0 if rows <= 8 else 15.0 if rows <= 16 else max(2.25, 240.0 / rows)
        self._end = end = ticks[-1] if ticks else max(cell.end for cell in cells)
        # ramp-up ends where the last stage's first B begins, and ramp-down begins after its last F: with whole ticks
        of_last_stage = [cell for cell in cells if cell.stages[-1] == len(table.placement) - 1]
        main = min(cell.start for cell in of_last_stage if cell.kind == "B")
        down = max(cell.end for cell in of_last_stage if cell.kind == "F")
        if ticks:
            main, down = ticks[bisect.bisect_right(ticks, main) - 1], ticks[bisect.bisect_left(ticks, down)]
        self._spans = ("ramp-up", 0.0, main), ("main", main, max(main, down)), ("ramp-down", max(main, down), end)
        # enough bands to tell cells apart, without cutting a tick in two
        width = statistics.median(cell.end - cell.start for cell in cells)
        bands = min(_MOST_BANDS, math.ceil(_NARROWEST_CELL * end / (width * _ROOM))) if width else 1
        cuts = {end * i / bands for i in range(1, bands)}
        if ticks:
            cuts = {ticks[bisect.bisect_left(ticks, cut)] for cut in cuts} - {0.0, end}
        self._bands = list(itertools.pairwise([0.0, *sorted(cuts), end]))
        self._unit = _ROOM / max(end - start for start, end in self._bands)
        self._unit = min(self._unit, _WIDEST_UNIT) if ticks else self._unit
        # cells contain numbers; if most cells are too small for numbers, the cells of a few micro-batches are dark
        self._digits, self._width = len(str(micro_batches - 1)), width * self._unit
        has_numbers = self._size(self._width) >= _LEAST_TEXT
        self._dark = range(0) if has_numbers else range(0, micro_batches, max(4, -(-micro_batches // _MOST_DARK)))
        self._chunks = 1 + max((cell.chunk for cell in cells if cell.chunk is not None), default=0)
        self._has_several = len({cell.stages for cell in cells if cell.chunk is None}) > 1

    def draw(self, figure: "Figure", bubble: float) -> None:
        rows = self._table.ipus * self._row
        below = len(self._bands) * (_ABOVE + rows + _BELOW)
        top, height = headed(figure, below, self._title(bubble), self._caption(), self._legend())
        for start, end in self._bands:
            top += _ABOVE + rows + _BELOW
            width = self._unit * (end - start)
            place = _LEFT / WIDTH, 1 - (top - _BELOW) / height, width / WIDTH, rows / height
            axes = figure.add_axes(place, xlim=(0.0, width), ylim=(rows, 0.0), frame_on=False)
            self._band(axes, start, end)
            if end == self._end:
                left, text = width + _UPDATE_GAP, "weight update" if rows > 64.0 else "update"
                _rectangles(axes, [(left, 0.0, left + _UPDATE_WIDTH, rows)], UPDATE)
                at = left + _UPDATE_WIDTH / 2, rows / 2
                axes.text(*at, text, rotation=90, ha="center", va="center", size=7.0, color=INK)

    def _band(self, axes: "Axes", start: float, end: float) -> None:
        """Draw the rows of all IPUs from `start` to `end`, with the labels above, before and below them."""
        row, bottom = self._row, self._table.ipus * self._row
        x = lambda at: (min(max(at, start), end) - start) * self._unit
        gap = min(1.0, 0.05 * row)
        by_colour: defaultdict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for cell in self._cells:
            left, right = x(cell.start), x(cell.end)
            if right > left:
                colour = self._colour(cell.kind, cell.chunk, is_dark=cell.microbatch in self._dark)
                upper, lower = cell.rows.start * row + gap, cell.rows.stop * row - gap
                by_colour[colour].append((left, upper, right, lower))
                self._number(axes, cell, (left + right) / 2, (upper + lower) / 2, right - left)
        y = [k * row for k in range(self._table.ipus)]
        _rectangles(axes, [(0.0, top + gap, x(end), top + row - gap) for top in y], IDLE)
        for colour, rectangles in by_colour.items():
            _rectangles(axes, rectangles, colour, edge=0.75 if self._width >= _NARROWEST_WITH_EDGE else 0.0)
        line: dict[str, Any] = {"color": INK, "clip_on": False}
        for name, first, last in self._spans:
            if last > first and last > start and first < end:
                # a narrow outer part borrows room from main, whose name keeps clear of the other names
                at, side = min(max((x(first) + x(last)) / 2, 60.0), x(end) - 70.0), "center"
                if name != "main":
                    at, side = (x(first), "left") if name == "ramp-up" else (x(last), "right")
                axes.text(at, -9.0, name, ha=side, size=TEXT, color=INK)
                axes.plot([x(first) + 1.0, x(last) - 1.0], [-5.0, -5.0], lw=1.2, **line)
                if first > start:
                    axes.plot([x(first), x(first)], [-5.0, bottom], lw=0.8, **line)
        marks = self._marks(start, end)
        axes.set_xticks([x(at) for at, _ in marks], [text for _, text in marks])
        step = next(step for step in (2**k for k in itertools.count()) if step * row >= 9.0)
        axes.set_yticks([top + row / 2 for top in y[::step]], [f"IPU {k}" for k in range(0, len(y), step)])
        axes.tick_params(length=0, labelsize=TEXT, pad=5.0, colors=FAINT)
        axes.text(-5.0, bottom + 11.5, "tick" if self._ticks else "time", ha="right", size=TEXT, color=FAINT)
        if self._ticks and self._unit * _shortest(self._ticks) >= 9.0:
            starts = [x(at) for at in self._ticks if start <= at <= end]
            axes.vlines(starts, 0.0, bottom + 3.0, color=LINE, lw=0.75, clip_on=False, zorder=1.5)

    def _number(self, axes: "Axes", cell: _Cell, x: float, y: float, width: float) -> None:
        """Write the micro-batch into a cell if it fits, and the stages if they fit and the row does not say them."""
        size = self._size(width)
        if size >= _LEAST_TEXT and not self._dark:
            stages = self._stages(cell, width)
            for at, text, points in (
                (y - 5.0 * bool(stages), str(cell.microbatch), size),
                (y + 6.5, stages, _LEAST_TEXT),
            ):
                axes.text(x, at, text, size=points, ha="center", va="center_baseline")

    def _size(self, width: float) -> float:
        return min(9.0, 0.6 * self._row, (width - 2.0) / (DIGIT * self._digits))

    def _stages(self, cell: _Cell, width: float) -> str:
        first, last = cell.stages[0], cell.stages[-1]
        text = f"s{first}" if first == last else f"s{first}-{last}"
        fits = self._row >= 20.0 and DIGIT * _LEAST_TEXT * len(text) + 1.5 <= width
        return text if fits and (self._has_several if cell.chunk is None else self._chunks > 1) else ""

    def _colour(self, kind: Kind, chunk: int | None, *, is_dark: bool = False) -> str:
        """Return the colour of a task. The later its segment on its IPU, the paler it is."""
        colour = CONCURRENT[kind] if chunk is None else LOCAL[kind]
        colour = _mixed(colour, "#ffffff", 0.6 * (chunk or 0) / max(1, self._chunks - 1))
        if self._dark:  # the dark cells stand out from pale ones
            return _mixed(colour, "#000000", 0.55) if is_dark else _mixed(colour, "#ffffff", 0.35)
        return colour

    def _legend(self) -> dict[str, str]:
        """Return the colour of each kind of task that there is."""
        seen = {(cell.kind, cell.chunk is None) for cell in self._cells}
        entries: dict[str, str] = {}
        for is_concurrent in (False, True):
            for kind in ("F", "B", "W"):
                if (kind, is_concurrent) in seen:
                    name = name_of(kind, has_weight_tasks=bool(self._table.weight), is_concurrent=is_concurrent)
                    entries[name] = self._colour(kind, None if is_concurrent else 0)
        return entries | {"idle": IDLE}

    def _marks(self, start: float, end: float) -> list[tuple[float, str]]:
        """Return the numbers below the rows, with positions: every tick, second, fifth and so on, or round times."""
        if not self._ticks:
            from matplotlib.ticker import MaxNLocator

            times = MaxNLocator(10, steps=[1, 2, 5, 10]).tick_values(start, end)
            return [(float(at), f"{at:g}") for at in times if start <= at <= end]
        step = numbered(len(self._ticks), self._unit * _shortest(self._ticks))
        middles = [(tick + after) / 2 for tick, after in itertools.pairwise(self._ticks)]
        return [(at, str(i)) for i, at in enumerate(middles) if i % step == 0 and start <= at < end]

    def _title(self, bubble: float) -> str:
        """Return the title, in the wording of the schedule's text."""
        table, length = self._table, f"makespan {self._end:.4g}"
        if self._ticks:
            length = counted(len(self._ticks) - 1, "tick")
        stages, ipus = counted(len(table.placement), "stage"), counted(table.ipus, "IPU")
        micro_batches = counted(len(table.forward[0]), "micro-batch")
        return f"{table.name}: {stages} on {ipus}, {micro_batches}, {length}, bubble {bubble:.1%}"

    def _caption(self) -> str:
        """Return the explanation of numbers, shades and the bubble."""
        numbers = "Numbers are micro-batches"
        if self._dark:
            numbers = f"Dark: micro-batches {', '.join(map(str, self._dark))}"
        elif any(self._stages(cell, self._width) for cell in self._cells):
            numbers += ", s1 is stage 1"
        paler = "; paler: later stages of an IPU" if self._chunks > 1 else ""
        costs = "F, B and W of a stage cost the same" if self._table.weight else "B of a stage costs twice its F"
        bubble = "in this simulation, without the weight update" if self._has_costs else f"if {costs}"
        return f"{numbers}{paler}. Bubble: the idle share of the IPUs' time {bubble}."


def _shortest(ticks: list[float]) -> float:
    return min(after - tick for tick, after in itertools.pairwise(ticks))


def _mixed(colour: str, other: str, part: float) -> str:
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _rectangles(axes: "Axes", corners: list[tuple[float, float, float, float]], colour: str, edge: float = 0.0) -> None:
    """Draw rectangles (left, top, right, bottom) of one colour."""
    outlined(axes, [[(a, b), (c, b), (c, d), (a, d)] for a, b, c, d in corners], colour, edge)
