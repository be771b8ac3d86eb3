"""The python of every tutorial and guide runs as it stands, block by block, and prints what it shows."""

from pathlib import Path

import documents
import pytest

TUTORIALS = sorted((documents.ROOT / "docs/tutorials").glob("*.md"))
GUIDES = [documents.ROOT / "docs/sharded-ops.md"]


def test_there_are_tutorials():
    assert TUTORIALS


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(path: Path):
    _runs_and_prints_what_it_shows(path)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_runs_and_prints_what_it_shows(path: Path):
    _runs_and_prints_what_it_shows(path)


def _runs_and_prints_what_it_shows(path: Path):
    printed = documents.without_numbers(documents.run(path))
    rest = printed
    for shown in map(documents.without_numbers, documents.shown_output(path)):
        assert shown in rest, f"{path.name} shows\n{shown}\nbut prints\n{printed}"
        rest = rest[rest.index(shown) + len(shown) :]


def test_shown_output_is_what_stands_right_behind_code(tmp_path: Path):
    path = tmp_path / "some.md"
    path.write_text("```text\na drawing\n```\n```python\nprint(1)\n```\n\n```text\n1\n```\nwords\n```text\n2\n```\n")
    assert documents.shown_output(path) == ["1\n"]
    assert documents.blocks(path, "python") == ["print(1)\n"]


def test_only_fractions_and_percentages_may_differ():
    assert (
        documents.without_numbers("update 7: loss 2.31, error 1.2e-07, 40% idle") == "update 7: loss #, error #, # idle"
    )
