"""Test that the document shows the scale tables; test_smallest compares their closed forms with simulated ones."""

from ipu_jax.schedules import SCHEDULES
from scale import table
from support import documents


def test_the_document_shows_the_tables():
    page = (documents.ROOT / "docs/measured.md").read_text()
    tables = "\n".join(table()).strip().split("\n\n")
    assert len(tables) == 3
    assert [shown for shown in tables if f"\n\n{shown}\n\n" not in page] == []
    for shown in tables:  # schedules with the same figures share a line
        assert sorted(
            name for line in shown.splitlines()[2:] for name in line.split(" | ")[0][2:].split(", ")
        ) == sorted(SCHEDULES)
