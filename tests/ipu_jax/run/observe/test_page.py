"""Test the page of a run: one file that loads nothing, whatever the texts in it are, and small however long the run."""

import collections
import dataclasses
import html
import json
import re
import tempfile
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from ipu_jax.core.analysis.at_peak import Alive, Peak
from ipu_jax.core.schedules import make_schedule
from ipu_jax.run.observe.runs.page import memory_of, write_report
from ipu_jax.run.observe.tracing._assembling import planned
from ipu_jax.run.observe.tracing.timeline import Slice, Step, Timeline
from ipu_jax.run.observe.tracing.trace_report import Costs, make_report
from support.refusals import refusals, refused

EVIL = "</script><script>alert(1)</script>&amp; \"quoted\" 'text' <!--CSS-->"
EVENTS = [
    {"event": "start", "time": "2026-05-04T10:00:00.000+00:00", "flags": {"name": EVIL}, "versions": {"jax": EVIL}},
    {"event": "losses", "updates": 2, "losses": [2.0, 1.0]},
    {"event": "end", "time": "2026-05-04T10:00:01.000+00:00", "reason": EVIL},
]


def page(events, **given):
    with tempfile.TemporaryDirectory() as folder:
        return write_report(Path(folder) / "run.html", events, **given).read_text("utf-8")


def timeline(steps=2, micro_batches=3):
    slices = [
        Slice(0, 0, ipu, step, "F", f"{ipu}F{m}", 1e-3 * (step * 100 + m), 1e-3 * (step * 100 + m) + 5e-4)
        for ipu in range(2)
        for step in range(steps)
        for m in range(micro_batches)
    ]
    made = tuple(Step(0, 0, ipu, step, 0.1 * step, 0.1 * step + 0.1) for ipu in range(2) for step in range(steps))
    schedule = make_schedule("grouped", ipus=2, gradient_accumulation=4)
    return Timeline(schedule, ("a", EVIL), True, made, tuple(slices), plan=tuple(slices[:3]), clocks=EVIL)


def waiting_timeline():
    """Return a step in which IPU 0 works for 8 of 10 ms; IPU 1's head waits for 7 of its 8 ms."""
    of = lambda ipu, kind, name, start, end, stages=(): Slice(
        0, 0, ipu, 0, kind, name, start / 1e3, end / 1e3, 0, stages, 0 if stages else None
    )
    slices = [
        of(0, "F", "0F0", 1, 3, (0,)),
        of(0, "B", "0B0", 4, 9, (0,)),
        of(0, "FB", "1F0 1B0", 3, 4, (1,)),
        of(0, "update", "update", 9, 10),
        of(1, "FB", "1F0 1B0", 1, 9, (1,)),
        of(1, "collective", "all-reduce", 1.5, 8.5),
        of(1, "update", "update", 9, 10),
    ]
    steps = tuple(Step(0, 0, ipu, 0, 0.0, 0.01) for ipu in range(2))
    schedule = make_schedule("1f1b", placement=(0, None), ipus=2, gradient_accumulation=1)
    return Timeline(schedule, ("body", "head"), True, steps, tuple(slices), planned(schedule, COSTS, steps, slices))


bytes_of: Any = memory_of
COSTS: Costs = {((0,), "F"): 2e-3, ((0,), "B"): 5e-3, ((1,), "FB"): 1e-3}


def test_waiting_is_drawn_as_waiting():
    shown = data_in(page([], timeline=waiting_timeline()))["timeline"]
    rows = {row["label"]: row["slices"] for row in shown["rows"]}
    assert rows["IPU 1"] == [
        ["other", "other", 0, 10_000],
        ["all FB", "1F0 1B0", 1000, 8000, [0, 0, 1]],  # step, micro-batch, stage
        ["waiting", "waiting, all-reduce", 1500, 7000],
        ["update", "update", 9000, 1000],
    ]
    # in the plan IPU 1 waits for all but its half of the head, which is one task of both IPUs
    assert rows["plan, IPU 1"][0] == ["waiting", "waiting, planned", 1000, 8000]
    assert [(kind, length) for kind, _, _, length, _ in rows["plan, IPU 1"][1:]] == [("all FB", 1000)]
    assert {name for name, look in shown["kinds"].items() if not look["colours"]} == {"waiting", "other"}
    used = {kind for slices in rows.values() for kind, *_ in slices}
    assert used <= shown["kinds"].keys()


def test_the_table_under_the_verdict_is_the_one_of_the_terminal():
    timeline = waiting_timeline()
    text = page([], timeline=timeline)
    printed = [line.split() for line in str(make_report(timeline)).splitlines()[2:4]]
    in_page = re.findall(r"<tr><td>IPU (\d)</td>.*?</div></td>(.*?)</tr>", text)
    cells = [[ipu, *re.findall(r"<td>(.*?)</td>", row)] for ipu, row in in_page]
    assert [" ".join(row).split() for row in cells] == [row[1:] for row in printed]
    assert cells[1][1:5] == ["1.00 ms", "7.00 ms", "1.00 ms", "1.00 ms"]  # busy, waiting, update, other
    widths = re.findall(r"width:([\d.]+)%;", re.findall(r"<td>IPU 1</td>.*?</tr>", text)[0])
    assert list(map(float, widths)) == [10, 70, 10, 10]
    assert text.index("class='verdict") < text.index("class='time'") < text.index('id="curves"')


def test_a_page_has_one_bubble():
    timeline = waiting_timeline()
    text = page([], timeline=timeline, schedules={"by ticks": timeline.schedule})
    (title,) = re.findall(r"bubble ([\d.]+)%</text>", text)
    ((measured, planned_bubble),) = re.findall(r"<dd>(\d+)% \(planned (\d+)%\)</dd>", text)
    # IPU 0 is busy in 8 of 8 ms and IPU 1 in 1 of them, in the plan and as measured: 7 of 16
    assert (planned_bubble, measured, title) == ("44", "44", "43.8")
    assert "by ticks" in page([], schedules={"by ticks": timeline.schedule})


