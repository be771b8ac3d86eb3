"""Test that `make venv` works in any folder, with a Python that only pretends to install."""

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# `-m venv --clear .venv` makes a folder whose Python is this script again; everything else it says and does is nothing.
PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip install"*) echo "$*" >> installed ;;
    *works*) echo works ;;
    *--version*) echo Python 3.99 ;;
esac
"""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def put_into(checkout: Path, python: str) -> Path:
    """Put what `make venv` reads into a folder, and a Python, which is returned."""
    checkout.mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    (checkout / python).write_text(PYTHON)
    (checkout / python).chmod(0o755)
    return checkout / python


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("folder", ["plain", "it's", "two words", "it's a 'quoted' folder", 'a "double" one', "a\\nb"])
def test_make_venv_works_in_a_folder_of_any_name_and_only_once(folder, tmp_path):
    checkout = tmp_path / folder
    python = put_into(checkout, "my python's")
    command, said = ["make", "venv", f"PYTHON={python}"], []
    for _ in range(2):
        done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    assert said[0].startswith("Setting up .venv with Python 3.99")
    assert "Setting up" not in said[1]
    (line,) = (checkout / "installed").read_text().splitlines()
    assert "--quiet" in line, "a log has one line per phase"
    assert (checkout / ".venv/.installed").read_text() == f"{checkout}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_venv_shows_the_progress_of_pip_on_a_terminal(tmp_path):
    python = put_into(tmp_path, "python")
    terminal, of_make = pty.openpty()
    words = ["make", "venv", f"PYTHON={python}"]
    subprocess.run(words, cwd=tmp_path, env=environment(), stdout=of_make, timeout=60, check=True)
    os.close(of_make)
    shown = os.read(terminal, 4096).decode()
    os.close(terminal)
    assert "Setting up" in shown
    assert "Installing" in shown
    assert "--quiet" not in (tmp_path / "installed").read_text()
