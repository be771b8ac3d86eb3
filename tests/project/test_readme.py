"""Test that the README's examples run unchanged in a fresh process, print what is shown, and are short."""

import re
import shlex

import pytest

import results
from support import documents

README = documents.ROOT / "README.md"

# As Graphcore's README of concurrent pipelines gives them, with the names of the commands here
COMMANDS_OF_GRAPHCORE = (
    "run-sharded-mnist --pipeline-mode basic",
    "run-sharded-mnist --pipeline-mode concurrent",
    "sharded-embedding-tool --ipus 4 --vocab-size 8000 --feature-size 768 --sequence-length 256",
)
LARGEST = """
for path, gradient in jax.tree.leaves_with_path(pipeline.unshard(gradients)):
    print(f"largest magnitude in {jax.tree_util.keystr(path)}: {float(abs(gradient).max()):.1e}")
"""


@pytest.mark.slow
def test_the_examples_run_and_print_what_is_shown():
    printed = documents.run(README, then=LARGEST, compile_fast=True, saved_as="first.py")
    assert [len(text.splitlines()) for text in documents.shown_output(README)] == [9, 1]
    documents.assert_shown(README, printed)
    largest = [float(found) for found in re.findall(r"largest magnitude in .*: (.*)", printed)]
    assert len(largest) == 51
    assert min(largest) > 0, "a gradient of zeros would prove little"


def test_the_readme_has_four_commands_and_two_short_examples():
    text, (first, second) = README.read_text(), documents.blocks(README, "python")
    assert len(text.splitlines()) <= 130
    assert "**Not for you if**" in "".join(text.splitlines()[:10])
    count = lambda block: len([line for line in block.splitlines() if line.strip()])
    assert count(first) <= 28
    assert count(second) <= 14
    assert text.index("pipelined-step.svg") < text.index("```python")
    commands = [shlex.split(line, comments=True) for line in documents.blocks(README, "bash")[0].splitlines()]
    assert commands[0] == ["pip", "install", ".[mnist]"]
    assert commands[1:] == [line.split() for line in COMMANDS_OF_GRAPHCORE]
    assert documents.blocks(documents.ROOT / "docs/index.md", "bash") == documents.blocks(README, "bash")


def test_the_memory_that_the_readme_quotes_is_that_of_the_benchmark():
    shown = [float(found) for found in re.findall(r"([\d.]+)\sMB", README.read_text())]
    measured = {figure.name: figure.value for figure in results.read()["rivals"].figures}
    names = ("usual idiom", "usual idiom with jax.checkpoint", "ipu_jax")
    assert shown == [round(measured[f"temporary MB an IPU, {name}, plain layers, M=64"], 1) for name in names]