def test_the_bytes_of_an_ipu_have_the_optimizers_state_and_the_limit():
    by_kind = lambda ipu: {"weights": 100, "padding": 800 * ipu}
    at_peak = lambda ipu: Peak(ipu, 3 + ipu, (Alive("weights", (), "", 100), Alive(EVIL, (0, 1), "tanh", 9 + 5 * ipu)))
    needs = [IpuNeeds(0), IpuNeeds(1)]
    report: Any = types.SimpleNamespace(ipus=needs, bytes_by_kind=by_kind, at_peak=at_peak, limit=None)
    state: Any = types.SimpleNamespace(optimizer=[jnp.zeros(3, jnp.float32)])
    found = memory_of(report, state)
    peaks = found.pop("peaks")
    assert [[one.nbytes for one in peak.alive] for peak in peaks] == [[100, 12, 9], [100, 14, 12]]
    text = page([], memory={**found, "peaks": peaks})
    folds = re.findall(r"<details( open)?><summary>(IPU.*?)</summary>.*?</details>", text, flags=re.S)
    assert folds == [("", "IPU 0, in tick 3: 121 B in use"), (" open", "IPU 1, in tick 4: 126 B in use")]
    assert re.findall(r"<td>(.*?)</td>", text[text.index("IPU 1, in") :])[4:8] == [
        html.escape(EVIL),
        "0, 1",
        "tanh",
        "14 B",
    ]
    assert found == {
        "ipus": [{"weights": 100, "padding": 0, "optimizer": 12}, {"weights": 100, "padding": 800, "optimizer": 12}],
        "limit": None,
    }


IpuNeeds = collections.namedtuple("IpuNeeds", "ipu")


def data_in(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    return json.loads(found)


def test_the_page_loads_nothing_and_no_text_of_a_run_becomes_code():
    svg = make_schedule("grouped", ipus=2, gradient_accumulation=4).to_svg()
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
    found = data_in(page(EVENTS, timeline=timeline(), memory={"limit": 8, "ipus": [{"weights": 5}]}))
    assert found["curves"]["loss"] == [[1, 2.0], [2, 1.0]]
    assert {**found["memory"], "colours": 0} == {"limit": 8, "ipus": [{"weights": 5}], "colours": 0}
    shown = found["timeline"]
    assert (shown["steps"], shown["of"]) == (2, 2)
    assert [row["label"] for row in shown["rows"]] == ["plan, IPU 0", "IPU 0", "plan, IPU 1", "IPU 1"]
    # microseconds; each step lies under its tasks
    assert shown["rows"][1]["slices"] == [
        *(["other", "other", 100_000 * step, 100_000] for step in range(2)),
        *(["F", f"0F{m}", 100_000 * step + 1000 * m, 500] for step in range(2) for m in range(3)),
    ]
    assert data_in(page([]))["timeline"] is None


def test_the_page_says_which_device_of_a_group_it_shows():
    of_groups = dataclasses.replace(timeline(), clocks="one instance", devices=2)
    shown = data_in(page(EVENTS, timeline=of_groups))["timeline"]["clocks"]
    assert shown == "one instance; each IPU is 2 devices, shown by the first"


@pytest.mark.slow
def test_a_long_run_is_still_less_than_a_megabyte():
    many = [{"event": "losses", "updates": 100 * k, "losses": [1 / 3] * 100} for k in range(1, 1001)]
    text = page([*EVENTS[:1], *many], timeline=timeline(steps=4, micro_batches=2500))
    assert len(text.encode()) < 1_000_000
    found = data_in(text)
    assert 900 < len(found["curves"]["loss"]) <= 1000
    assert (found["timeline"]["steps"], found["timeline"]["of"]) == (1, 4)


@refusals(
    (lambda at: page_of(at, path=EVENTS), "path='list'", "is not an HTML file", "a name that ends in .html"),
    (lambda at: write_report(at / "run", EVENTS), "run' is not an HTML file", "a name that ends in .html"),
    (lambda at: page_of(at, at / "run.jsonl"), "events=PosixPath", "RunLog(path) of a file"),
    (lambda at: page_of(at, [1]), "events=list", "give a RunLog"),
    (lambda at: page_of(at, title=3), "title=int", "give a text"),
    (lambda at: page_of(at, timeline=make_report(timeline())), "timeline=TraceReport", "give recording.timeline"),
    (lambda at: page_of(at, memory={"weights": 3}), "memory=dict", "give memory_of(report, state)"),
    (lambda at: page_of(at, schedules=timeline().schedule), "schedules=Schedule", "them by title, such as"),
    (lambda at: page_of(at, schedules={"a": 3}), "schedules=dict", "them by title, such as"),
    (lambda at: bytes_of(EVENTS, timeline()), "memory_of(list, Timeline)", "give pipeline.report(...)"),
)
def test_what_a_page_cannot_be_made_of_is_refused_and_nothing_is_written(tmp_path, call, holds):
    with refused(*holds):
        call(tmp_path)
    assert not [*tmp_path.iterdir()]


def page_of(at: Any, events: Any = EVENTS, path: Any = None, **others: Any):
    write_report(path or at / "run.html", events, **others)


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "run.html"
    write_report(path, EVENTS)
    before = path.read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html"]
    with pytest.raises(OSError, match="No such file"):
        write_report(tmp_path / "missing" / "run.html", EVENTS)
    assert write_report(path, [], title="Another") == path
    assert path.read_text() != before
