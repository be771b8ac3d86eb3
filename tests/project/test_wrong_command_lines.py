"""Test the command lines of `wrong_command_lines.txt`: status 2 and one line that names the flag and the mend.

All are tried in this process, with the function removed by which each command first uses jax. One of each command is
also tried as a process, which must need less than two seconds.
"""

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import ipu_jax
from ipu_jax.distributed import poprun
from ipu_jax.run.observe import info
from ipu_jax.run.observe.monitor import command
from ipu_jax.run.observe.runs import command as report
from ipu_jax.tools import self_test, sharded_embedding_tool, sharded_matmul_tool
from mnist_example import benchmark_dataset, data, run_sharded_mnist, training

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "m": ("run-sharded-mnist", run_sharded_mnist),
    "b": ("benchmark-dataset", benchmark_dataset),
    "e": ("sharded-embedding-tool", sharded_embedding_tool),
    "x": ("sharded-matmul-tool", sharded_matmul_tool),
    "p": ("python -m ipu_jax", self_test),
    "r": ("poprun", poprun),
    "w": ("ipu-monitor", command),
    "i": ("ipu-info", info),
    "o": ("ipu-report", report),
}
MODULES = dict(COMMANDS.values())
ALWAYS = {"M": "--pipeline-mode concurrent --synthetic-data ", "B": "--synthetic-data "}


class Line(NamedTuple):
    program: str
    arguments: list[str]
    names: str
    mend: str


def read_lines() -> list[Line]:
    lines: list[Line] = []
    for row in Path(__file__).with_name("wrong_command_lines.txt").read_text().splitlines():
        if row and not row.startswith("#"):
            typed, names, mend = (part.strip() for part in row.split(" | "))
            letter, _, rest = typed.partition(" ")
            program, _ = COMMANDS[letter.lower()]
            lines.append(Line(program, shlex.split(ALWAYS.get(letter, "") + rest), names, mend))
    return lines


LINES = read_lines()


def assert_refused(line: Line, status: object, out: str, err: str) -> None:
    what = (line.program, line.arguments, err)
    assert status == 2, what
    assert err.count("\n") == 1, what
    assert err.startswith(f"{line.program}: "), what
    assert line.names in err, what
    assert line.mend in err[err.index(line.names) + len(line.names) :], what
    assert ("did you mean" in err) == ("did you mean" in line.mend), what  # a wrong hint is worse than none
    assert out == "", what


def test_there_are_300_of_them_over_all_commands():
    assert len(LINES) >= 300
    assert len({(line.program, *line.arguments) for line in LINES}) == len(LINES)
    assert {line.program for line in LINES} == set(MODULES)


@pytest.fixture
def no_jax(monkeypatch, tmp_path):
    """Remove what each command first calls of jax, and the training, and work in an empty folder."""
    monkeypatch.setattr(ipu_jax, "configure", None)
    monkeypatch.setattr(training.TrainingRun, "run", None)
    digits = data.synthetic_mnist(0)  # takes a while, and is the same for each seed here
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: digits)
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def refusal_of(program, arguments, capsys):
    """Return status, stdout and stderr of a command that exits."""
    with pytest.raises(SystemExit) as stopped:
        MODULES[program].main(arguments)
    return stopped.value.code, *capsys.readouterr()


def test_every_line_is_refused_before_jax_is_used(no_jax, capsys, tmp_path):
    for line in LINES:
        assert_refused(line, *refusal_of(line.program, line.arguments, capsys))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", MODULES)
def test_help_is_printed_before_jax_is_used(program, no_jax, capsys):
    status, out, err = refusal_of(program, ["--help"], capsys)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: {program} ")


def assert_refused_by_a_process(line: Line, folder: Path) -> None:
    command = [sys.executable, "-m", MODULES[line.program].__name__, *line.arguments]
    if line.program == "python -m ipu_jax":
        command[2] = "ipu_jax"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("MNIST_DIR", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert_refused(line, done.returncode, done.stdout, done.stderr)
    # not the time on the wall: other tests share the cores
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, line


@pytest.mark.fast("run-sharded-mnist", "sharded-matmul-tool", "ipu-info")
@pytest.mark.parametrize("program", MODULES)
def test_a_process_refuses_the_first_line_of_each_command_within_two_seconds(program, tmp_path):
    assert_refused_by_a_process(next(line for line in LINES if line.program == program), tmp_path)


# pictures

COMPARE = "--synthetic-data --compare --gradient-accumulation 5"


def test_a_picture_that_cannot_be_drawn_is_refused_before_training(no_jax, capsys, tmp_path):
    (tmp_path / "folder.png").mkdir()
    found = refusal_of("run-sharded-mnist", [*COMPARE.split(), "--plot", "folder.png"], capsys)
    line = "run-sharded-mnist: --plot folder.png cannot be written to (Is a directory): give another file\n"
    assert found == (2, "", line)
    status, _, line = refusal_of("run-sharded-mnist", [*COMPARE.split(), "--plot", "a\0b"], capsys)
    assert (status, line) == (
        2,
        "run-sharded-mnist: argument --plot: 'a\\x00b' is not a path: give one that is not empty\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_picture_that_is_there_is_left_alone_until_it_is_drawn(capsys, tmp_path, monkeypatch):
    jax.devices()  # the backend runs with 8 IPUs: more cannot be made
    monkeypatch.setattr(training.TrainingRun, "run", None)
    picture = tmp_path / "old.png"
    picture.write_bytes(b"drawn before")
    arguments = [*COMPARE.split(), "--plot", str(picture), "--ipus", "9"]
    assert refusal_of("run-sharded-mnist", arguments, capsys)[0] == 2
    assert picture.read_bytes() == b"drawn before"
