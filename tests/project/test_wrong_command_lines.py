"""Test what wrong values say: each ends with status 2 and its one line, the same for every flag of its kind."""

import os

import jax
import pytest

from ipu_jax.tools import sharded_embedding_tool, sharded_matmul_tool, split_matmul, tied_embedding
from mnist_example import benchmark_dataset, data, run_sharded_mnist, training
from mnist_example.data import synthetic_mnist

TRAIN = "--pipeline-mode concurrent --synthetic-data --batch-size 4 --gradient-accumulation 5"
READ = "--synthetic-data --batch-size 4 --gradient-accumulation 5"
WORKERS = "--async-dataloader"

PROGRAMS = {
    "run-sharded-mnist": run_sharded_mnist.main,
    "benchmark-dataset": benchmark_dataset.main,
    "sharded-embedding-tool": sharded_embedding_tool.main,
    "sharded-matmul-tool": sharded_matmul_tool.main,
}
NO_COUNTS = ("-1", "0", "nan", "inf", "1e400", "", " ", "1.5")
NO_NUMBERS = ("-1", "0", "-0", "nan", "inf", "-inf", "1e400", "1e-400", "", " ", "True")
HUGE = "99999999999999999999"

COUNT = "{} is not a count: give a whole number of at least 1"
POSITIVE = "{} is not a positive number: give one such as 0.01"
PATH = "{} is no path: give one that is not empty"
UNKNOWN = "unrecognized arguments: more: every value needs a flag before it; --help lists them"
WHOLE = "{} is not a whole number of at least 1"
LARGE = "{} is too large: give {} at most"


def cases():
    """(program, arguments, line) without the program's name; {} in a line stands for the value."""
    both = (("run-sharded-mnist", TRAIN), ("benchmark-dataset", READ))
    for program, rest in both:
        # most of the parser is common, so one program is tested with all lines, the other with a sample
        counts = NO_COUNTS if program == "run-sharded-mnist" else NO_COUNTS[:2]
        for flag in ("--ipus", "--replicas", "--batch-size", "--num-workers"):
            for value in counts:
                yield (
                    program,
                    [*rest.split(), WORKERS, f"{flag}={value}"],
                    f"argument {flag}: {COUNT.format(repr(value))}",
                )
        for value in NO_NUMBERS if program == "run-sharded-mnist" else NO_NUMBERS[:3]:
            for flag in ("--epochs", "--learning-rate"):
                yield program, [*rest.split(), f"{flag}={value}"], f"argument {flag}: {POSITIVE.format(repr(value))}"
        # float32 can represent neither: the step would be infinite, or zero
        for value in ("1e39", "1e300", "1e-39"):
            yield (
                program,
                [*rest.split(), "--learning-rate", value],
                f"argument --learning-rate: {POSITIVE.format(repr(value))}",
            )
        for value in ("1e300", HUGE, "1000001"):
            line = f"--epochs {float(value):g} would never end: give 1000000 at most"
            yield program, [*rest.split(), "--epochs", value], line
        for value in ("1025", HUGE):
            line = f"--num-workers {value} are more threads than help: give 1024 at most"
            yield program, [*rest.split(), WORKERS, "--num-workers", value], line
        for value in ("-1", "4294967296", "1.0", "nan", ""):
            line = f"argument --seed: {value!r} is not a seed: give a whole number from 0 to 4294967295"
            yield program, [*rest.split(), f"--seed={value}"], line
        for flag in ("--plot", "--executable-cache"):
            for value in ("", "a\0b"):
                yield program, [*rest.split(), f"{flag}={value}"], f"argument {flag}: {PATH.format(repr(value))}"
        yield program, ["--data-dir", ""], f"argument --data-dir: {PATH.format(repr(''))}"
        yield program, [*rest.split(), "more"], UNKNOWN
        line = "argument --epochs: expected one argument: give one as --epochs=VALUE, or see --help"
        yield program, [*rest.split(), "--epochs"], line
    sizes = {
        "sharded-embedding-tool": ("--ipus", "--vocab-size", "--feature-size", "--sequence-length"),
        "sharded-matmul-tool": ("--ipus", "--rows", "--cols", "--outsize"),
    }
    for program, flags in sizes.items():
        for flag in flags:
            for value in NO_COUNTS:
                yield program, [f"{flag}={value}"], f"argument {flag}: {WHOLE.format(repr(value))}"
            for value in (HUGE, "2147483648"):
                most = 1024 if flag == "--ipus" else 2147483647
                yield program, [flag, value], f"argument {flag}: {LARGE.format(repr(value), most)}"
        yield program, ["more"], UNKNOWN


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Remove everything that runs after flags and data are checked, so that a test fails if it is called."""
    jax.devices()  # the backend runs with 8 IPUs: more cannot be made
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 103, 25))
    monkeypatch.setattr(training.Training, "run", None)
    monkeypatch.setattr(training, "read", None)
    monkeypatch.setattr(tied_embedding, "run_pipeline", None)
    monkeypatch.setattr(split_matmul, "sharded_program", None)


def line_of(program, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        PROGRAMS[program](arguments)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"{program}: ")
    return err.removeprefix(f"{program}: ").removesuffix("\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wrong_command_line_is_refused_in_one_line(program, capsys):
    table = [(arguments, line) for of, arguments, line in cases() if of == program]
    assert len(table) >= 30
    for arguments, line in table:
        assert line_of(program, arguments, capsys) == line, arguments


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        ("folder.png", "Is a directory"),
        (f"{'x' * 300}.png", "File name too long"),
        pytest.param(
            "/proc/x.png",
            "No such file or directory",
            marks=pytest.mark.skipif(
                not os.path.isdir("/proc/self"), reason="a folder that not even root can write to"
            ),
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_training(picture, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    line = line_of("run-sharded-mnist", [*TRAIN.split(), "--compare", "--plot", picture], capsys)
    assert line == f"--plot {picture} cannot be written to ({reason}): give another file"
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_picture_that_is_there_is_left_alone_until_it_is_drawn(capsys, tmp_path):
    picture = tmp_path / "old.png"
    picture.write_bytes(b"drawn before")
    line_of("run-sharded-mnist", [*TRAIN.split(), "--compare", "--plot", str(picture), "--ipus", "9"], capsys)
    assert picture.read_bytes() == b"drawn before"
