"""Test the page of a run: one file that loads nothing, whatever the texts in it are, and small however long the run."""

import dataclasses
import json
import re

import pytest

from ipu_jax.core.schedules import make_schedule
from ipu_jax.run.observe.runs.report import page, write_report
from ipu_jax.run.observe.tracing.timeline import Slice, Step, Timeline

EVIL = "</script><script>alert(1)</script>&amp; \"quoted\" 'text' <!--CSS-->"
EVENTS = [
    {"event": "start", "time": "2026-05-04T10:00:00.000+00:00", "flags": {"name": EVIL}, "versions": {"jax": EVIL}},
    {"event": "losses", "updates": 2, "losses": [2.0, 1.0]},
    {"event": "end", "time": "2026-05-04T10:00:01.000+00:00", "reason": EVIL},
]


def timeline(steps=2, micro_batches=3):
    slices = [
        Slice(0, 0, ipu, step, "F", f"{ipu}F{m}", 1e-3 * (step * 100 + m), 1e-3 * (step * 100 + m) + 5e-4)
        for ipu in range(2)
        for step in range(steps)
        for m in range(micro_batches)
    ]
    made = tuple(Step(0, 0, ipu, step, 0.1 * step, 0.1 * step + 0.1) for ipu in range(2) for step in range(steps))
    schedule = make_schedule("grouped", ipus=2, micro_batches=4)
    return Timeline(schedule, ("a", EVIL), True, made, tuple(slices), plan=tuple(slices[:3]), clocks=EVIL)


def data_in(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    return json.loads(found)


def test_the_page_loads_nothing_and_no_text_of_a_run_becomes_code():
    svg = make_schedule("grouped", ipus=2, micro_batches=4).to_svg()
    text = page(EVENTS, title=EVIL, schedules={EVIL: svg}, timeline=timeline(), memory={"ipus": [{EVIL: 3}]})
    assert text.count("<script") == 2
    assert "alert(1)</script>" not in text
    linked = re.findall(r"""(?:src|href|url\()\s*=?\s*["']?([^"'\s)>]+)""", text)
    assert [link for link in linked if not link.startswith("#")] == []
    elsewhere = set(re.findall(r"https?://[^\s\"'<>]+", text))
    # the names of namespaces, which nobody fetches
    assert elsewhere <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.findall(r"<!--[A-Z]+-->", re.sub(re.escape("&lt;!--CSS--&gt;"), "", text))


def test_the_page_has_what_it_was_given():
    found = data_in(page(EVENTS, timeline=timeline(), memory={"limit": 8, "limit_of": "x", "ipus": [{"weights": 5}]}))
    assert found["curves"]["loss"] == [[1, 2.0], [2, 1.0]]
    assert found["memory"] == {"limit": 8, "limit_of": "x", "ipus": [{"weights": 5}]}
    shown = found["timeline"]
    assert (shown["steps"], shown["of"]) == (2, 2)
    assert [row["label"] for row in shown["rows"]] == ["plan, IPU 0", "IPU 0", "IPU 1"]
    assert shown["rows"][1]["slices"][:2] == [["F", "0F0", 0, 500], ["F", "0F1", 1000, 500]]  # microseconds
    assert data_in(page([]))["timeline"] is None


def test_the_page_says_which_device_of_a_group_it_shows():
    of_groups = dataclasses.replace(timeline(), clocks="one instance", devices=2)
    shown = data_in(page(EVENTS, timeline=of_groups))["timeline"]["clocks"]
    assert shown == "one instance; each IPU is 2 devices, shown by the first"


def test_a_long_run_is_still_less_than_a_megabyte():
    many = [{"event": "losses", "updates": 100 * k, "losses": [1 / 3] * 100} for k in range(1, 1001)]
    text = page([*EVENTS[:1], *many], timeline=timeline(steps=4, micro_batches=2500))
    assert len(text.encode()) < 1_000_000
    found = data_in(text)
    assert len(found["curves"]["loss"]) == 1000
    assert (found["timeline"]["steps"], found["timeline"]["of"]) == (1, 4)


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "run.html"
    write_report(path, EVENTS)
    before = path.read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html"]
    with pytest.raises(OSError, match="No such file"):
        write_report(tmp_path / "missing" / "run.html", EVENTS)
    assert write_report(path, [], title="Another") == path
    assert path.read_text() != before
