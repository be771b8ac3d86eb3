"""Test `ipu-report`: the page of one log, of several, and logs that it refuses and leaves alone."""

import os

import pytest

from ipu_jax.observe import RunLog
from ipu_jax.run.observe.runs import command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working folder, with two logs in folders of their own, one of a killed run."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("x", "y"), 1):
        (tmp_path / name).mkdir()
        with RunLog(tmp_path / name / "log.jsonl") as log:
            log.event("start", flags={"lr": number / 10, "seed": 3})
            log.event("losses", updates=2, losses=[2.0, 1.0 / number])
            if name == "x":
                log.event("end")
    return tmp_path


def test_one_log_gives_the_page_about_its_run(folder, capsys):
    assert command.main(["y/log.jsonl", "-o", "y.html"]) == 0
    said, where = capsys.readouterr().out.splitlines()
    assert said == "The log has no end: the run is still going, or it was killed. The loss fell from 2 to 0.5."
    assert where == "the page is y.html"
    assert "<h1>log.jsonl</h1>" in (folder / "y.html").read_text()


def test_several_logs_give_one_page_and_the_table_of_what_differs(folder, capsys):
    before = [(folder / name / "log.jsonl").read_bytes() for name in "xy"]
    (folder / "report.html").write_text("an older page")
    assert command.main(["x/log.jsonl", "y/log.jsonl"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [["x", "y"], ["flags"], ["lr", "0.1", "0.2"], ["what", "was", "run"]]
    assert ["last", "loss", "1", "0.5", "*"] in lines
    assert lines[-1] == ["the", "page", "is", "report.html"]
    assert "<h1>2 runs: x, y</h1>" in (folder / "report.html").read_text()
    assert [(folder / name / "log.jsonl").read_bytes() for name in "xy"] == before


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err


def test_logs_that_make_no_page_are_refused_in_a_line_and_left_alone(folder, capsys):
    (folder / "empty.jsonl").touch()
    (folder / "half.jsonl").write_text('{"event": "sta')
    (folder / "page.jsonl").write_text("<html>")
    (folder / "link.jsonl").symlink_to("x/log.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    log = "x/log.jsonl"
    for given, says in {
        "empty.jsonl": "empty.jsonl has no events, so nothing is known of this run yet: leave it out",
        "half.jsonl": "half.jsonl has no events",
        "page.jsonl": "page.jsonl is not the log of a run, see line 1: give another file",
        "none.jsonl": "log none.jsonl is not a file: give the log of a run",
        "pipe.jsonl": "log pipe.jsonl is not a file",
        "x": "log x is a folder: give a file",
        "./x/log.jsonl": "is given twice: name each log once",
        "link.jsonl": "is given twice",
    }.items():
        assert says in refused([log, given], capsys)
    for number in range(9):
        (folder / f"{number}.jsonl").write_bytes((folder / log).read_bytes())
    assert "9 runs are more than the 8" in refused([f"{number}.jsonl" for number in range(9)], capsys)
    assert not (folder / "report.html").exists()
    assert (folder / "half.jsonl").read_text() == '{"event": "sta'


def test_a_page_that_cannot_be_written_gives_status_74_after_the_table(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "check_file", lambda *_: None)  # it was there when the command began
    assert command.main(["x/log.jsonl", "y/log.jsonl", "-o", "gone/a.html"]) == 74
    out, err = capsys.readouterr()
    assert "last loss" in out
    assert err == "ipu-report: gone/a.html was not written (No such file or directory)\n"
