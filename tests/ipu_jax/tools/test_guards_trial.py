"""Test the trial of collectives inside guards: that it has some, and what is said of each end."""

import re
import sys
from pathlib import Path

import jax
import pytest

import ipu_jax
from ipu_jax.pipelines import VerificationError
from ipu_jax.tools import guards_trial
from ipu_jax.tools.guards_trial import ABOUT, HANG, UNTRIED, WORK, WRONG, outcome, pipeline_of_groups

ROOT = Path(__file__).parents[3]
# XLA's ppermute waits for the devices of the other IPU, too, which never come.
NEVER_ENDS = """
import jax, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from ipu_jax import configure, make_mesh

configure(4)
def swap(x):
    return lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
def on_ipu_0(x):
    return lax.cond(lax.axis_index("ipu") == 0, swap, lambda x: x, x)
both = P(("ipu", "tensor"))
program = jax.jit(jax.shard_map(on_ipu_0, mesh=make_mesh(1, 2, tensor=2), in_specs=both, out_specs=both))
program(np.arange(4.0)).block_until_ready()
"""


@pytest.mark.slow
def test_an_ipu_reduces_over_its_own_devices_inside_guards():
    """Devices 0 and 1 are IPU 0. B of the first stage needs no cotangent of the batch, and so has no reduction."""
    pipeline, weights, batch = pipeline_of_groups()
    text = jax.jit(pipeline.value_and_grad).lower(pipeline.shard(weights), batch).compile().as_text()
    assert text is not None
    within = r" all-reduce\(.*replica_groups=(?:\[2,2\]<=\[4\]|\{\{0,1\},\{2,3\}\}),.*/ipu_jax\.([FB]\.\d)/while/body/"
    assert sorted(re.findall(within, text)) == ["B.1", "F.0", "F.1"]


def test_the_trial_compares_with_the_unsharded_program(monkeypatch):
    assert guards_trial.main() == 0

    def wrong(*_):
        raise VerificationError("a gradient is 1% off")

    monkeypatch.setattr(ipu_jax, "verify", wrong)
    assert guards_trial.main() == 4

    def too_few(count):
        raise ValueError(f"num_ipus={count}, but this machine's GPU platform has 2: use fewer IPUs")

    monkeypatch.setattr(ipu_jax, "configure", too_few)
    assert guards_trial.main() == 3


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("", WORK),
        ("sys.exit(3)", UNTRIED),
        ("sys.exit(4)", WRONG),
        ("time.sleep(600)", HANG),
        ("print('Termination timeout of Rendezvous', file=sys.stderr, flush=True); os.abort()", HANG),
        ("print('no libtpu', file=sys.stderr, flush=True); os.abort()", f"{ABOUT}: not tried, .* status -6: no libtpu"),
        ("sys.exit('a\\nb')", f"{ABOUT}: not tried, since the trial ended with status 1: b"),
        ("sys.exit(9)", f"{ABOUT}: not tried, .* status 9: it said nothing"),
        ("sys.exit(0 if os.environ['XLA_FLAGS'].count('_timeout_seconds=10') == 2 else 9)", WORK),
    ],
)
def test_each_end_is_told_in_a_line(code, line, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    seconds = 1.0 if "sleep" in code else 60.0
    found = outcome((sys.executable, "-S", "-c", f"import os, sys, time; {code}"), seconds=seconds)
    assert re.fullmatch(line, found)


@pytest.mark.slow
def test_a_program_that_hangs_is_ended_and_told(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"{flag}=2" for flag in guards_trial._FLAGS))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    assert outcome((sys.executable, "-c", NEVER_ENDS)) == HANG
