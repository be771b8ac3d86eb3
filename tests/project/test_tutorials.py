"""Test that the Python code of every tutorial and guide runs unchanged, block by block, and prints what it shows."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_jax.run.ahead.compilers import folder_of
from support import documents

DOCS = documents.ROOT / "docs"
NOTEBOOK = DOCS / "tutorials/notebook.ipynb"
TUTORIALS = [*sorted((DOCS / "tutorials").glob("*.md")), NOTEBOOK]
GUIDES = [DOCS / f"{name}.md" for name in ("sharded-ops", "instances", "weights", "checkpoints", "watching", "museum")]
OTHERS = [DOCS / f"{name}.md" for name in ("index", "concepts", "architecture", "design/engine", "training", "how-to")]
CHIPS = DOCS / "chips.md"
COMING_FROM = sorted((DOCS / "coming-from").glob("*.md"))  # run by test_fragments.py, with their cells


@pytest.mark.fast("engine")
@pytest.mark.parametrize(
    "path",
    [
        *(*TUTORIALS, *OTHERS, *GUIDES),
        pytest.param(CHIPS, marks=pytest.mark.skipif(not folder_of("tpu"), reason="XLA's compiler: make aot")),
    ],
    ids=lambda path: path.stem,
)
def test_a_page_runs_and_prints_what_it_shows(path: Path):
    documents.assert_shown(path, documents.run(path))


def test_every_page_with_code_is_run():
    """`python` marks what is run; `py` is code of another library, whose name is in its first line and in the title."""
    pages = [path for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")]
    with_code = {path for path in pages if documents.blocks(path, "python")}
    assert with_code == {*TUTORIALS, *GUIDES, *OTHERS, *COMING_FROM, CHIPS}
    for path in documents.ROOT.rglob("*.md"):
        is_installed = path.relative_to(documents.ROOT).parts[0].startswith(".venv")
        for code in () if is_installed else documents.blocks(path, "py"):
            library = re.match(r".*# (\w+)", code)
            assert library, path
            assert library[1] in path.read_text().splitlines()[0], path


def test_pages_hide_no_code():
    """A reader who pastes the page has what it prints, and nothing else."""
    for path in documents.ROOT.glob("docs/**/*.md"):
        assert not re.search(r"<!--\s*python", path.read_text()), path


@pytest.mark.slow
def test_the_notebook_shows_the_schedule_that_its_code_makes():
    labels = re.compile(r"<title>.*?</title>|<text [^>]*>.*?</text>")
    texts = lambda svg: [re.sub("<[^>]*>", "", label) for label in labels.findall(svg)]
    [stored] = [
        "".join(output["data"]["text/html"])
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    drawn = documents.run(NOTEBOOK, "print(pipeline._repr_html_())\n")
    assert len(texts(stored)) > 50
    assert texts(stored) == texts(drawn)
    assert re.findall("<td.*?</td>", stored) == re.findall("<td.*?</td>", drawn)
    assert ("<pattern" in stored) == ("<pattern" in drawn), "one of them hatches what is idle"


def test_the_notebook_is_small_and_shows_no_path():
    text = NOTEBOOK.read_text()
    assert len(text) < 150_000
    assert len(json.loads(text)["cells"]) <= 15
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/|\d s, |samples/s", text)


@pytest.mark.slow
def test_each_answer_of_how_to_runs_after_the_model_alone(tmp_path: Path):
    model, *answers = re.split(r"^###? ", (DOCS / "how-to.md").read_text(), flags=re.MULTILINE)
    (tmp_path / "model.md").write_text(model)
    programs = []
    for answer in answers:
        (tmp_path / "answer.md").write_text(answer)
        programs += ["".join(documents.blocks(tmp_path / "answer.md", "python"))]
    then = f"\nmodel = dict(globals())\nfor program in {programs}:\n    exec(program, dict(model))\n"
    documents.run(tmp_path / "model.md", then=then, compile_fast=True)
    assert len(list(filter(None, programs))) > 8


@pytest.mark.slow
def test_the_script_for_a_laptop_and_a_cluster_runs_by_the_commands_below_it(tmp_path: Path):
    page = DOCS / "instances.md"
    (tmp_path / "train.py").write_text("".join(documents.blocks(page, "python")))
    on_a_laptop = [shlex.split(line, comments=True) for line in documents.blocks(page, "bash")[0].splitlines()]
    starts = {"python": [sys.executable], "poprun": [sys.executable, "-m", "ipu_jax.distributed.poprun"]}
    alone = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    printed = []
    for line in on_a_laptop:
        words = [word for part in line for word in starts.get(part, [part])]
        environment = alone | {"PYTHONPATH": str(documents.ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        printed += re.findall(r"(\d+) cpu devices, (\d+) replicas: loss .*\n.*verified: True", done.stdout)
    assert printed == [("2", "1"), ("8", "2"), ("4", "2")]


def test_shown_output_is_what_stands_right_behind_code(tmp_path: Path):
    path = tmp_path / "some.md"
    path.write_text("```text\na drawing\n```\n```python\nprint(1)\n```\n\n```text\n1\n```\nwords\n```text\n2\n```\n")
    assert documents.shown_output(path) == ["1\n"]
    assert documents.blocks(path, "python") == ["print(1)\n"]


def test_bytes_may_differ_more_between_compilers():
    assert documents.where_shown("8.97 MB", "8.19 MB") == 7
    assert documents.where_shown("4.11 MB", "4.79 MB") == documents.where_shown("4.79 MB", "4.11 MB") == 7
    assert documents.where_shown("8.97 MB", "7.19 MB") is None
    assert documents.where_shown("8.97 s", "8.19 s") is None


@pytest.mark.parametrize(
    ("printed", "is_shown"),
    [
        ("update 7: loss 2.31, error 1.2e-07, 40% idle", True),
        ("update 7: loss 2.35, error 0.0e+00, 41% idle", True),
        ("update 7: loss 2.26, error 1.2e-07, 40% idle", False),
        ("update 7: loss 2.31, error 1.2e-04, 40% idle", False),
        ("update 7: loss 2.31, error 1.20, 40% idle", False),
        ("update 7: loss 2.31, error 1.2e-07, 42% idle", False),
        ("update 8: loss 2.31, error 1.2e-07, 40% idle", False),
        ("update 7: loss 9.99, error 1.2e-07, 40% idle\nupdate 7: loss 2.31, error 1.2e-07, 40% idle", True),
    ],
)
def test_figures_may_differ_a_little_and_words_not_at_all(printed: str, is_shown: bool):
    end = documents.where_shown("update 7: loss 2.31, error 1.2e-07, 40% idle", f"first\n{printed}\nlast")
    assert end == (len(f"first\n{printed}") if is_shown else None)
