"""The README's library example runs as it stands, in a fresh process, and is as short as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block


def test_the_library_example_runs_and_is_verified():
    alone = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example()], env=alone, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "grouped: 2 stages on 2 IPUs, 4 micro-batches" in done.stdout
    assert re.search(r"relative error \d.*; 2 gradients, largest relative error", done.stdout)


def test_the_library_example_is_about_20_statements():
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 24


def test_the_readme_opens_with_the_two_commands():
    first_block = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].split() for line in first_block.splitlines()[1:] if line] == [
        ["make", "mnist"],
        ["make", "test"],
    ]
