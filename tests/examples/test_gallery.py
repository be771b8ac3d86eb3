"""Test that the programs of the gallery print what its page shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support import documents

PAGE = (documents.ROOT / "docs/gallery.md").read_text()
COMMANDS = re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)^```$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[" ".join(found[0].split()[:3]) for found in COMMANDS])
def test_a_program_prints_what_the_page_shows(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(documents.ROOT))
    program, *words = shlex.split(command)
    modules = {"python": [], "run-sharded-mnist": ["-m", "mnist_example"]}[program]
    done = subprocess.run([sys.executable, *modules, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(float(error) < 1e-6 for error in re.findall(r"relative error (\d\S*?)(?:;| at )", done.stdout))
    rest = done.stdout
    for line in shown.splitlines():
        end = documents.where_shown(line, rest)
        assert end is not None, f"{command} does not print\n{line}\nbut\n{done.stdout}"
        rest = rest[end:]
