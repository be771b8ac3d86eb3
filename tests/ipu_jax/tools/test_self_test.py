"""Test `python -m ipu_jax`: what it prints, and that it notices an op that is wrong; and the tools as programs.

Then its trial of collectives inside guards: that it has some, and what is said of each end.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import ipu_jax
import sharded_ops
from ipu_jax.pipelines import VerificationError
from ipu_jax.tools import guards_trial, self_test
from ipu_jax.tools.guards_trial import ABOUT, HANG, UNTRIED, WORK, WRONG, outcome, pipeline_of_groups
from ipu_jax.tools.self_test import main

ROOT = Path(__file__).parents[3]
VERSIONS = rf"ipu_jax {re.escape(ipu_jax.__version__)} \(jax \S+, jaxlib \S+, numpy \S+, optax \S+, Python \S+\)"


@pytest.mark.slow
def test_it_prints_versions_devices_cores_and_a_verified_pipeline():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUM_CPU_DEVICES")
    command = [sys.executable, "-m", "ipu_jax"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert_four_lines(done.stdout, ipus=2)


def assert_four_lines(printed: str, ipus: int) -> None:
    versions, devices, verified, tried = printed.splitlines()
    assert tried == "Collectives of one IPU's devices inside guards: work"
    assert re.fullmatch(VERSIONS, versions)
    assert devices == f"cpu: {ipus} virtual IPUs on {len(os.sched_getaffinity(0))} cores"
    found = re.match(r"Self-test passed: loss (\S+), unsharded (\S+), .*; 2 gradients, .*", verified)
    assert found
    assert found[1] == found[2] != "0"


@pytest.mark.slow
def test_it_fails_with_1_where_an_op_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(guards_trial, "outcome", lambda: guards_trial.WORK)
    right = sharded_ops.matmul
    monkeypatch.setattr(sharded_ops, "matmul", lambda x, w: 1.01 * right(x, w))
    assert main([]) == 1
    assert "\nSelf-test failed: " in capsys.readouterr().out


def test_it_prints_four_lines(monkeypatch, capsys):
    monkeypatch.setattr(guards_trial, "outcome", lambda: guards_trial.WORK)
    assert main([]) == 0
    assert_four_lines(capsys.readouterr().out, ipus=8)


def test_what_is_found_wrong_is_a_failure_and_a_trial_that_hangs_is_none(monkeypatch, capsys):
    monkeypatch.setattr(guards_trial, "outcome", lambda: guards_trial.WORK)

    def wrong() -> None:
        raise VerificationError("a gradient is 1% off")

    monkeypatch.setattr(self_test, "_verified", wrong)
    assert main([]) == 1
    assert capsys.readouterr().out.endswith("\nSelf-test failed: a gradient is 1% off\n")
    monkeypatch.setattr(self_test, "_verified", str)
    for line, status in ((guards_trial.WRONG, 1), (guards_trial.HANG, 0), (guards_trial.UNTRIED, 0)):
        monkeypatch.setattr(guards_trial, "outcome", lambda line=line: line)
        assert main([]) == status
        assert capsys.readouterr().out.endswith(f"\n{line}\n")


def test_without_two_ipus_it_says_so_and_exits_with_2(monkeypatch, capsys):
    def one_gpu(num_ipus):
        raise ValueError(f"num_ipus={num_ipus}, but this machine's GPU platform has 1: use fewer IPUs")

    monkeypatch.setattr(guards_trial, "outcome", lambda: guards_trial.UNTRIED)
    monkeypatch.setattr(ipu_jax, "configure", one_gpu)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{VERSIONS}\n", out)
    assert err == "python -m ipu_jax: num_ipus=2, but this machine's GPU platform has 1: use fewer IPUs\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "sizes"),
    [
        ("sharded_matmul_tool", "--rows 6 --cols 8 --outsize 10"),
        ("sharded_embedding_tool", "--vocab-size 10 --feature-size 8 --sequence-length 6"),
    ],
)
def test_a_tool_runs_as_a_program_and_makes_its_own_ipus(tool, sizes):
    command = [sys.executable, str(ROOT / "tests" / f"{tool}.py"), *sizes.split(), "--ipus", "9"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "Results match."


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
