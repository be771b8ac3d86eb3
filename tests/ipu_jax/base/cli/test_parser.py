"""Test what a parser prints: versions, and errors that name flags as they were typed."""

import platform
import re

import jax
import numpy as np
import pytest

import ipu_jax
from ipu_jax.base.cli.parser import CommandParser, path, whole_number
from ipu_jax.tools import comparison
from ipu_jax.tools.comparison import check_memory


@pytest.fixture
def parser():
    called = {"micro_batches": "--count", "lr": "--rate"}
    hints = {"momentum nesterov": "--rate is all there is"}
    parser = CommandParser("command", "Does nothing.", called=called, hints=hints)
    parser.add_argument("--count", "--number-of-things", type=whole_number(1, 99), default=3)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--switch", action="store_true")
    return parser


def line_of(act, capsys):
    with pytest.raises(SystemExit) as stopped:
        act()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("command: ")
    assert err.count("\n") == 1
    return err.removeprefix("command: ").removesuffix("\n")


def test_versions_are_those_of_the_packages(parser, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser.parse(["--version"])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"command {ipu_jax.__version__} (jax {jax.__version__}, jaxlib ")
    assert f"numpy {np.__version__}, " in out
    assert out.endswith(f"Python {platform.python_version()})\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--count", "0"], "argument --count: '0' is not a whole number of at least 1"),
        (["--count=100"], "argument --count: '100' is too large: give 99 at most"),
        (["--number-of-things", "0"], "argument --number-of-things: '0' is not a whole number of at least 1"),
        (["--number-of-things=x"], "argument --number-of-things: 'x' is not a whole number of at least 1"),
        (["--count", 5000 * "9"], f"argument --count: '{25 * '9'}...{25 * '9'}' is not a whole number of at least 1"),
        (["--switch=1"], "argument --switch: takes no value: leave '1' out"),
        (
            ["--number-of-things"],
            "argument --number-of-things: expected one argument: give one as --number-of-things=VALUE, or see --help",
        ),
        (["--siwtch"], "unrecognized arguments: --siwtch: did you mean --switch? --help lists all flags"),
        (["--batch", "3"], "unrecognized arguments: --batch 3: did you mean --batch-size? --help lists all flags"),
        (["-x\n"], "unrecognized arguments: -x : --help lists all flags"),
        (["--no-switch"], "unrecognized arguments: --no-switch: --help lists all flags"),
        (["--size", "3"], "unrecognized arguments: --size 3: did you mean --batch-size? --help lists all flags"),
        (["--Nesterov"], "unrecognized arguments: --Nesterov: --rate is all there is; --help lists all flags"),
        (["--lr", "0.1"], "unrecognized arguments: --lr 0.1: --help lists all flags"),  # no flag of this parser
        (["--micro-batches", "0"], "argument --micro-batches: '0' is not a whole number of at least 1"),
        (["--micro-batches=3"], None),
        (["--"], None),
    ],
)
def test_an_error_names_the_flag_that_was_typed_and_the_mend(argv, line, parser, capsys):
    if line is None:
        assert parser.parse(argv).count == 3
    else:
        assert line_of(lambda: parser.parse(argv), capsys) == line


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "--batch-size 8 x --count 3 has a choice='x': A_B=1, unknown_name=2"),
        (["--number-of-things", "3"], "--batch-size 8 x --number-of-things 3 has a choice='x': A_B=1, unknown_name=2"),
    ],
)
def test_an_error_of_the_library_names_the_flags(argv, line, parser, capsys):
    parser.parse(argv)
    error = ValueError("batch_size=8 x micro_batches=3\nhas a choice='x': A_B=1, unknown_name=2")
    assert line_of(lambda: parser.refuse(error), capsys) == line


def test_help_lists_a_flag_once_and_keeps_examples_as_they_are(capsys):
    about = "Adds\nup.\n\n  command --count 3\n  command --count 4\n"
    parser = CommandParser("command", about, called={"n": "--count"}, brief=True)
    parser.add_argument("--count", type=int, metavar="N", help="how many; of each. Or of all (default: 3)")
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parser.parse([flag])
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert text.startswith("usage: command [flags]\n\nAdds up.\n\n  command --count 3\n  command --count 4\n\n")
    assert re.search(r"--count N +how many \(default: 3\)\n", texts[0])
    assert "--n" not in texts[0]
    assert re.search(r"--count N +how many; of each. Or of all \(default: 3\)\n", texts[1])
    assert texts[1].endswith("\nAlso understood: --n for --count.\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "the following arguments are required: --where, file: give them as --help shows"),
        (["f", "--sise", "3"], "the following arguments are required: --where: give them as --help shows"),
        (["--were", "x", "f"], "unrecognized arguments: --were: did you mean --where? --help lists all flags"),
    ],
)
def test_what_is_required_may_be_there_under_a_wrong_name(argv, line, capsys):
    parser = CommandParser("command", "Does nothing.")
    parser.add_argument("--where", required=True)
    parser.add_argument("file")
    parser.add_argument("rest", nargs="...", metavar="...")
    assert line_of(lambda: parser.parse(argv), capsys) == line


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert [str(path(text)) for text in ("~/digits", "a/~", "~")] == ["/home/me/digits", "a/~", "/home/me"]


def test_the_memory_of_the_machine_or_its_container_is_the_limit(tmp_path, monkeypatch):

    check_memory(1, "--rows 1")
    for text, there in (("1000000000\n", "1 GB"), ("max\n", None)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(comparison, "_OF_CONTAINER", tmp_path / "memory.max")
        with pytest.raises(ValueError, match=r"^--rows 7 need 1,000,000,000 GB or more, and this machine has") as error:
            check_memory(1e18, "--rows 7")
        assert there is None or f"this machine has {there} of memory" in str(error.value)
