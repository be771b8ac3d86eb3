"""Test curves of several runs over each other in a browser: colours, the legend, and what the pointer reads."""

import re

import pytest

from ipu_jax.observe import RunLog, write_comparison, write_report
from support import browsing


def run(updates: int, slope: float, *accuracies: float) -> RunLog:
    log = RunLog()
    losses = [2.0 - slope * update + 0.02 * (update % 3) for update in range(1, updates + 1)]
    log.event("losses", updates=updates, losses=losses, samples_per_second=100.0)
    for number, accuracy in enumerate(accuracies, 1):
        log.event("evaluated", updates=10 * number, accuracy=accuracy)
    return log


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    runs = {"a.jsonl": run(100, 0.01, 0.5, 0.75), "b.jsonl": run(60, 0.02, 0.8)}
    return write_comparison(tmp_path_factory.mktemp("page") / "x.html", runs)


def texts(found):
    return [re.sub(r"\s+", " ", text).strip() for text in found.all_text_contents()]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (500, "dark")])
def test_runs_lie_over_each_other_and_the_pointer_reads_each(browser, page, width, scheme):
    with browsing.opened(browser, page, width=width, scheme=scheme) as seen:
        loss, accuracy = (seen.page.locator("#curves figure").nth(k) for k in range(2))
        hues = loss.locator("polyline").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
        assert len({*hues}) == 2
        legend = loss.locator(".legend span")
        assert texts(legend) == ["a.jsonl 1.02", "b.jsonl 0.8"]  # the last values
        samples = legend.locator("line").evaluate_all("all => all.map(one => getComputedStyle(one).stroke)")
        assert samples == hues
        for share, after, values in (
            (0.5, "loss after 50 updates", ["a.jsonl 1.54", "b.jsonl 1.04"]),
            (0.9, "loss after 90 updates", ["a.jsonl 1.1", "b.jsonl -"]),  # b has ended
        ):
            box = loss.locator("svg").first.bounding_box()
            left, breadth = (box["width"] * part / 480 for part in (58, 480 - 58 - 14))  # of the axis
            loss.locator("svg").first.hover(position={"x": left + share * breadth, "y": box["height"] / 2})
            assert texts(loss.locator("figcaption")) == [after]
            assert texts(legend) == values
        accuracy.locator("svg").first.hover(position={"x": left + 0.2 * breadth, "y": 50})
        assert texts(accuracy.locator(".legend span")) == ["a.jsonl 75%", "b.jsonl -"]
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        seen.shot(f"comparison-{width}-{scheme}")
        assert (seen.console, seen.requests) == ([], [])


def test_eight_runs_are_told_apart_by_colour_and_dashes(browser, tmp_path):
    path = write_comparison(tmp_path / "x.html", {f"{k}.jsonl": run(30, 0.01 * k) for k in range(8)})
    with browsing.opened(browser, path) as seen:
        line = "one => { const s = getComputedStyle(one); return s.stroke + s.strokeDasharray; }"
        for scheme in browsing.SCHEMES:
            seen.page.emulate_media(color_scheme=scheme)
            looks = seen.page.locator("polyline").evaluate_all(f"all => all.map({line})")
            assert len({*looks}) == 8
        seen.shot("eight-runs-dark")


def test_a_run_that_diverges_leaves_the_picture_to_the_other_one(browser, tmp_path):
    diverged = RunLog()
    diverged.event("losses", updates=4, losses=[2.0, 1e3, 1e9, 1e20])
    with browsing.opened(browser, write_comparison(tmp_path / "x.html", {"a": run(100, 0.01), "b": diverged})) as seen:
        assert max(float(text) for text in texts(seen.page.locator("#curves text[text-anchor=end]"))) == 2.5
        assert texts(seen.page.locator("figcaption")) == ["loss; ▲▼ beyond the axis: 1000, 1.00e+9, 1.00e+20"]
        assert texts(seen.page.locator(".legend span")) == ["a 1.02", "b 1.00e+20"]


def test_the_curve_shows_the_means_that_the_verdict_names_and_one_figure_is_a_line(browser, tmp_path):
    path = write_report(tmp_path / "x.html", run(100, 0.01, 0.93))
    with browsing.opened(browser, path) as seen:
        (verdict,) = texts(seen.page.locator(".verdict"))
        named = re.findall(r"([\d.]+) \((?:mean )?of the (?:first|last) 10\)", verdict)
        assert len(named) == 2
        assert texts(seen.page.locator("#curves text.mean")) == [f"mean {text}" for text in named]
        # the first ten updates of a hundred, on an axis from 0 to 100 that is 408 wide
        first = seen.page.locator("#curves line.mean").first
        assert float(first.get_attribute("x2")) - float(first.get_attribute("x1")) == pytest.approx(0.09 * 408)
        assert "accuracy: 93% after 10 updates" in texts(seen.page.locator("#curves p"))
        assert seen.page.locator("#curves figure").count() == 1
        seen.shot("means")
