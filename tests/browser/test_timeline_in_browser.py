"""Test the timeline of a page in a browser: zoom, names, and a micro-batch that is followed through the IPUs.

The measured tasks are the plan's at half of its speed, so each time that the page names is known.
"""

import dataclasses
import itertools
import re

import pytest

from ipu_jax.core.schedules import make_schedule
from ipu_jax.observe import RunLog, write_report
from ipu_jax.run.observe.tracing._assembling import planned
from ipu_jax.run.observe.tracing.timeline import Kind, Slice, Step, Timeline
from ipu_jax.run.observe.tracing.trace_report import Costs
from support import browsing

MS = 1e-3
ROW, GAP = 31, 5  # pixels of a row with its gap, and of a gap
LABELS = {1280: 120, 500: 66}


def half_speed(name, placement, ipus, *, replicas=1, steps=1):
    """Return the timeline of a schedule of four micro-batches, whose F take 2 ms and B 4 ms."""
    schedule = make_schedule(name, ipus=ipus, placement=placement, gradient_accumulation=4)
    kinds: dict[Kind, float] = {"F": 1 * MS, "B": 2 * MS}
    if schedule.weight is not None:
        kinds["W"] = 1 * MS
    costs: Costs = {
        ((stage,), kind): cost
        for stage, place in enumerate(placement)
        for kind, cost in kinds.items()
        if kind != "W" or place is not None
    }
    one_step = planned(schedule, costs, [Step(0, 0, 0, 0, 0, 1)], [Slice(0, 0, 0, 0, "F", "0F0", 0.0, 1.0)])
    length = 2 * max(one.end for one in one_step)
    slices = [
        dataclasses.replace(
            one, replica=replica, step=step, start=2 * one.start + step * length, end=2 * one.end + step * length
        )
        for replica in range(replicas)
        for step in range(steps)
        for one in one_step
    ]
    made = [
        Step(0, replica, ipu, step, step * length, (step + 1) * length)
        for replica in range(replicas)
        for ipu in range(ipus)
        for step in range(steps)
    ]
    plan = planned(schedule, costs, made, slices)
    stages = tuple(f"block {stage}" for stage in range(len(placement)))
    return Timeline(schedule, stages, True, tuple(made), tuple(slices), plan)


@pytest.fixture
def page_of(tmp_path):
    def write(timeline):
        log = RunLog()
        log.event("losses", updates=3, losses=[3.0, 2.0, 1.0])
        return write_report(tmp_path / "run.html", log, timeline=timeline)

    return write


def place(seen, timeline, one):
    """Return where a measured slice is on the canvas while all of the timeline is shown."""
    width = seen.page.evaluate("document.getElementById('canvas').clientWidth")
    end = max(step.end for step in timeline.steps)
    rows = 2 * timeline.ipus.index((one.replica, one.ipu)) + 1  # the plan's is above
    middle = (one.start + one.end) / 2
    return {"x": LABELS[1280] + middle / end * (width - LABELS[1280]), "y": rows * ROW + GAP + 13}


def test_a_click_follows_a_micro_batch_through_all_ipus_and_back(browser, page_of):
    timeline = half_speed("1f1b", (0, 1, 2, 3), 4)
    (of_it,) = [[one for one in timeline.slices if one.microbatch == 2]]
    with browsing.opened(browser, page_of(timeline)) as seen:
        canvas, way = seen.page.locator("#canvas"), seen.page.locator("#way")
        before = canvas.screenshot()
        canvas.click(position=place(seen, timeline, of_it[3]))
        text = way.inner_text()
        begun, ended = min(one.start for one in of_it), max(one.end for one in of_it)
        work = sum(one.end - one.start for one in of_it)
        whole, start, working = (f"{1e3 * seconds:g} ms" for seconds in (ended - begun, begun, work))
        assert text.startswith(f"Micro-batch 2: 0F2 to 0B2 in {whole}, from {start}; {working} in 8 tasks")
        in_order = sorted(of_it, key=lambda one: one.start)
        waits = {b.name: round(1e3 * (b.start - a.end), 6) for a, b in itertools.pairwise(in_order)}
        longest, task = re.findall(r"the longest wait is ([\d.]+) ms, before (\w+)\.", text)[0]
        assert float(longest) == max(waits.values()) == waits[task] > 0
        assert canvas.screenshot() != before
        seen.shot("timeline-followed")
        canvas.click(position=place(seen, timeline, of_it[3]))  # a second click follows none
        assert way.inner_text().strip() == ""
        seen.page.mouse.move(0, 0)
        canvas.click(position=place(seen, timeline, of_it[0]))
        canvas.press("Escape")
        assert way.inner_text().strip() == ""
        assert (seen.console, seen.requests) == ([], [])


