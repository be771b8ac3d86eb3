"""Test that the README's library example runs unchanged in a fresh process, and is as short as the README says."""

import re

import results
from support import documents

README = documents.ROOT / "README.md"

SMALLEST = """
for name, gradient in pipeline.unshard(gradients).items():
    print(f"smallest magnitude in {name}: {float(abs(gradient).min()):.1e}")
"""


def test_the_library_example_runs_and_is_verified():
    printed = documents.run(README, then=SMALLEST, compile_fast=True)
    assert "grouped: 2 stages on 2 IPUs, 4 micro-batches" in printed
    assert re.search(r"relative error \d.*; 2 gradients, largest relative error", printed)
    smallest = [float(found) for found in re.findall(r"smallest magnitude in .*: (.*)", printed)]
    assert len(smallest) == 2
    assert min(smallest) > 0, "a gradient of zeros would prove little"


def test_the_library_example_is_about_20_statements():
    (example,) = documents.blocks(README, "python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 24


def test_the_readme_is_a_screen_and_an_example():
    text = README.read_text()
    assert len(text.splitlines()) <= 85
    assert text.index("pipelined-step.svg") < text.index("```python")


def test_the_readme_opens_with_the_two_commands():
    first_block = README.read_text().split("```")[1]
    assert [line.split("#")[0].split() for line in first_block.splitlines()[1:] if line] == [
        ["make", "mnist"],
        ["make", "test"],
    ]


def test_the_memory_that_the_readme_quotes_is_that_of_the_benchmark():
    shown = [float(found) for found in re.findall(r"([\d.]+)\sMB", README.read_text())]
    measured = {figure.name: figure.value for figure in results.read()["rivals"].figures}
    names = ("usual idiom", "usual idiom with jax.checkpoint", "ipu_jax")
    assert shown == [round(measured[f"temporary MB an IPU, {name}, plain layers, M=64"], 1) for name in names]
