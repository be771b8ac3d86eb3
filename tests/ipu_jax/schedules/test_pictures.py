"""Test pictures of schedules: against grids drawn by hand, every family task by task, and what cannot be drawn."""

import re
import resource
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise

import pytest

from ipu_jax.schedules import SCHEDULES, Schedule, StageCosts, Task, make_schedule
from ipu_jax.schedules.pictures.grid import Span, grid_by_tick, grid_by_time
from ipu_jax.schedules.pictures.paints import IDLE, UPDATE, paint_of
from ipu_jax.schedules.pictures.scene import scene_of
from ipu_jax.schedules.pictures.shapes import width_of
from support import documents

SVG = "{http://www.w3.org/2000/svg}"

# Columns are phases of ticks: F and B of a tick stand side by side, and ramp-up and ramp-down have no empty halves.
GROUPED = """
    0F0 0F1  .  0F2 0B0  .  0B1 0B2
     .  1F0 1B0 1F1 1B1 1F2 1B2  .
"""
# a head on both IPUs: F, then both of the head, then B, in each tick
HEAD = """
    0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
     .  1F0 1B0  .   .  1F1 1B1  .
"""
# looped over two IPUs, an IPU does one thing in a tick
LOOPED = """
    0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
     .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1  .
"""


def schedules():
    for name in SCHEDULES:
        yield pytest.param(make_schedule(name, ipus=4, micro_batches=8), id=name)
    costs = StageCosts(forward=[1, 3, 1, 1], backward=[1, 2, 1, 1], weight=[0.5, 1, 1, 2])
    found = make_schedule("auto", placement=(0, 1, 2, None), micro_batches=5, costs=costs)
    yield pytest.param(found, id="auto")
    for name, placement in [
        ("grouped", (None, 0, 0, 1, None, 1, None)),
        ("grouped", (0, 1, 0, 1)),
        ("zb-h1", (None, 0, None, 1, None)),
        ("1f1b", (0, 2)),
        ("gpipe", (None, None)),
        ("sequential", (0,)),
    ]:
        ipus = 3 if placement == (0, 2) else 2
        yield pytest.param(
            make_schedule(name, placement=placement, ipus=ipus, micro_batches=3), id=f"{name} on {placement}"
        )


FAMILIES = tuple(schedules())


def by_tick(schedule):
    return grid_by_tick(schedule, schedule.bubble())


def cells_of(drawing):
    """Return (row, column, cell) of a grid drawn by hand."""
    rows = [line.split() for line in drawing.strip().splitlines()]
    return {(k, c, cell) for k, row in enumerate(rows) for c, cell in enumerate(row) if cell != "."}


# against drawings by hand


@pytest.mark.parametrize(
    ("schedule", "drawing", "ticks", "spans"),
    [
        (
            make_schedule("grouped", ipus=2, micro_batches=3),
            GROUPED,
            (0, 1, 3, 5, 7, 8),
            (Span("ramp-up", 0, 1), Span("main", 1, 7), Span("ramp-down", 7, 8)),
        ),
        (
            make_schedule("grouped", placement=(0, None), ipus=2, micro_batches=2),
            HEAD,
            (0, 4, 8),
            (Span("main", 0, 8),),
        ),
        (
            make_schedule("looped", ipus=2, micro_batches=2),
            LOOPED,
            tuple(range(11)),
            (Span("ramp-up", 0, 4), Span("main", 4, 6), Span("ramp-down", 6, 10)),
        ),
    ],
    ids=["grouped", "head", "looped"],
)
def test_the_cells_are_those_drawn_by_hand(schedule, drawing, ticks, spans):
    grid = by_tick(schedule)
    assert {(box.ipu, box.start, str(task)) for box in grid.boxes for task in box.tasks} == cells_of(drawing)
    assert {box.end - box.start for box in grid.boxes} == {1}
    assert (grid.ticks, grid.end) == (ticks, ticks[-1])
    assert grid.spans == spans


def rectangles_of(svg):
    """Return (fill, x, y, width, height) of each rectangle of an SVG picture."""
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        for numbers in re.findall(r"M(\S+) ([^h]+)h([^v]+)v([^h]+)h", path.attrib["d"]):
            yield path.attrib["fill"], *map(float, numbers)


def texts_of(svg):
    """Return (text, x, y) of each text of an SVG picture."""
    for text in ET.fromstring(svg).iter(f"{SVG}text"):
        yield text.text or "", float(text.attrib["x"]), float(text.attrib["y"])


