"""Test that the README's library example runs unchanged in a fresh process, and that both front pages are short."""

import re

import pytest

import results
from support import documents

README, FRONT = documents.ROOT / "README.md", documents.ROOT / "docs/index.md"

LARGEST = """
for path, gradient in jax.tree.leaves_with_path(pipeline.unshard(gradients)):
    print(f"largest magnitude in {jax.tree_util.keystr(path)}: {float(abs(gradient).max()):.1e}")
"""


def test_the_library_example_runs_and_is_verified():
    printed = documents.run(README, then=LARGEST, compile_fast=True)
    assert "Pipeline of 2 stages on 2 IPUs, schedule 'grouped', 8 micro-batches" in printed
    assert "grouped: 2 stages on 2 IPUs, 8 micro-batches" in printed
    assert re.search(r"relative error \d.*; 13 gradients, largest relative error", printed)
    largest = [float(found) for found in re.findall(r"largest magnitude in .*: (.*)", printed)]
    assert len(largest) == 13
    assert min(largest) > 0, "a gradient of zeros would prove little"


def test_the_readme_is_a_screen_with_two_commands_and_a_short_example():
    text, (example,) = README.read_text(), documents.blocks(README, "python")
    assert len(text.splitlines()) <= 85
    assert len([line for line in example.splitlines() if line.strip()]) <= 24
    assert text.index("pipelined-step.svg") < text.index("```python")
    commands = [line.split("#")[0].split() for line in text.split("```")[1].splitlines()[1:] if line]
    assert commands == [["make", "mnist"], ["make", "test"]]


def test_the_front_page_of_the_documentation_is_a_picture_a_line_to_install_and_a_short_example():
    text, (example,) = FRONT.read_text(), documents.blocks(FRONT, "python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 88
    assert lines[-1].startswith("print(verify(")
    assert text.index("pipelined-step.svg") < text.index("pip install .") < text.index("```python")
    texts = re.findall(r"(?<!!)\[([^\]]*)\]\(", text)
    assert len(texts) > 30
    assert [text for text in texts if re.search(r"\.\w+$|/|`", text)] == ["torch.distributed.pipelining"]


@pytest.mark.parametrize("page", [README, FRONT], ids=lambda page: page.name)
def test_the_memory_that_a_front_page_quotes_is_that_of_the_benchmark(page):
    shown = [float(found) for found in re.findall(r"([\d.]+)\sMB", page.read_text())]
    measured = {figure.name: figure.value for figure in results.read()["rivals"].figures}
    names = ("usual idiom", "usual idiom with jax.checkpoint", "ipu_jax")
    assert shown == [round(measured[f"temporary MB an IPU, {name}, plain layers, M=64"], 1) for name in names]
