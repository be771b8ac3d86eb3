"""Test runs side by side: what differs, which figure is the best, and a page that loads nothing."""

import json
import re
from typing import Any

import pytest

from ipu_jax.observe import RunLog, write_comparison
from ipu_jax.run.observe.runs.comparison import ComparedRow, SideBySide
from ipu_jax.run.observe.runs.digest import Digest
from support.refusals import refusals, refused

EVIL = "</script><script>alert(1)</script> <!--TABLE-->"


def events(lr: float, ipus: int, losses: list[float], accuracy: float, speed: float, *others: dict[str, Any]) -> Any:
    start = {"event": "start", "flags": {"lr": lr, "epochs": 3, "ipus": ipus}, "defaults": {"epochs": 3}}
    return [
        start | {"model": "mlp", "ipus": ipus, "command": ["train", str(lr)], "time": f"2026-05-0{ipus}"},
        {"event": "losses", "updates": len(losses), "losses": losses, "samples_per_second": speed},
        {"event": "evaluated", "updates": len(losses), "accuracy": accuracy, "errors": ipus},
        *others,
    ]


RUNS = {
    "a": events(0.1, 1, [2.0, 1.0, 0.5], 0.9, 100.0, {"event": "end"}),
    "b": events(0.2, 2, [2.0, 0.25], 0.8, 300.0, {"event": "skipped", "count": 2}),  # killed
    "c": events(0.1, 1, [2.0, 1.5, 1.0, 0.5], 0.9, 200.0, {"event": "failed", "error": "disk full"}),
}


def side_by_side(*names: str) -> SideBySide:
    return SideBySide({name: Digest(RUNS[name]) for name in names or RUNS})


def test_only_what_differs_is_in_the_table_and_the_rest_is_counted():
    found = side_by_side()
    assert found.differing["flags"] == [ComparedRow("lr", ("0.1", "0.2", "0.1"))]
    # neither the command, which the flags say, nor the start; the flag ipus is there once
    assert found.differing["what was run"] == [ComparedRow("IPUs of a replica", ("1", "2", "1"))]
    assert found.alike == {"flags": {"epochs": "3"}, "what was run": {"model": "mlp"}}
    assert side_by_side("a", "c").differing["flags"] == []
    without = SideBySide({name: Digest([{"event": "start", "command": ["train", name]}]) for name in "ab"})
    assert without.differing["what was run"] == [ComparedRow("command", ("train a", "train b"))]


def test_the_best_figure_is_marked_where_one_is_better():
    killed = "! The log has no end: the run is still going, or it was killed."
    assert side_by_side().differing["figures"] == [
        ComparedRow("verdict", ("✓ Finished.", killed, "✗ Failed: disk full")),
        ComparedRow("updates", ("3", "2", "4")),
        ComparedRow("accuracy", ("90.00%", "80.00%", "90.00%"), frozenset({0, 2})),
        ComparedRow("errors", ("1", "2", "1")),
        ComparedRow("last loss", ("0.5", "0.25", "0.5"), frozenset({1})),
        ComparedRow("samples per second", ("100 (median)", "300 (median)", "200 (median)"), frozenset({1})),
        ComparedRow("skipped", ("0", "2", "0")),
    ]
    alike = {row.name: row for row in side_by_side("a", "c").differing["figures"]}
    assert not alike["last loss"].best
    assert "skipped" not in alike


def test_a_terminal_gets_the_same_rows_and_no_commands():
    lines = str(side_by_side("a", "b")).splitlines()
    assert [line.split() for line in lines[:3]] == [["a", "b"], ["flags"], ["lr", "0.1", "0.2"]]
    assert "  (1 alike)" in lines
    assert re.search(r"^  last loss +0.5 +0.25 \*$", "\n".join(lines), re.MULTILINE)
    assert lines[-1] == "* the best"
    evil = SideBySide({name: Digest([{"event": "end", "reason": name}]) for name in ("x\x1b]0;t\x07", "y")})
    assert "\x1b" not in str(evil)


def test_the_page_is_one_file_with_the_curves_of_each_run_and_no_text_becomes_code(tmp_path):
    one = [RUNS["a"][0] | {"flags": {"lr": EVIL, EVIL: 1, "epochs": 3}}, *RUNS["a"][1:]]
    text = write_comparison(tmp_path / "x.html", {"1": one, EVIL: RUNS["b"], "0": RUNS["c"]}, title=EVIL).read_text()
    assert text.count("<script") == 2
    assert "alert(1)</script>" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    runs = json.loads(data)["runs"]
    assert [run["name"] for run in runs] == ["1", EVIL, "0"]  # in their order
    assert runs[1]["curves"]["loss"] == [[1, 2.0], [2, 0.25]]
    assert "<b>0.25</b>" in text
    assert "<b>0.5</b>" not in text
    assert "<summary>flags: 1 alike</summary>" in text


def test_a_log_that_is_still_written_is_read_and_left_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as written:
        written.event("losses", updates=1, losses=[2.0])
        with path.open("ab") as file:
            file.write(b'{"event": "lo')  # half of the next line
        before = path.read_bytes()
        read = RunLog.read(path)
        assert [event["event"] for event in read.events] == ["losses"]
        write_comparison(tmp_path / "x.html", {"now": read, "a": RUNS["a"]})
        assert path.read_bytes() == before


def compared(at: Any, runs: Any = RUNS, path: str = "x.html", **others: Any) -> None:
    write_comparison(at / path, runs, **others)


@refusals(
    (lambda at: compared(at, path="x.pdf"), "x.pdf", "is not an HTML file", "ends in .html"),
    (lambda at: compared(at, [RUNS["a"]]), "runs=list", "by the names of the runs", "RunLog.read"),
    (lambda at: compared(at, {1: RUNS["a"]}), "runs=dict", "by the names of the runs"),
    (lambda at: compared(at, {"a": "a.jsonl"}), "runs=dict", "RunLog.read"),
    (lambda at: compared(at, title=3), "title=int", "give a text"),
    (lambda at: compared(at, {"a": RUNS["a"]}), "1 run", "give two or more"),
    (lambda at: compared(at, {str(k): RUNS["a"] for k in range(9)}), "9 runs", "the 8 that", "leave some out"),
    (lambda at: compared(at, {"a": RUNS["a"], "b": RunLog()}), "b has no events", "leave it out"),
    (lambda at: RunLog.read(at / "none.jsonl"), "none.jsonl is not a file", "give the log of a run"),
    (lambda at: RunLog.read(at), "is a folder", "give a file"),
)
def test_what_cannot_be_compared_is_refused_and_nothing_is_written(tmp_path, call, holds):
    with refused(*holds):
        call(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_no_log_is_left_alone(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<html>")
    with pytest.raises(ValueError, match=rf"{path} is not the log of a run, see line 1: give another file$"):
        RunLog.read(path)
    assert path.read_text() == "<html>"