def test_the_svg_file_shows_the_grid_that_is_drawn_by_hand():
    svg = make_schedule("grouped", ipus=2, micro_batches=3).to_svg()
    idle = sorted((y, x, width) for fill, x, y, width, _ in rectangles_of(svg) if fill == IDLE.light)[-2:]
    (top, left, width), (_, _, _) = idle
    unit, found = width / 8, set()
    numbers = [(text, x, y) for text, x, y in texts_of(svg) if text.isdecimal()]
    for kind, cell in (("F", paint_of("F")), ("B", paint_of("B"))):
        for fill, x, y, w, h in rectangles_of(svg):
            if fill == cell.light and y >= top:
                (number,) = (text for text, a, b in numbers if x < a < x + w and y < b < y + h)
                row = int(y > top + h)
                found.add((row, round((x - left) / unit), f"{row}{kind}{number}"))
                assert unit - 1.1 < w < unit
    assert found == cells_of(GROUPED)
    update = [(x, y) for fill, x, y, *_ in rectangles_of(svg) if fill == UPDATE.light]
    assert [y for _, y in update] == [y for y, _, _ in idle]
    assert all(x > left + width for x, _ in update)


def test_the_title_is_that_of_the_text_and_the_axis_numbers_the_ticks():
    schedule = make_schedule("zb-h1", ipus=4, micro_batches=8)
    svg = schedule.to_svg()
    texts = [text for text, _, _ in texts_of(svg)]
    assert str(schedule).splitlines()[0].removesuffix(", one-phase clock") in texts
    axis = max(y for _, _, y in texts_of(svg))
    assert [text for text, _, y in texts_of(svg) if y == axis] == [*map(str, range(27)), "tick"]
    assert {"ramp-up", "main", "ramp-down", "weight", "update", "IPU 0", "IPU 3", "idle"} <= set(texts)


# every family


@pytest.mark.parametrize("schedule", FAMILIES)
def test_every_task_is_drawn_once_in_each_of_its_rows_and_in_its_order(schedule):
    run = schedule.simulate([1.0 + stage for stage in range(len(schedule.placement))], transfer=0.25)
    for grid in (by_tick(schedule), grid_by_time(schedule, run)):
        for ipu in range(schedule.ipus):
            row = [box for box in grid.boxes if box.ipu == ipu]
            assert all(box.end <= after.start + 1e-9 for box, after in pairwise(row)), "two boxes overlap"
            assert [task for box in row for task in box.tasks] == schedule.order(ipu)
        assert grid.spans[0].start == 0
        assert grid.spans[-1].end == grid.end
        assert all(span.end == after.start for span, after in pairwise(grid.spans))


@pytest.mark.parametrize("schedule", FAMILIES)
def test_a_task_is_between_the_lines_of_its_tick(schedule):
    grid = by_tick(schedule)
    ticks = {task: tick for tick in range(schedule.ticks) for task in schedule.tasks(tick)}
    assert len(grid.ticks) == schedule.ticks + 1
    for box in grid.boxes:
        tick = ticks[box.tasks[0]]
        assert grid.ticks[tick] <= box.start < box.end <= grid.ticks[tick + 1]


@pytest.mark.parametrize("schedule", FAMILIES)
def test_by_time_a_task_is_as_wide_as_it_takes_and_what_is_left_is_the_bubble(schedule):
    run = schedule.simulate(forward=1.5, backward=2, transfer=0.5, lockstep=schedule.clock == "two-phase")
    grid = grid_by_time(schedule, run)
    assert grid.end == pytest.approx(run.makespan)
    for box in grid.boxes:
        assert box.start == min(run.start_times[task] for task in box.tasks)
        assert box.end == max(run.end_times[task] for task in box.tasks)
    area = sum(box.end - box.start for box in grid.boxes)
    assert 1 - area / (schedule.ipus * grid.end) == pytest.approx(run.bubble)


def test_a_gap_in_a_table_of_ones_own_is_a_tick():
    schedule = Schedule("custom", (0, 1), 2, ((0,), (3,)), ((6,), (4,)), None, "one-phase")
    grid = by_tick(schedule)
    assert [(str(box.tasks[0]), box.start) for box in grid.boxes] == [("0F0", 0), ("1F0", 3), ("1B0", 4), ("0B0", 6)]
    assert grid.ticks == tuple(range(8))


# bands


