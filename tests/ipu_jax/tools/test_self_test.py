"""Test `python -m ipu_jax`: what it prints, and that it notices an op that is wrong; and the tools as programs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_jax
import sharded_ops
from ipu_jax.pipelines import VerificationError
from ipu_jax.tools import guards_trial, self_test
from ipu_jax.tools.self_test import main

ROOT = Path(__file__).parents[3]
VERSIONS = rf"ipu_jax {re.escape(ipu_jax.__version__)} \(jax \S+, jaxlib \S+, numpy \S+, optax \S+, Python \S+\)"


@pytest.mark.slow
def test_it_prints_versions_devices_cores_and_a_verified_pipeline():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_NUM_CPU_DEVICES")
    done = subprocess.run(
        [sys.executable, "-m", "ipu_jax"], env=environment, capture_output=True, text=True, timeout=240
    )
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
