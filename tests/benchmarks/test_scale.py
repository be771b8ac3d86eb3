"""Test the closed forms of the scale tables against simulated ones, and that the document shows what is printed."""

import pytest

from ipu_jax import SCHEDULES, make_schedule
from scale import bubble, messages, messages_of, stash, table
from support import documents


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_forms_are_those_of_the_tables(name):
    s, m = 8, 24  # neither of the multiples that the script checks
    schedule = make_schedule(name, ipus=s, micro_batches=m)
    run = schedule.simulate(forward=1, backward=2, weight=1)
    assert messages_of(schedule) == messages(name, m)
    assert max(run.peak_stash) * s / len(schedule.placement) == stash(name, s, m)
    if name == "zbv":
        assert bubble(name, s, m) <= run.bubble <= bubble(name, s, m) + 0.03
    else:
        assert run.bubble == pytest.approx(bubble(name, s, m))


def test_the_document_shows_the_tables():
    text = (documents.ROOT / "docs/scale.md").read_text().splitlines()
    assert [line for line in text if line.startswith("|")] == [line for line in table() if line]
