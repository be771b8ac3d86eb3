"""Test the example that several processes run: it prints what its tutorial shows, which shows how it came to be."""

import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from examples import distributed
from support import documents

PAGE = documents.ROOT / "docs/tutorials/distributed.md"
SCRIPT = (documents.ROOT / "examples/distributed.py").read_text()
STARTS = {"python": [sys.executable], "poprun": [sys.executable, "-m", "ipu_jax.distributed.poprun"]}


def commands():
    """Return the commands of the page that are followed by what they print, with that."""
    pairs = re.findall(r"^```bash\n([^`]*)```\n+```text\n([^`]*)```$", PAGE.read_text(), re.MULTILINE)
    assert [command.split()[0] for command, _ in pairs] == ["python", "poprun"]
    return [pytest.param(*pair, id=pair[0].split()[0]) for pair in pairs]


def without_speed(text):
    """Return the lines about epochs without their tags and speeds; gloo may write lines of its own."""
    return [re.sub(r", [\d,]+ examples/s", "", line) for line in re.findall(r"\[Epoch.*", text)]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), commands())
def test_a_command_prints_what_the_page_shows(command, shown):
    words = [word for part in shlex.split(command) for word in STARTS.get(part, [part])]
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUM", "PJRT_", "XLA_FLAGS"))}
    environment = {**own, "PYTHONPATH": str(documents.ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(words, cwd=documents.ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "examples/s" in shown
    lines, printed = without_speed(shown), without_speed(done.stdout)
    assert len(lines) == len(printed) == 3
    assert documents.where_shown("\n".join(lines), "\n".join(printed)) is not None, printed
    if command.startswith("poprun"):
        assert "[1,1]<stdout>:[Epoch" not in done.stdout


def test_the_page_shows_lines_of_the_script():
    shown = {line[1:].strip() for line in "".join(documents.blocks(PAGE, "diff")).splitlines()}
    assert len(shown) > 8
    assert shown <= {line.strip() for line in SCRIPT.splitlines()}


def test_a_drawing_is_decoded_point_by_point():
    line = "7 2.0,3.0 6.0,3.0 6.0,5.0"
    found = distributed.decode(line)
    expected = np.zeros((distributed.SIDE, distributed.SIDE), np.uint8)
    expected[3, 2:7] = expected[3:6, 6] = 255
    np.testing.assert_array_equal(found["picture"].reshape(expected.shape), expected)
    assert found["label"] == 7
    labels = [int(line.split()[0]) for line in distributed.draw(300)]
    assert set(labels) == set(range(10))
    assert distributed.draw(3) == distributed.draw(3) != distributed.draw(3, seed=1)
