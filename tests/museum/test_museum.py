"""Test that each fault of docs/museum.md is silent, that a call finds it, and that the page says which."""

import re
import time

import numpy as np
import pytest

from museum.exhibits import EXHIBITS, PAGE, Exhibit

SECONDS = 5.0  # of CPU time, to find a fault


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_a_fault_is_silent_and_is_found(exhibit: Exhibit, monkeypatch: pytest.MonkeyPatch):
    made = exhibit.model()
    exhibit.look(made)
    right = exhibit.losses(made)
    begun = time.process_time()
    exhibit.install(monkeypatch)
    made = exhibit.model()
    losses = exhibit.losses(made)
    if losses:
        assert (losses[0] == pytest.approx(right[0], 1e-5)) == (exhibit.loss != "falls")
        assert exhibit.loss == "first" or all(np.diff(losses) < 0), losses
    with pytest.raises((AssertionError, ValueError)) as raised:
        exhibit.look(made)
    pattern = ".*".join(map(re.escape, exhibit.says.split(" ... ")))
    assert re.search(pattern, str(raised.value), re.DOTALL), raised.value
    seconds = time.process_time() - begun
    print(f"{exhibit.name}: {seconds:.1f} s of CPU time")
    assert seconds <= SECONDS


def test_the_page_has_a_row_for_each_exhibit():
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines() if "|" in line]
    found = [(re.findall(r"\((https:[^)]*)\)", first), by, says) for first, _, _, by, says in cells[2:]]
    url = lambda thread: f"https://github.com/{thread.replace('#', '/issues/')}"
    by = {"verify": "`verify`", "recipe": "[the recipe](#the-update)", "Feed": "`Feed`"}
    expected = [([*map(url, one.threads)], by[one.found_by], f"`{one.says}`") for one in EXHIBITS]
    assert found == expected
    assert len(EXHIBITS) == 15
