"""Run a notebook's cells in order in a fresh process, and keep in the file what Jupyter would show below them.

That is what a cell prints, the value of its last line as HTML, SVG or text, and the figures of matplotlib. Jupyter is
not needed, and nothing in the file says when or where it ran.
"""

import ast
import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_SHOWS: Final = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_", "text/plain": "__repr__"}


def execute(notebook: Path, folder: Path) -> None:
    """Run a notebook in a folder, where it may write files, and store its outputs.

    Raises:
        subprocess.CalledProcessError: a cell failed; its error was printed, and the file is as it was.
    """
    copy = shutil.copy(notebook, folder)
    subprocess.run([sys.executable, Path(__file__).resolve(), notebook.name], cwd=folder, check=True)
    shutil.copy(copy, notebook)


def _run(notebook: Path) -> None:
    contents, names = json.loads(notebook.read_text()), {"__name__": "__main__"}
    of_code = [cell for cell in contents["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(of_code, start=1):
        cell |= {"execution_count": count, "metadata": {}}
        cell["outputs"] = outputs_of("".join(cell["source"]), names, count)
    notebook.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")


def outputs_of(source: str, names: dict[str, Any], count: int = 1) -> list[dict[str, Any]]:
    """Run a cell, which changes `names`, and return its outputs.

    >>> [shown] = outputs_of("x = 1\\nx", {})
    >>> shown["output_type"], shown["data"]
    ('execute_result', {'text/plain': ['1']})
    >>> outputs_of("print(1)\\nNone", {})
    [{'name': 'stdout', 'output_type': 'stream', 'text': ['1\\n']}]
    """
    program, printed, value = ast.parse(source), io.StringIO(), None
    last = program.body.pop() if program.body and isinstance(program.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    text = printed.getvalue().splitlines(keepends=True)
    outputs: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    if value is not None and not source.rstrip().endswith(";"):
        outputs.append({"execution_count": count, "output_type": "execute_result", **_shown(value)})
    return outputs + _figures()


def _shown(value: Any) -> dict[str, Any]:
    data = {kind: getattr(value, method)() for kind, method in _SHOWS.items() if hasattr(value, method)}
    return {"data": {kind: text.splitlines(keepends=True) for kind, text in data.items()}, "metadata": {}}


def _figures() -> list[dict[str, Any]]:
    """Return the figures that a cell made with pyplot, as SVG, and close them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    from ipu_jax.core.schedules.figures import svg_of

    found = [svg_of(plt.figure(number)).splitlines(keepends=True) for number in plt.get_fignums()]
    plt.close("all")
    return [{"data": {"image/svg+xml": svg}, "metadata": {}, "output_type": "display_data"} for svg in found]


if __name__ == "__main__":
    sys.argv = sys.argv[1:]  # a log names the notebook
    _run(Path(sys.argv[0]))
