"""Test that the calls in the text of pages run: in docs/coming-from/ as they are printed, elsewhere as shorthand."""

from pathlib import Path

import pytest

from support import documents

COMING_FROM = sorted((documents.ROOT / "docs/coming-from").glob("*.md"))
OTHERS = sorted({*documents.ROOT.glob("docs/**/*.md")} - {*COMING_FROM})
OTHERS += [documents.ROOT / "README.md", documents.ROOT / "examples/README.md"]


def ran(program: Path, pages: list[Path], *, compares: bool) -> int:
    """Run the fragments of pages after a page's program, and return how many ran."""
    names = [str(page.relative_to(documents.ROOT)) for page in pages]
    then = f"\nfrom support import fragments\nfragments.check(globals(), {names}, {compares=})\n"
    return int(documents.run(program, then=then, compile_fast=True).split()[-3])


@pytest.mark.slow
@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_our_cells_run_as_printed(page: Path):
    assert ran(page, [page], compares=True) > 10


@pytest.mark.slow
def test_calls_in_the_text_of_other_pages_are_shorthand_for_calls_that_run(tmp_path: Path):
    (tmp_path / "none.md").touch()
    assert ran(tmp_path / "none.md", OTHERS, compares=False) > 100
