"""Test pictures of schedules by what a reader sees in them: cells, numbers, axis, legend; and the files and errors."""

import colorsys
import re
import resource
import sys
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from typing import Any

import pytest

from ipu_jax.core.analysis.bytes_picture import bytes_figure
from ipu_jax.core.schedules import SCHEDULES, Schedule, Task, make_schedule
from ipu_jax.core.schedules.figures import BYTES
from support.refusals import refusals, refused

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


class Page:
    """What a reader sees in an SVG picture: texts, the legend's colours, the axis, and cells.

    A cell is (left, right, rows, kind, texts in it); the legend says the kind of a colour, "F*" of a concurrent stage.
    """

    def __init__(self, svg):
        nodes = list(ET.fromstring(svg).iter())
        places = [
            (node.text or "", node.get("x", "nan"), node.get("y", "nan")) for node in nodes if node.tag == f"{SVG}text"
        ]
        texts = [(text, float(x), float(y) - 3) for text, x, y in places]
        hatched = {f"url(#{n.get('id')})": n[0].get("fill") for n in nodes if n.tag == f"{SVG}pattern" and len(n) > 1}
        boxes = []
        for node in nodes:
            fill = "".join(re.findall(r"^fill: (#.{6}|url\(#\w+\))", node.get("style", "")))
            fill = hatched.get(fill, fill)
            for x in re.findall(r"M (\S+) (\S+)\s+L (\S+) \S+\s+L \S+ (\S+)\s+L", node.get("d", "")) if fill else ():
                left, top, right, bottom = map(float, x)
                boxes.append((fill, left, right, min(top, bottom), max(top, bottom)))
        self.words, self.hatched = [text for text, _, _ in texts], {*hatched.values()}
        self.legend = {
            text: next(fill for fill, _, right, top, bottom in boxes if 0 < x - right < 12 and top < y < bottom)
            for text, x, y in texts
            if re.match("[FBW](: | of )|idle", text)
        }
        ipus = {int(text[4:]): y for text, _, y in texts if re.fullmatch(r"IPU \d+", text)}
        self.cells = []
        for fill, left, right, top, bottom in boxes:
            rows = tuple(ipu for ipu, y in ipus.items() if top < y < bottom)
            if rows and (kind := self.kind_of(fill)):
                inside = tuple(text for text, x, y in texts if left < x < right and top < y + 3 < bottom)
                self.cells.append((left, right, rows, kind, inside))
        name, _, base = next(one for one in texts if one[0] in ("tick", "time"))
        self.axis = {float(text): x for text, x, y in texts if abs(y - base) < 2 and text != name}

    def kind_of(self, fill):
        for text, colour in self.legend.items():
            is_joint = "concurrent" in text  # the other kinds have paler and darker colours of their hue
            if text != "idle" and (colour == fill or (not is_joint and abs(hue(colour) - hue(fill)) < 0.02)):
                return text[0] + "*" * is_joint
        return None


def hue(colour):
    return colorsys.rgb_to_hls(*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0]


def drawn_tasks(schedule, page):
    """Return the first and last task of each cell, and check that the cells of each IPU are its tasks in order."""
    pairs, segments = {}, {stages[0]: stages for stages in schedule.segments}
    for ipu in range(schedule.ipus):
        row = sorted(cell for cell in page.cells if ipu in cell[2])
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(row)), "cells overlap"
        tasks = [task for task in schedule.order(ipu) if task.stage in segments]
        for cell, task in zip(row, tasks, strict=True):
            is_joint, (first, *_, last) = schedule.placement[task.stage] is None, [task.stage, *segments[task.stage]]
            name = f"s{first}" if first == last else f"s{first}-{last}"
            assert cell[2:4] == ((*range(schedule.ipus),) if is_joint else (ipu,), task.kind + "*" * is_joint)
            assert cell[4] in [(), (str(task.microbatch),), (str(task.microbatch), name)]
            pairs[cell] = task, Task(last, task.kind, task.microbatch)
    return pairs


FAMILIES = [make_schedule(name, ipus=4, gradient_accumulation=8) for name in SCHEDULES]
FAMILIES += [
    make_schedule(name, placement=placement, ipus=ipus, gradient_accumulation=3)
    for name, placement, ipus in [
        ("grouped", (None, 0, 0, 1, None, 1, None), 2),
        ("zb-h1", (None, 0, None, 1, None), 2),
        ("1f1b", (0, 2), 3),
        ("gpipe", (None, None), 2),
        ("sequential", (0,), 1),
    ]
]
EXTREMES = [
    make_schedule("looped", ipus=4, gradient_accumulation=8, rounds=4),
    make_schedule("grouped", ipus=40, gradient_accumulation=3),
    make_schedule("sequential", ipus=4, gradient_accumulation=100),  # in several bands
    Schedule("<&$x^$_" + "-longer-than-fits" * 9, (0,), 1, ((0,),), ((1,),), None, "one-phase"),
]
EVERY = [*FAMILIES, *EXTREMES]
name_of = lambda schedule: f"{schedule.name[:20]} {schedule.placement}"