def test_the_button_follows_one_micro_batch_after_another_and_moves_to_it(browser, page_of):
    timeline = half_speed("zb-h1", (0, 1, None), 2, replicas=2, steps=2)
    with browsing.opened(browser, page_of(timeline)) as seen:
        button, way = seen.page.get_by_role("button", name="next micro-batch"), seen.page.locator("#way")
        named = []
        for _ in range(2 * 4 + 1):
            button.click()
            named.append(way.inner_text().split(":")[0].strip())
        assert named == [*(f"Micro-batch {m}" for m in range(4)), *(f"Micro-batch {m}" for m in range(4)), ""]
        button.click()
        # F of three stages, or two and the head's F and B as one; W is not on the way
        assert re.search(r"0F0 to 0B0 .* in (5|6) tasks", way.inner_text())
        seen.shot("timeline-followed-with-a-head")
        assert seen.console == []


@pytest.mark.parametrize("width", browsing.WIDTHS)
def test_keys_wheel_buttons_and_drags_zoom_and_move(browser, page_of, width):
    timeline = half_speed("1f1b", (0, 1), 2)
    with browsing.opened(browser, page_of(timeline), width=width) as seen:
        canvas, words, mouse = seen.page.locator("#canvas"), seen.page.locator("#slice"), seen.page.mouse
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        middle = LABELS[width] + (box["width"] - LABELS[width]) / 2

        def under(x=middle):
            canvas.hover(position={"x": 1, "y": 1})
            canvas.hover(position={"x": x, "y": ROW + GAP + 13})
            return words.inner_text()

        whole, right = under(), under(box["width"] - 2)
        assert whole == "IPU 0: 0B1, B: backward, 4 ms, from 14 ms"
        assert right != whole
        zooms = {
            "keys": lambda: [canvas.press("+") for _ in range(12)],
            "wheel": lambda: [under(), *(mouse.wheel(0, -100) for _ in range(12))],
            "button": lambda: [seen.page.locator("#zoom-in").click() for _ in range(4)],
        }
        for name, zoom in zooms.items():
            zoom()
            assert under() == under(box["width"] - 2) == whole, name  # the middle stays, and fills the axis
            under()
            mouse.down()
            mouse.move(box["x"] + LABELS[width] + 5, box["y"] + ROW + GAP + 13)
            mouse.up()
            assert words.inner_text() == whole  # it went with the pointer
            for _ in range(12):
                canvas.press("ArrowRight")
            assert under() != whole, name
            seen.page.locator("#zoom-all").click()
            assert (under(), under(box["width"] - 2)) == (whole, right), name
        assert seen.page.locator("#way").inner_text().strip() == ""  # a drag is not a click
        assert seen.console == []


def test_two_fingers_zoom_and_one_tap_follows(browser, page_of):
    timeline = half_speed("1f1b", (0, 1), 2)
    with browsing.opened(browser, page_of(timeline), width=500, has_touch=True, is_mobile=True) as seen:
        canvas, words = seen.page.locator("#canvas"), seen.page.locator("#slice")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = box["x"] + LABELS[500] + (box["width"] - LABELS[500]) / 2, box["y"] + ROW + GAP + 13
        seen.page.touchscreen.tap(x, y)
        assert words.inner_text().startswith("IPU 0: 0B1")
        assert seen.page.locator("#way").inner_text().startswith("Micro-batch 1: 0F1 to 0B1")
        touch = seen.page.context.new_cdp_session(seen.page)

        def fingers(kind, apart):
            points = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}] if apart else []
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        for kind, apart in (("touchStart", 10), *(("touchMove", 10 + k) for k in range(0, 140, 35)), ("touchEnd", 0)):
            fingers(kind, apart)
        seen.page.touchscreen.tap(box["x"] + box["width"] - 12, y)
        assert words.inner_text().startswith("IPU 0: 0B1")  # far from the middle, too
        assert seen.console == []
