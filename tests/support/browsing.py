"""Open pages in the machine's own Chromium, hear what they say and load, and look at them.

    open_page --> Page, at a width, in light or dark --> its console, its requests, a screenshot

Pages are opened as files, as most people open a report. Playwright drives the browser; it brings none along here.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

SHOTS: Final = Path(__file__).parents[1] / "browser" / "screenshots"
"""Where each test leaves a picture of what it saw, for whoever changes a page. Git ignores it."""

WIDTHS: Final = (1280, 500)  # a laptop, and a telephone held across
MISSING: Final = "needs Chromium or Chrome: install one, such as Debian's package chromium, or name it in CHROMIUM"
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")

_FLAGS: Final = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium() -> str | None:
    """Return the path of the machine's Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def started(path: str) -> Iterator[Any]:
    """Start a browser, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # root may not use Chromium's sandbox; the pages are ours
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()


@dataclasses.dataclass
class Seen:
    """Hold an open page, what it wrote to the console, and what it loaded from elsewhere.

    Attributes:
        page: playwright's.
        console: lines on the console, and errors that nothing caught.
        requests: the addresses that it asked for, besides files.
    """

    page: Any
    console: list[str]
    requests: list[str]

    def shot(self, name: str) -> Path:
        """Save a picture of the whole page."""
        SHOTS.mkdir(exist_ok=True)
        path = SHOTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path


@contextlib.contextmanager
def opened(
    browser: Any, path: Path | str, *, width: int = 1280, scheme: str = "light", **context: Any
) -> Iterator[Seen]:
    """Open a page, and close it again.

    Args:
        browser: of `started`.
        path: of the file, or an address.
        width: of the window, in CSS pixels.
        scheme: "light" or "dark".
        context: for playwright's `new_context`, such as `has_touch=True`.
    """
    room = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **context)
    seen = Seen(room.new_page(), [], [])
    seen.page.on("console", lambda message: seen.console.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.console.append(f"error: {error}"))
    local = ("file:", "data:", "blob:")
    seen.page.on("request", lambda one: None if one.url.startswith(local) else seen.requests.append(one.url))
    try:
        seen.page.goto(path.resolve().as_uri() if isinstance(path, Path) else path)
        yield seen
    finally:
        room.close()