def in_turn(schedules, first):
    """Return every schedule, of which each eighth, from the first on, is not slow."""
    return [
        pytest.param(schedule, marks=() if k % 8 == first else pytest.mark.slow) for k, schedule in enumerate(schedules)
    ]


GROUPED: Any = make_schedule("grouped", ipus=2, gradient_accumulation=3)


def test_the_picture_is_the_one_drawn_by_hand():
    page = Page(GROUPED.to_svg())
    unit = (page.axis[4] - page.axis[0]) / 7
    left = page.axis[0] - unit / 2
    drawn = {(rows, round((x - left) / unit, 3), f"{kind}{words[0]}") for x, _, rows, kind, words in page.cells}
    by_hand = ["F0 F1 . F2 B0 B1 . B2", ". F0 B0 F1 B1 F2 B2 ."]  # ticks begin at columns 0, 1, 3, 5 and 7
    cells = {((row,), i, cell) for row, line in enumerate(by_hand) for i, cell in enumerate(line.split())}
    assert drawn == {cell for cell in cells if cell[2] != "."}
    assert [(x - left) / unit for x in page.axis.values()] == pytest.approx([0.5, 2, 4, 6, 7.5], abs=1e-3)
    title = "grouped: 2 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 25.0%"
    assert {title, "ramp-up", "main", "ramp-down", "update", "IPU 0", "IPU 1", "tick"} <= set(page.words)


@pytest.mark.fast("sequential (0, 1, 2, 3)", "gpipe (None, None)")
@pytest.mark.parametrize("schedule", in_turn(FAMILIES, 0), ids=name_of)
def test_every_task_is_drawn_once_on_its_ipu_and_in_its_tick_or_time(schedule):
    page = Page(schedule.to_svg())
    drawn = drawn_tasks(schedule, page)
    assert all(cell[4] for cell in drawn), "no number"
    if "tick" in page.words:
        by_tick = [[cell for cell in drawn if drawn[cell][0] in schedule.tasks(tick)] for tick in range(schedule.ticks)]
        ends = [(min(cell[0] for cell in cells), max(cell[1] for cell in cells)) for cells in by_tick]
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(ends))
        assert all(ends[int(tick)][0] < x < ends[int(tick)][1] for tick, x in page.axis.items())

    run = schedule.simulate([1.0 + stage % 2 for stage in range(len(schedule.placement))], 4.0, transfer=0.25)
    page = Page(schedule.to_svg(simulation=run))
    (first, left), *_, (last, right) = page.axis.items()
    x = lambda at: pytest.approx(left + (at - first) * (right - left) / (last - first), abs=0.01)
    for cell, tasks in drawn_tasks(schedule, page).items():
        assert cell[0] == x(min(run.start_times[task] for task in tasks))
        assert cell[1] == x(max(run.end_times[task] for task in tasks))
    assert any(f"makespan {run.makespan:.4g}, bubble {run.bubble:.1%}" in words for words in page.words)


def hatched_share(page, ipus):
    """Return the idle share of the rows, which begin with the first cell and end with the last."""
    left, right = min(cell[0] for cell in page.cells), max(cell[1] for cell in page.cells)
    return 1 - sum((cell[1] - cell[0]) * len(cell[2]) for cell in page.cells) / (ipus * (right - left))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_hatched_is_the_bubble_of_the_title(name):
    schedule = make_schedule(name, ipus=3, gradient_accumulation=4)
    page = Page(schedule.to_svg())
    (title,) = (found for word in page.words if (found := re.search(r", bubble ([\d.]+)%$", word)))
    assert hatched_share(page, 3) == pytest.approx(float(title[1]) / 100, abs=1e-3)


def test_cells_are_drawn_by_time_only_if_ticks_would_not_show_the_bubble():
    axis = lambda name, **options: {"tick", "time"} & {*Page(make_schedule(name, **options).to_svg()).words}
    assert axis("1f1b", ipus=2, gradient_accumulation=2) == axis("zb-h1", ipus=2, gradient_accumulation=2) == {"tick"}
    assert axis("zbv", ipus=2, gradient_accumulation=2) == {"time"}, "stages 1 and 2 share a cell"
    assert axis("grouped", placement=(0, 1, None), gradient_accumulation=3) == {"time"}, "both IPUs share stage 2"


def test_the_legend_names_each_kind_and_no_two_colours_are_alike():
    legend = Page(make_schedule("zb-h1", placement=(0, 1, None), gradient_accumulation=3).to_svg()).legend
    kinds = ["F: forward", "B: backward by input", "W: backward by weight"]
    assert list(legend) == [*kinds, *(f"{kind} of a concurrent stage, on all IPUs" for kind in "FB"), "idle"]
    for one, other in combinations(legend.values(), 2):
        assert sum(abs(int(one[i : i + 2], 16) - int(other[i : i + 2], 16)) for i in (1, 3, 5)) > 80, (one, other)
    assert list(Page(GROUPED.to_svg()).legend) == ["F: forward", "B: backward", "idle"]


