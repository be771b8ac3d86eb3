"""Test that all benchmarks are run and kept in one table: figures, bounds, what is left out, what fails or hangs."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import results
import run_all
from results import Figure, Run

PROGRAM = '\nif __name__ == "__main__":\n'
# A benchmark without jax: it writes the lines that it was given where --record says.
SCRIPT = f"""
import json, os, subprocess, sys, time
LINES = {{lines!r}}
def record():
    with open(sys.argv[sys.argv.index("--record") + 1], "a") as file:
        for line in LINES:
            file.write(json.dumps(line) + chr(10))
{PROGRAM}    record()
"""


def write_script(folder: Path, name: str, *lines: dict, then: str = "", constants: str = "") -> None:
    (folder / f"{name}.py").write_text(constants + SCRIPT.format(lines=lines) + f"    {then}\n")


def figure(name: str, value: float, **bounds: float) -> dict:
    return {"name": name, "value": value, **bounds}


def figures_of(folder: Path) -> dict[str, list[tuple[str, float]]]:
    return {name: [(f.name, f.value) for f in run.figures] for name, run in results.read(folder).items()}


def run_of(*figures: Figure, **more) -> Run:
    return Run("2026-11-22 12:00", "Some CPU, 2 cores", "Python 3.11", 7.4, 0.5, 1.25, figures, **more)


def test_the_readme_asks_a_question_for_each_benchmark():
    rows = re.findall(r"^\| `(\w+)\.py` \| .*\?", (results.FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted([*run_all.scripts(results.FOLDER), "faults"])


def test_what_falls_short_fails_or_lacks_something_is_told_and_hides_nothing(tmp_path, capfd):
    write_script(tmp_path, "good", figure("cost", 1.02, at_most=1.03), figure("told", 7.0))
    write_script(tmp_path, "short", figure("speed-up", 1.5, at_least=2.0), figure("fine", 1, at_most=1))
    write_script(tmp_path, "crash", figure("before", 1.0), then="sys.exit(3)")
    write_script(tmp_path, "torchless", figure("ours", 1.0), {"left_out": "torch: not run, needs torch"})
    (tmp_path / "shared.py").write_text("raise SystemExit('no program')")
    assert run_all.main([], tmp_path) == 1
    assert capfd.readouterr().err.splitlines() == ["falls short: crash: exit status 3", "falls short: short: speed-up"]
    table = (tmp_path / "RESULTS.md").read_text()
    for row in (
        "| good | cost | 1.02 | <= 1.03 | yes |",
        "| good | told | 7 |  |  |",
        "| short | speed-up | 1.5 | >= 2 | **no** |",
        "| crash | before | 1 |  |  |",
        "| torchless | torch: not run, needs torch | not run |  |  |",
    ):
        assert row in table.splitlines()
    assert "**2 of 3 bounds hold**" in table
    (head,) = (line for line in table.splitlines() if line.startswith("| crash | 20"))
    assert head.endswith("| 0 of 0 bounds hold; exit status 3 |")
    assert run_all.versions() in table
    assert run_all.machine() in table


def test_figures_stay_until_their_script_succeeds_again_or_is_gone(tmp_path, capfd):
    write_script(tmp_path, "one", figure("a", 1.0), then="sys.exit(3)")
    write_script(tmp_path, "two", figure("b", 2.0, at_most=1.0))
    older = run_of(Figure("a", 9.0))
    kept = {name: run_of(Figure("y", 8.0)) for name in results.KEPT}  # plots show them
    results.write({"one": older, "gone": run_of(Figure("z", 9.0)), **kept}, folder=tmp_path)
    assert run_all.main(["--only", "two"], tmp_path) == 1
    assert figures_of(tmp_path) == {"one": [("a", 9.0)], "two": [("b", 2.0)], **{name: [("y", 8.0)] for name in kept}}
    capfd.readouterr()
    for _ in range(2):
        assert run_all.main(["--only", "one"], tmp_path) == 1
        assert capfd.readouterr().err == "falls short: one: exit status 3\n"  # "two" is not judged again
        kept = results.read(tmp_path)["one"]
        assert (kept.date, kept.figures) == (older.date, older.figures)
        assert re.fullmatch(r"the run of 20.*:\d\d failed \(exit status 3\), the figures are older", kept.problem)
    write_script(tmp_path, "one", figure("a", 1.0))
    (tmp_path / "four.py").write_text(PROGRAM + "    pass\n")
    assert run_all.main(["--only", "one"], tmp_path) == 0
    assert (results.read(tmp_path)["one"].problem, figures_of(tmp_path)["one"]) == ("", [("a", 1.0)])
    assert "| four |  |  |  |  |  |  | not run yet |" in (tmp_path / "RESULTS.md").read_text()


def test_a_script_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    child = "import time; time.sleep(60)"
    then = f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, file=open('{tmp_path}/child', 'w')); "
    write_script(tmp_path, "hangs", figure("first", 1.0), then=then + "sys.stdout.flush(); time.sleep(60)")
    run = run_all.measure(tmp_path / "hangs.py", limit=3.0)
    assert (run.problem, run.falls_short) == ("stopped at its limit of 3 s", True)
    assert [f.name for f in run.figures] == ["first"]
    assert_ended(int((tmp_path / "child").read_text()))


def test_whoever_ends_the_run_ends_its_script(tmp_path):
    folder, own = tmp_path / "benchmarks", tmp_path / "own"
    folder.mkdir()
    for name in ("run_all.py", "results.py"):
        shutil.copy(results.FOLDER / name, folder)
    write_script(folder, "hangs", then=f"print(os.getpid(), file=open('{own}', 'w'), flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, folder / "run_all.py"], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (own.exists() and own.read_text()):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "stopped: the scripts before have their figures in the table\n")
    assert_ended(int(own.read_text()))


def assert_ended(pid: int) -> None:
    for _ in range(200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is alive")


def test_a_script_gets_its_flags_and_its_points_are_kept(tmp_path):
    then = f"open('{tmp_path}/flags', 'w').write(json.dumps(sys.argv[1:]))"
    points = {"curve": "loss", "points": [2.0, 1.5]}
    write_script(tmp_path, "draws", figure("a", 1.0), points, then=then, constants='FLAGS = ("--full",)\n')
    run = run_all.measure(tmp_path / "draws.py")
    assert json.loads((tmp_path / "flags").read_text())[:-2] == ["--full"]
    assert (run.figures, run.curves) == ((Figure("a", 1.0),), {"loss": (2.0, 1.5)})


def test_runs_are_read_as_they_were_written(tmp_path):
    runs = {
        "a": run_of(
            Figure("x | y", 1 / 3, at_most=0.5, at_least=0.25),
            left_out=("z: not run, needs z",),
            commit="abc1234+",
            card="NVIDIA H200",
            curves={"loss": (2.0, 1.5), "other": ()},
        ),
        "b": run_of(problem="exit status 1"),
    }
    results.write(runs, folder=tmp_path)
    assert results.read(tmp_path) == runs
    table = (tmp_path / "RESULTS.md").read_text().splitlines()
    assert "| a | x \\| y | 0.333333 | >= 0.25 and <= 0.5 | yes |" in table
    of_a = "| a | 2026-11-22 12:00 | abc1234+ | A | 7 s | 0.5 | 1.2 | 1 of 1 bounds hold; z: not run, needs z |"
    assert of_a in table
    assert "| b | 2026-11-22 12:00 | unknown | B | 7 s | 0.5 | 1.2 | 0 of 0 bounds hold; exit status 1 |" in table
    assert "- A: Some CPU, 2 cores; card: NVIDIA H200; Python 3.11" in table
    assert "- B: Some CPU, 2 cores; card: unknown; Python 3.11" in table


def test_a_run_names_its_commit_and_its_card(tmp_path, monkeypatch):
    def git(*words):
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert run_all.committed(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "program.py").write_text("1")
    git("add", "program.py")
    git("commit", "-qm", "a program")
    head = git("rev-parse", "--short", "HEAD")
    assert run_all.committed(tmp_path) == head
    for name in ("benchmarks/RESULTS.md", "docs/pictures/growth.svg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("made by a run")
    assert run_all.committed(tmp_path) == head
    (tmp_path / "program.py").write_text("2")
    assert run_all.committed(tmp_path) == f"{head}+"
    monkeypatch.setattr(run_all, "committed", lambda: "abc1234")
    write_script(tmp_path, "one", figure("a", 1.0), {"card": "NVIDIA H200"})
    run = run_all.measure(tmp_path / "one.py")
    assert (run.commit, run.card, run.figures) == ("abc1234", "NVIDIA H200", (Figure("a", 1.0),))
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert run_all.committed(tmp_path) == "", "there is no git"


def test_the_table_is_made_of_the_results_that_lie_beside_it(tmp_path):
    runs = results.read()
    assert runs
    results.write(runs, not_run=run_all.scripts(results.FOLDER).keys() - runs.keys(), folder=tmp_path)
    for name in (results.DATA, results.TABLE):
        assert (tmp_path / name).read_text() == (results.FOLDER / name).read_text()
    for script, run in runs.items():
        assert re.fullmatch(r"[0-9a-f]{7,}\+?", run.commit), f"{script} ran at no commit"
        assert run.card, script
        names = [figure.name for figure in run.figures]
        assert len(names) == len(set(names)), script
