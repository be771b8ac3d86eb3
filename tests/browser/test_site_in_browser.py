"""Test the documentation's site in a browser: what people see of it, opened as files."""

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from support import browsing, documents
from support.built_site import ADDRESS, built_site

LONGEST = "the reference's longest"
PAGES = (
    *("index.html", "tutorials/function.html", "tutorials/notebook.html", LONGEST),
    *("gallery.html", "measured.html", "coming-from/poptorch.html", "watching.html"),
)

# The longest line of code that is wider than its frame. A printed sentence may wrap there, and a printed table may not.
_CUT = """() => [...document.querySelectorAll('pre > code')].flatMap(code => {
  const wraps = getComputedStyle(code).whiteSpace == 'pre-wrap';
  code.style.whiteSpace = 'pre';
  if (code.scrollWidth <= code.clientWidth) return [];
  const lines = code.textContent.split('\\n').sort((one, other) => other.length - one.length);
  return wraps ? lines.filter(line => line.length > 120 && / {2}/.test(line.trim())) : lines.slice(0, 1);
})"""

# Elements that reach over the right edge, and are in no frame that scrolls.
_WIDE = """() => [...document.querySelectorAll('.md-content *')].filter(element => {
  const reaches = one => one.getBoundingClientRect().right > innerWidth + 1;
  if (!reaches(element)) return false;
  for (let frame = element.parentElement; frame; frame = frame.parentElement)
    if (/auto|scroll/.test(getComputedStyle(frame).overflowX) && !reaches(frame)) return false;
  return true;
}).map(element => element.outerHTML.slice(0, 100))"""

_SCHEME = "() => document.body.dataset.mdColorScheme"
_FILTERS = """() => [...document.querySelectorAll('.md-content img')].map(
  image => [image.src.endsWith('.png') ? 'screen' : 'drawn', getComputedStyle(image).filter])"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory)


def faint(page: Any) -> list[str]:
    """Return the texts without enough contrast to their ground, by WCAG AA."""
    found = Axe().run(page, options={"runOnly": ["color-contrast"], "resultTypes": ["violations"]}).response
    nodes = [node for rule in found["violations"] for node in rule["nodes"]]
    return [f"{node['html'][:80]}: {node['any'][0]['message']}" for node in nodes]


def switch(page: Any) -> None:
    """Change between light and dark, as a reader does, without the theme's fading."""
    page.add_style_tag(content="* { transition: none !important }")
    before = page.evaluate(_SCHEME)
    page.click("label[for^=__palette]:visible")
    page.wait_for_function(f"({_SCHEME})() != '{before}'")


def test_no_line_of_code_is_cut_on_any_page(browser: Any, site: Path):
    cut: dict[str, list[str]] = {}
    with browsing.opened(browser, site / "index.html", java_script_enabled=False) as seen:
        for path in site.rglob("*.html"):
            seen.page.goto(path.as_uri())
            cut[path.relative_to(site).as_posix()] = seen.page.evaluate(_CUT)
    assert len(cut) > 50
    assert {name: lines for name, lines in cut.items() if lines} == {}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_can_be_read_in_light_and_dark(browser: Any, site: Path, name: str):
    path = site / name
    if name == LONGEST:
        path = max((site / "reference").glob("*.html"), key=lambda path: path.stat().st_size)
    with browsing.opened(browser, path) as seen:
        assert seen.page.evaluate(_SCHEME) == "default"
        for width in browsing.WIDTHS:
            seen.page.set_viewport_size({"width": width, "height": 800})
            assert seen.page.evaluate("() => document.documentElement.scrollWidth") <= width
            assert seen.page.evaluate(_WIDE) == []
            if width == browsing.WIDTHS[0]:
                assert faint(seen.page) == []
            seen.shot(f"site-{path.stem}-{width}")
        seen.page.set_viewport_size({"width": browsing.WIDTHS[0], "height": 800})
        switch(seen.page)
        assert seen.page.evaluate(_SCHEME) == "slate"
        assert faint(seen.page) == []
        seen.shot(f"site-{path.stem}-dark")
        assert (seen.console, seen.requests) == ([], [])


def test_drawn_pictures_are_dark_with_the_page_and_screens_are_as_they_were(browser: Any, site: Path):
    filters = lambda: {tuple(found) for found in seen.page.evaluate(_FILTERS)}
    with browsing.opened(browser, site / "watching.html", scheme="dark") as seen:
        assert seen.page.evaluate(_SCHEME) == "slate"
        assert filters() == {("drawn", "invert(1) hue-rotate(180deg)"), ("screen", "none")}
        switch(seen.page)
        assert filters() == {("drawn", "none"), ("screen", "none")}
        seen.page.reload()
        assert seen.page.evaluate(_SCHEME) == "default"  # a reader's choice is kept


def test_the_search_finds_without_a_server(browser: Any, site: Path):
    with browsing.opened(browser, site / "tutorials/gpt.html") as seen:
        seen.page.click(".md-search__input")
        seen.page.keyboard.type("learning rate")
        first = seen.page.locator(".md-search-result__item").first
        first.wait_for()
        assert "learning rate" in first.inner_text().lower()
        seen.page.screenshot(path=browsing.SHOTS / "site-search.png")
        assert (seen.console, seen.requests) == ([], [])


def test_the_site_leads_home_and_each_page_to_its_file(browser: Any, site: Path):
    with browsing.opened(browser, site / "tutorials/notebook.html") as seen:
        assert seen.page.get_attribute(".md-header .md-source", "href") == ADDRESS
        source = seen.page.get_attribute(".md-content__button", "href")
        assert source == f"{ADDRESS}/raw/HEAD/docs/tutorials/notebook.ipynb"
        notebook = site / "tutorials" / seen.page.get_attribute("a[download]", "href")
        assert notebook.read_text() == (documents.ROOT / "docs/tutorials/notebook.ipynb").read_text()
