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


def test_the_readme_is_a_screen_with_two_commands_and_a_short_example():
    text, (example,) = README.read_text(), documents.blocks(README, "python")
    assert len(text.splitlines()) <= 85
    assert len([line for line in example.splitlines() if line.strip()]) <= 24
    assert text.index("pipelined-step.svg") < text.index("```python")
    commands = [line.split("#")[0].split() for line in text.split("```")[1].splitlines()[1:] if line]
    assert commands == [["make", "mnist"], ["make", "test"]]


def test_the_memory_that_the_readme_quotes_is_that_of_the_benchmark():
    shown = [float(found) for found in re.findall(r"([\d.]+)\sMB", README.read_text())]
    measured = {figure.name: figure.value for figure in results.read()["rivals"].figures}
    names = ("usual idiom", "usual idiom with jax.checkpoint", "ipu_jax")
    assert shown == [round(measured[f"temporary MB an IPU, {name}, plain layers, M=64"], 1) for name in names]
