"""Runs the python of a document as a reader would: its blocks, in order, as one program in a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|\d+%")


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of one language."""
    return [code for found, code in _BLOCK.findall(path.read_text()) if found == language]


def run(path: Path) -> str:
    """What the document's python prints. Warnings are errors; the process sets up its own devices.

    Raises:
        AssertionError: it fails; with what it wrote to stderr.
    """
    alone = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    code = "".join(blocks(path, "python"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown_output(path: Path) -> list[str]:
    """The text blocks right behind a python block: what the document says that it prints."""
    text = path.read_text()
    shown, code_ends = [], None
    for block in _BLOCK.finditer(text):
        if block[1] == "text" and code_ends is not None and not text[code_ends : block.start()].strip():
            shown.append(block[2])
        code_ends = block.end() if block[1] == "python" else None
    return shown


def without_numbers(text: str) -> str:
    """Fractions and percentages as #, since they differ between machines in their last digits."""
    return _NUMBER.sub("#", text)
