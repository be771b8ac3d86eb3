"""Test the harness of faults: a sample of its cases, and that it sees what it looks for."""

import json
import signal
import sys
import zlib

import pytest

import faults
from faults_of.runs import Mark, Started
from faults_of.trial import Result
from faults_of.twin import Twin, damaged_in, differences, losses_of, lost_before

TWIN = Twin({1: "a", 2: "b", 3: "c", 4: "d"}, "end", 2, *[1.0] * 8)


def mark(name, value, instance=0, attempt=0, time=0.0):
    return Mark(name, instance, attempt, time, value)


def steps(*numbers, attempt=0, time=0.0):
    return [mark("step", f"{n}:{'abcd'[n - 1]}", attempt=attempt, time=time + n) for n in numbers]


def test_a_resumed_training_is_compared_in_every_step_and_at_its_end():
    end = mark("weights", "end")
    assert differences(TWIN, [*steps(1, 2, 3), *steps(3, 4), end]) == []
    assert differences(TWIN, [*steps(1, 2), *steps(4), end]) == ["steps [3] were not made"]
    assert differences(TWIN, steps(1, 2, 3, 4)) == ["it did not come to its end"]
    other = mark("step", "3:x", attempt=1)
    assert differences(TWIN, [*steps(1, 2, 3, 4), other, end]) == ["the loss of step 3 is c and x, not c"]
    assert differences(TWIN, [*steps(1, 2, 3, 4), mark("weights", "no")]) == ["the weights at the end differ"]
    assert losses_of([mark("saving", "2")]) == {}


def test_lost_steps_are_counted_and_those_of_a_save_that_was_cut_off_may_be_lost():
    marks = [*steps(1, 2), mark("saving", "2", time=2.0), *steps(3)]
    assert lost_before(mark("resumed", "0", attempt=1, time=10.0), marks, every=2) == (3, 2 + 1)
    assert lost_before(mark("resumed", "2", attempt=1, time=10.0), marks, every=2) == (1, 2)


def test_what_is_over_a_bound_falls_short():
    result = Result("then", found=0.9, gone=3.1, lost=12, bounds={"found": 1.0, "gone": 3.0, "lost": 12})
    assert result.judge() == ["gone 3.1 > 3"]
    result.problems.append("processes [7] are left")
    assert result.judge() == ["processes [7] are left", "gone 3.1 > 3"]
    assert faults.table({"SIGSEGV": [result]})[-1] == "| SIGSEGV | 0 of 1 | 0.90 (0.90) | 3.10 (3.10) | - | 12 (12) |"


def test_a_damaged_checkpoint_is_seen_without_the_code_that_wrote_it(tmp_path):
    folder = tmp_path / "step-12"
    folder.mkdir()
    (folder / "array").write_bytes(b"0123")
    text = json.dumps({"files": {"array": [4, zlib.crc32(b"0123")]}}).encode()
    (folder / "ipu_jax.json").write_bytes(b"%d\n" % zlib.crc32(text) + text)
    assert damaged_in(tmp_path) == []
    (folder / "array").write_bytes(b"0122")
    assert damaged_in(tmp_path) == ["step-12/array is not as it was sealed"]
    (folder / "ipu_jax.json").unlink()
    assert damaged_in(tmp_path) == ["step-12 has no seal"]


def test_processes_of_a_run_are_found_and_those_that_stay_are_named(tmp_path):
    program = "import os, time; os.environ['IPU_JAX_INSTANCE'] == '1' and time.sleep(60)"
    program += "; print('mark=up instance=0', end=' ')"
    program += "; print('attempt=0 t=1.5 value=3', flush=True); time.sleep(60)"
    run = Started(["-v", "--num-instances", "2", "--num-replicas", "2", sys.executable, "-c", program], tmp_path, "run")
    try:
        assert run.wait_for(lambda mark: mark.name == "up") == Mark("up", 0, 0, 1.5, "3")
        assert run.wait_for_pid(1) in run.processes(0)
        assert run.gone_at(0, 0.1) is None
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 143
        assert run.gone_at(None, 3) is not None
        assert run.left_over() == []
    finally:
        run.kill_all()
        run.end(10)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # thirteen runs, each with processes of its own
def test_all_cases(tmp_path):
    assert faults.main(["--times", "1", "--check", "--keep", str(tmp_path)]) == 0
