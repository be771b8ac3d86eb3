"""Share one browser between the tests of a process. They are skipped where there is none."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from support import browsing

_open = contextlib.ExitStack()


@pytest.fixture(scope="session")
def started_once() -> tuple[Any, asyncio.AbstractEventLoop]:
    path = browsing.chromium()
    if path is None:
        pytest.skip(browsing.MISSING)
    started = _open.enter_context(browsing.started(path))
    loop = asyncio.get_running_loop()  # Playwright's, which waits inside of its calls and ends with the browser
    _open.callback(asyncio._set_running_loop, loop)
    return started, loop


@pytest.fixture
def browser(started_once) -> Iterator[Any]:
    started, loop = started_once
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)  # a test that comes next may want to run one of its own


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End the browser after the last test, which would be charged for all of its CPU time."""
    _open.close()
