"""Run the Python code of a document as a reader would, and compare its output with the output that is shown.

A document is a file of Markdown, or a notebook, which is read as Markdown. The blocks run in order, as one program in a
fresh process and an empty folder. The last digits of figures differ between machines and versions, so figures are
compared with a tolerance. A loss at the end of a training run differs the most.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from docs.website.hooks import as_markdown

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?|\d+%")
_LEAF = re.compile(r" at params(\[[^\]]*\]|\.\w+)*")
_RELATIVE = 0.02  # of the larger figure: a page may show the figures of either version
_RELATIVE_BYTES = 0.15  # for figures that depend on XLA's version
_ROUNDING = 1e-5  # relative errors below this are rounding errors, of any size


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of one language."""
    return [code for found, code in _BLOCK.findall(_text_of(path)) if found == language]


def run(
    path: Path, then: str = "", *, compile_fast: bool = False, saved_as: str = "", python: Path | None = None
) -> str:
    """Return the output of the document's Python, followed by the output of the code `then`. Warnings are errors.

    The process sets up its own devices. It compiles as users' programs do, unless `compile_fast` gives it the flags of
    the tests, which change no result. The program is pasted into Python, or is a file, if `saved_as` names one. With
    `python`, that one runs it, with the packages of its environment and not with this checkout's; it may warn.

    Raises:
        AssertionError: the program fails; the message is its stderr.
    """
    of_tests = ("JAX_NUM_CPU_DEVICES",) if compile_fast else ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    alone = {name: value for name, value in os.environ.items() if name not in of_tests}
    if python is None:
        alone["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    else:
        alone.pop("PYTHONPATH", None)
    program = "".join([*blocks(path, "python"), then])
    with tempfile.TemporaryDirectory() as folder:
        if saved_as:
            (Path(folder) / saved_as).write_text(program)
        words = [python] if python else [sys.executable, "-W", "error"]
        words += [saved_as] if saved_as else ["-c", program]
        done = subprocess.run(words, cwd=folder, env=alone, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(module: ModuleType, *arguments: str) -> str:
    """Return what an example prints as a script. Warnings are errors."""
    command = [sys.executable, "-W", "error", "-m", module.__name__, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def shown_output(path: Path) -> list[str]:
    """Return the text blocks right after a Python block, which show the block's output."""
    text = _text_of(path)
    shown, code_ends = [], None
    for block in _BLOCK.finditer(text):
        if block[1] == "text" and code_ends is not None and not text[code_ends : block.start()].strip():
            shown.append(block[2])
        code_ends = block.end() if block[1] == "python" else None
    return shown


def assert_shown(path: Path, printed: str) -> None:
    """Check that a text has what the document shows, in this order; which leaf has the largest error is not promised.

    Raises:
        AssertionError: it has not.
    """
    rest = _LEAF.sub("", printed)
    for shown in shown_output(path):
        end = where_shown(_LEAF.sub("", shown), rest)
        assert end is not None, f"{path.name} shows\n{shown}\nbut prints\n{printed}"
        rest = rest[end:]


def _text_of(path: Path) -> str:
    return as_markdown(path) if path.suffix == ".ipynb" else path.read_text()


def where_shown(shown: str, printed: str) -> int | None:
    """Return the position in the printed text at which the shown text ends; None if it does not occur.

    Text and whole numbers must be the same. Fractions must be close, percentages within a point, megabytes within 15%,
    and errors like 1.2e-07 must be rounding errors in both texts.
    """
    words = _NUMBER.split(shown)
    numbers = _NUMBER.findall(shown)
    pattern = re.compile(f"({_NUMBER.pattern})".join(map(re.escape, words)))
    for found in pattern.finditer(printed):
        if all(map(_is_near, numbers, found.groups(), words[1:])):
            return found.end()
    return None


def _is_near(shown: str, printed: str, behind: str) -> bool:
    """Return whether two numbers are close. The text after them decides which tolerance applies."""
    if shown.endswith("%") or printed.endswith("%"):
        return shown[-1:] == printed[-1:] and abs(int(shown[:-1]) - int(printed[:-1])) <= 1
    wanted, value = float(shown), float(printed)
    if "e" in shown or "e" in printed:
        return max(wanted, value) <= _ROUNDING
    relative = _RELATIVE_BYTES if behind.startswith(" MB") else _RELATIVE
    return abs(value - wanted) <= relative * max(abs(value), abs(wanted))
