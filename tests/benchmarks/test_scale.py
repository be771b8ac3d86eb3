"""Test the closed forms of the scale tables against simulated ones, and that the document shows what is printed."""

import pytest

from ipu_jax import make_schedule
from ipu_jax.schedules import SCHEDULES
from scale import bubble, messages, messages_of, stash, table
from support import documents


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_forms_are_those_of_the_tables(name):
    s, m = 8, 24  # neither of the multiples that the script checks
    schedule = make_schedule(name, ipus=s, gradient_accumulation=m)
    run = schedule.simulate(forward=1, backward=2, weight=1)
    assert messages_of(schedule) == messages(name, m)
    assert max(run.peak_stash) * s / len(schedule.placement) == stash(name, s, m)
    if name == "zbv":
        assert bubble(name, s, m) <= run.bubble <= bubble(name, s, m) + 0.03
    else:
        assert run.bubble == pytest.approx(bubble(name, s, m))


def test_the_document_shows_the_tables():
    page = (documents.ROOT / "docs/measured.md").read_text()
    tables = "\n".join(table()).strip().split("\n\n")
    assert len(tables) == 3
    assert [shown for shown in tables if f"\n\n{shown}\n\n" not in page] == []
    for shown in tables:  # schedules with the same figures share a line
        assert sorted(
            name for line in shown.splitlines()[2:] for name in line.split(" | ")[0][2:].split(", ")
        ) == sorted(SCHEDULES)