@pytest.mark.parametrize("is_time", [False, True])
def test_the_bands_of_a_long_schedule_are_the_whole_cut_between_ticks(is_time):
    schedule = make_schedule("grouped", ipus=4, micro_batches=30)
    whole = grid_by_time(schedule, schedule.simulate()) if is_time else by_tick(schedule)
    parts = whole.parts(3)
    assert len(parts) == 3
    assert [part.first_time for part in parts] + [whole.end] == [0, *(part.first_time + part.end for part in parts)]
    assert max(part.end for part in parts) - min(part.end for part in parts) < 4
    area: defaultdict[Task, float] = defaultdict(float)
    for part in parts:
        for box in part.boxes:
            assert 0 <= box.start < box.end <= part.end
            area[box.tasks[0]] += box.end - box.start
    assert area == pytest.approx({box.tasks[0]: box.end - box.start for box in whole.boxes})
    if not is_time:
        assert sum(len(part.boxes) for part in parts) == len(whole.boxes)
        shifted = [at + part.first_time for part in parts for at in part.ticks[:-1]]
        assert (*shifted, whole.end) == whole.ticks
        assert [whole.ticks[part.first_tick] for part in parts] == [part.first_time for part in parts]


def test_where_numbers_do_not_fit_dots_follow_a_few_micro_batches():
    small, large = (scene_of(by_tick(make_schedule("1f1b", ipus=16, micro_batches=m))) for m in (8, 64))
    assert not small.dots
    assert len(large.dots) == 1 + 16 * 2 * 8  # one in the legend
    assert any(word.text == "micro-batches 0, 8, 16, 24, 32, 40, 48, 56" for word in large.words)
    assert sum(word.text == "9" for word in large.words) == 0


# how it looks


def scene_name(schedule):
    return f"{schedule.name[:20]} {schedule.ipus}x{schedule.micro_batches}"


@pytest.mark.parametrize(
    "schedule",
    [
        *FAMILIES,
        *(make_schedule(name, ipus=16, micro_batches=64) for name in ("grouped", "zbv")),
        make_schedule("looped", ipus=4, micro_batches=8, rounds=4),
        make_schedule("grouped", ipus=40, micro_batches=3),
        make_schedule("grouped", placement=(None, 0) * 9, ipus=3, micro_batches=3),
        make_schedule("gpipe", ipus=2, micro_batches=200),
        Schedule("a name that is longer than any title that fits" * 3, (0,), 1, ((0,),), ((1,),), None, "one-phase"),
    ],
    ids=scene_name,
)
@pytest.mark.parametrize("is_time", [False, True])
def test_texts_do_not_run_into_each_other_or_out_of_the_page(schedule, is_time):
    grid = grid_by_time(schedule, schedule.simulate(transfer=0.1)) if is_time else by_tick(schedule)
    scene = scene_of(grid)
    lines: dict[float, list] = {}
    for word in scene.words:
        assert word.left >= 0, word
        assert word.right <= scene.width, word
        assert 0 < word.y - word.size < word.y < scene.height, word
        lines.setdefault(word.y, []).append(word)
    for words in lines.values():
        ordered = sorted(words, key=lambda word: word.left)
        for word, after in pairwise(ordered):
            assert word.right <= after.left, (word, after)
    for rectangle in scene.rectangles:
        assert 0 <= rectangle.x < rectangle.x + rectangle.width <= scene.width
        assert 0 <= rectangle.y < rectangle.y + rectangle.height <= scene.height


def test_letters_are_not_wider_than_they_are_taken_for():
    matplotlib = pytest.importorskip("matplotlib.textpath")
    for text in ("0123456789", "micro-batch", "ramp-down", "weight", "IPU 0", "F: forward", "s3B", "makespan 59.7"):
        measured = matplotlib.TextPath((0, 0), text, size=10).get_extents().width  # DejaVu Sans
        assert measured <= width_of(text, 10) + 0.5, text


@pytest.mark.parametrize("costs", [(1e-9, 2e-9), (0, 1), (1e12, 1e-12), (0.1, 1e-320)])
def test_costs_of_any_size_can_be_drawn(costs):
    schedule = make_schedule("1f1b", ipus=3, micro_batches=4)
    svg = schedule.to_svg(simulation=schedule.simulate(*costs))
    assert re.search("nan|inf", svg) is None
    assert all(width > 0 for *_, width, _ in rectangles_of(svg))


# files


def test_the_same_schedule_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = make_schedule("grouped", placement=(0, None), ipus=2, micro_batches=2)
    again = Schedule.from_text(str(schedule))
    assert schedule.to_svg() == again.to_svg()
    for name in ("a.svg", "b.SVG", "a.png", "b.PNG"):
        (schedule if name[0] == "a" else again).plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.SVG").read_bytes() == schedule.to_svg().encode()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.PNG").read_bytes()