def test_a_bubble_and_nothing_else_is_hatched():
    for micro_batches in (4, 64):  # with numbers, and with dark cells
        page = Page(make_schedule("interleaved", placement=(0, 1) * 2, gradient_accumulation=micro_batches).to_svg())
        assert page.hatched == {page.legend["idle"]}


def test_where_numbers_do_not_fit_a_few_micro_batches_are_dark():
    schedule = make_schedule("1f1b", ipus=8, gradient_accumulation=64)
    page = Page(schedule.to_svg())
    assert all(cell[4] == () for cell in drawn_tasks(schedule, page))
    assert any(word.startswith("Dark: micro-batches 0, 8, 16, 24, 32, 40, 48, 56.") for word in page.words)


def check_texts(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    (canvas := FigureCanvasAgg(figure)).draw()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert (box.x1 <= figure.bbox.x1, box.y1 <= figure.bbox.y1) == (True, True), text
    for (text, box), (other, another) in combinations(boxes, 2):
        apart = max(box.x0, another.x0) - min(box.x1, another.x1), max(box.y0, another.y0) - min(box.y1, another.y1)
        assert max(apart) > -1, (text, other)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", in_turn(EVERY, 1), ids=name_of)
def test_no_text_runs_into_another_or_out_of_the_page(schedule):
    check_texts(schedule.plot())
    check_texts(schedule.plot(simulation=schedule.simulate(transfer=0.1)))


@pytest.mark.parametrize(("ipus", "ticks"), [(1, 1), (3, 22), (4, 1300), (10, 207), (20, 60)])
@pytest.mark.fast("1-1", "4-1300")
def test_no_text_runs_into_another_in_a_picture_of_bytes(ipus, ticks):
    held = {kind: [10**k] * ticks for k, kind in enumerate(BYTES, start=1)}
    caption = "A caption of a hundred letters or so, which is as long as the one that reports have. " * 2
    check_texts(bytes_figure("bytes", caption, [held] * ipus, [1_200_000] * ipus, 1_250_000.0))


@pytest.mark.fast("a.svg", "a.png")
@pytest.mark.parametrize("name", ["a.svg", "a.SVG", "a.png", "a.pdf"])
def test_equal_schedules_give_equal_files_whatever_the_user_has_set(name, tmp_path):
    import matplotlib as mpl

    again = Schedule.from_text(str(GROUPED))
    GROUPED.plot(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with mpl.rc_context({"font.size": 20.0, "svg.fonttype": "path", "axes.facecolor": "black", "lines.linewidth": 9}):
        again.plot(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert before.startswith({"svg": b"<svg ", "png": b"\x89PNG", "pdf": b"%PDF"}[name[2:].lower()])
    assert name[2:].lower() != "svg" or before.decode() == GROUPED.to_svg()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_notebook_shows_a_schedule_and_its_figure_and_a_page_may_hold_them(monkeypatch):
    svg = GROUPED.to_svg()
    assert GROUPED.plot().__dict__["_repr_svg_"]() == GROUPED._repr_svg_() == svg
    assert set(re.findall(r'\w+://[^" ]*', svg)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert ET.fromstring(svg)[0].text == "grouped: 2 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 25.0%"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert GROUPED._repr_svg_() is None
    for draw in (GROUPED.plot, GROUPED.to_svg):
        with pytest.raises(ImportError, match=r"^matplotlib cannot be imported: pip install 'ipu-jax\[plots\]'$"):
            draw()


_OTHER = make_schedule("grouped", ipus=2, gradient_accumulation=2)


@refusals(
    (lambda: GROUPED.plot("x.gif"), "path='x.gif'", ".svg, .png or .pdf", "give such a name"),
    (lambda: GROUPED.plot(3), "path=3 ", "not a path", "SVG, PNG or PDF"),
    (lambda: GROUPED.plot(simulation=0.5), "simulation=0.5 ", "is not a simulation", "schedule.simulate(...)"),
    (lambda: GROUPED.plot(simulation=_OTHER.simulate()), "other tasks (8)", "'grouped' (12)", "simulate the schedule"),
    (lambda: GROUPED.plot(simulation=GROUPED.simulate(0, 0)), "takes no time", "nothing to draw", "with costs"),
    (lambda: make_schedule("1f1b", ipus=256, gradient_accumulation=512).to_svg(), "262,144 tasks", "200,000 at most"),
)
def test_what_cannot_be_drawn_is_refused(call, holds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(*holds):
        call()
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_leaves_the_one_before(tmp_path):
    with pytest.raises(FileNotFoundError):
        GROUPED.plot(tmp_path / "no" / "x.svg")
    (tmp_path / "x.svg").write_text("of an earlier run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            GROUPED.plot(tmp_path / "x.svg")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]
