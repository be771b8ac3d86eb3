"""Test that each command line which a page prints is taken by the parser of its command, and each flag exists.

The real command runs up to the point where its parser has accepted the words; nothing is started.
"""

import argparse
import importlib.util
import re
import runpy
import shlex
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ipu_jax.base.cli.parser import CommandParser
from ipu_jax.distributed.launcher.options import PoprunParser
from support import documents

ROOT = documents.ROOT
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")} - {ROOT / "CHANGELOG.md"})
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS: dict[str, str] = PROJECT["scripts"]
SHELL = re.compile(r"^```(?:bash|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Parsed(Exception):
    """Says that a parser accepted its words."""


def command_lines(path: Path) -> list[str]:
    """Return the command lines of a page's shell blocks; those of a console block begin with "$"."""
    found: list[str] = []
    for block in SHELL.finditer(path.read_text()):
        lines = block[1].replace("\\\n", " ").splitlines()
        if block[0].startswith("```console"):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found += [line for line in lines if line and not line.startswith("#")]
    return found


def flags_in_text(path: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of ours that are named within a line's text, each with its flags."""
    found = []
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", SHELL.sub("", path.read_text())):
        name, *words = code.split()[:1] + re.findall(r"(?<![\w-])--[\w-]+", code)
        own = re.split(r"\s(?:python|run-sharded-mnist|\.venv)\b", code.removeprefix(name))[0]
        if name in SCRIPTS:
            found.append((name, [word for word in words if word in own]))
    return found


@pytest.fixture
def parsers(monkeypatch):
    """Let every parser stop the command after it has accepted its words, and return the parsers that did."""
    for name in ("signal", "set_wakeup_fd"):  # a script sets its own, which would stay with the tests
        monkeypatch.setattr(signal, name, lambda *_, **__: None)
    accepted: list[argparse.ArgumentParser] = []
    for owner, name in ((CommandParser, "parse"), (argparse.ArgumentParser, "parse_args")):
        original = getattr(owner, name)

        def stopping(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            original(self, *args, **kwargs)
            accepted.append(self)
            raise Parsed

        monkeypatch.setattr(owner, name, stopping)
    return accepted


def run(words: list[str], page: Path, monkeypatch: Any) -> None:
    """Run a command line until its parser has accepted it.

    Raises:
        AssertionError: nobody knows the command.
        SystemExit: its parser refuses it.
    """
    while ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    command = words[0].removeprefix(".venv/bin/")
    if command == "srun":
        return run(words[1:], page, monkeypatch)
    if command == "make":
        names = [word.split("=")[0] for word in words[1:] if "=" in word]
        assert {word for word in words[1:] if "=" not in word} <= TARGETS
        assert all(re.search(rf"\b{name}\b", (ROOT / "Makefile").read_text()) for name in names), names
        return None
    if command == "pip":
        install, folder = words[1:]
        extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", folder)
        assert install == "install"
        assert extras is not None, folder
        assert {*(extras[1] or "flax").split(",")} <= {*PROJECT["optional-dependencies"]}, folder
        return None
    if command in SCRIPTS:
        module = importlib.import_module(SCRIPTS[command].split(":")[0])
        with pytest.raises(Parsed):
            module.main(words[1:])
        return run(PoprunParser().split(words[1:])[1], page, monkeypatch) if command == "poprun" else None
    assert command == "python", f"{page.name} runs {command}"
    while words[1] == "-X":
        words = [words[0], *words[3:]]
    if words[1] == "-c":
        compile(words[2], page.name, "exec")
        return None
    if words[1] == "train.py":
        return _is_in_the_pages_script(words[2:], page)
    as_module = words[1] == "-m"
    monkeypatch.setattr(sys, "argv", words[2:] if as_module else words[1:])
    if as_module and words[2].startswith("examples.") and "ArgumentParser" not in _source_of(words[2]):
        return _takes_a_folder_and_updates(words)
    if as_module:
        monkeypatch.delitem(sys.modules, words[2], raising=False)  # another test may have imported it
    with pytest.raises(Parsed):
        _ = (
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            if as_module
            else runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        )
    return None


def _takes_a_folder_and_updates(words: list[str]) -> None:
    """Check the arguments of an example that has no parser: none, or a folder and the number of updates."""
    if words[3:]:
        folder, updates = words[3:]
        assert not folder.startswith("-")
        assert updates.isdigit()
        assert "sys.argv" in _source_of(words[2])


def _source_of(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    return Path(found.origin).read_text()


def _is_in_the_pages_script(words: list[str], page: Path) -> None:
    """Check the flags of `train.py`: if the page prints a script with a parser, that one has them."""
    code = "".join(documents.blocks(page, "python"))
    known = set(re.findall(r'add_argument\("(--[\w-]+)"', code))
    assert not known or {word for word in words if word.startswith("--")} <= known


LINES = [(page, line) for page in PAGES for line in command_lines(page)]


def test_pages_print_command_lines():
    assert len(LINES) > 30
    assert {line.split()[0] for _, line in LINES} >= {"poprun", "run-sharded-mnist", "make", "python"}


@pytest.mark.parametrize(
    ("page", "line"), [pytest.param(*each, id=f"{each[0].stem}-{i}") for i, each in enumerate(LINES)]
)
def test_a_printed_command_line_is_accepted(page, line, parsers, monkeypatch):
    run(shlex.split(line, comments=True), page, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_that_a_page_names_in_its_text_exist(page, parsers):
    for command, named in flags_in_text(page):
        if not named:
            continue
        module = importlib.import_module(SCRIPTS[command].split(":")[0])
        needed = {"poprun": ["true"], "run-sharded-mnist": ["--pipeline-mode", "basic"]}
        words = (needed | {"ipu-compile": ["--topology", "v5e:2x2", "train.py"]}).get(command, [])
        with pytest.raises(Parsed):
            module.main(words)
        assert set(named) <= {*parsers[-1]._option_string_actions}, f"{command}: {named}"
