"""Share one browser between the tests of a process. They are skipped where there is none."""

from collections.abc import Iterator
from typing import Any

import pytest

from support import browsing


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = browsing.chromium()
    if path is None:
        pytest.skip("needs Chromium or Chrome: install one, such as Debian's package chromium, or name it in CHROMIUM")
    with browsing.started(path) as found:
        yield found