def test_the_figure_shows_the_same_cells_as_the_svg_file(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    schedule = make_schedule("zb-h1", placement=(0, 1, None), micro_batches=3)
    figure = schedule.plot(tmp_path / "x.png")
    assert sorted(text.get_text() for text in figure.axes[0].texts) == sorted(
        t for t, _, _ in texts_of(schedule.to_svg())
    )
    pixels = imread(tmp_path / "x.png")
    scale = pixels.shape[1] / 960
    svg = schedule.to_svg()
    kinds = {paint_of("F"), paint_of("B"), paint_of("W"), paint_of("F", None), paint_of("B", None)}
    fills = {paint.light for paint in kinds}
    cells = [cell for cell in rectangles_of(svg) if cell[0] in fills]
    assert {cell[0] for cell in cells} == fills
    for fill, x, y, _, h in cells:
        found = pixels[round((y + 0.9 * h) * scale), round((x + 2.5) * scale)]  # beside the texts
        assert "#" + "".join(f"{round(255 * part):02x}" for part in found[:3]) == fill


def test_an_svg_file_is_small_and_accessible_and_needs_nothing_else():
    schedule = make_schedule("grouped", ipus=4, micro_batches=8)
    svg = schedule.to_svg()
    assert len(svg) < 10_000
    assert len(make_schedule("grouped", ipus=16, micro_batches=64).to_svg()) < 100_000
    root = ET.fromstring(svg)
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert description is not None
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
    assert title.text == "grouped: 4 stages on 4 IPUs, 8 micro-batches, 14 ticks, bubble 27.3%"
    assert description.text == (
        "A row for each IPU, from left to right what it does in each tick. ramp-up: ticks 0 to 2; main: ticks 3 to 10; "
        "ramp-down: ticks 11 to 13; then the weight update. The tick axis is below. Placement: stage 0 on IPU 0, "
        "stage 1 on IPU 1, stage 2 on IPU 2, stage 3 on IPU 3."
    )
    assert re.findall(r"\w+://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    other = make_schedule("grouped", ipus=4, micro_batches=9).to_svg()
    assert title.attrib["id"] not in other, "both may stand in one page"


def test_a_name_with_signs_of_markup_is_shown_as_it_is(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = Schedule("<&$x^$_'\"", (0,), 1, ((0,),), ((1,),), None, "one-phase")
    assert next(text for text, _, _ in texts_of(schedule.to_svg()) if text.startswith("<&$x^$_'\":"))
    schedule.plot(tmp_path / "x.png")


def test_svg_needs_no_matplotlib_and_the_figure_says_what_to_install(monkeypatch):
    schedule = make_schedule("1f1b", ipus=2, micro_batches=2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert schedule.to_svg().startswith("<svg ")
    with pytest.raises(ImportError) as raised:
        schedule.plot()
    assert str(raised.value) == "matplotlib cannot be imported: pip install 'ipu-jax[plots]'; to_svg() needs none"


def test_the_guide_draws_the_pictures_that_it_shows(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    page = documents.ROOT / "docs/pictures.md"
    monkeypatch.chdir(tmp_path)
    exec("\n".join(documents.blocks(page, "python")), {})
    shown = re.findall(r"\]\(pictures/(.*)\)", page.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shown)
    for name in shown:
        assert (tmp_path / name).read_text() == (page.parent / "pictures" / name).read_text(), name


# what cannot be drawn

_SCHEDULE = make_schedule("1f1b", ipus=2, micro_batches=2)
_NO_COSTS = _SCHEDULE.simulate(forward=0, backward=0)


@pytest.mark.parametrize(
    ("path", "simulation", "message"),
    [
        ("x.pdf", None, "path='x.pdf' ends neither in .svg nor in .png: give such a name, or save the figure that "),
        ("", None, "path='' ends neither in .svg nor in .png: "),
        (3, None, "path=3 is no path: give the name of an SVG or PNG file"),
        (None, 0.5, "simulation=0.5 is no simulation: give what schedule.simulate(...) returns"),
        (
            None,
            make_schedule("1f1b", ipus=2, micro_batches=3).simulate(),
            "simulation has other tasks (12) than schedule '1f1b' (8): simulate the schedule that you draw",
        ),
        (None, _NO_COSTS, "simulation takes no time, so there is nothing to draw: simulate with costs above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(path, simulation, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        _SCHEDULE.plot(path, simulation=simulation)
    assert not list(tmp_path.iterdir())


def test_what_is_too_large_to_be_seen_is_refused_at_once():
    large = make_schedule("1f1b", ipus=256, micro_batches=512)
    message = (
        "schedule '1f1b' has 262,144 cells, more than a picture can show: draw one of 200,000 at most; with fewer "
    )
    with pytest.raises(ValueError, match=f"^{message}micro-batches it looks alike$"):
        large.to_svg()


def test_a_file_that_cannot_be_written_raises_the_error_of_the_system(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(FileNotFoundError):
        _SCHEDULE.plot(tmp_path / "no" / "x.svg")


def test_a_disk_that_gets_full_leaves_the_picture_that_was_there(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "x.svg").write_text("of an earlier run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _SCHEDULE.plot(tmp_path / "x.svg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]
