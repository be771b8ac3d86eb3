"""Test that the GPT for any number of chips trains on the devices of a CPU."""

import math
import re
import subprocess
import sys

import pytest

from support import documents

SMALL = "--ipus 2 --width 64 --blocks 2 --sequence 32 --vocabulary 101 --gradient-accumulation 4"


@pytest.mark.slow
def test_a_small_gpt_trains():
    command = [sys.executable, "-W", "error", "-m", "examples.gpt", *SMALL.split(), "--updates", "2"]
    done = subprocess.run(command, cwd=documents.ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (float(loss) for loss in re.findall(r"update \d: loss (.*)", done.stdout))
    assert first == pytest.approx(math.log(101), abs=0.1)  # it knows nothing yet
    assert second < first
