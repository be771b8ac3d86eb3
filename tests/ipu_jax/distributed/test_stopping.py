"""Test SIGTERM as a request to stop: in one process, while XLA or C code runs; test_popdist_together has several."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ipu_jax.steps import StopRequest
from support.programs import places, run_programs

ROOT = Path(__file__).parents[3]

# C code that lets no Python handler run for half a minute or more
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000_000)"
# A process that was started in the background ignores Ctrl-C, and so do the processes that it starts.
HEEDING = """
import hashlib, os, signal, time
from ipu_jax.distributed.stopping import StopRequest
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def started(program):
    """Start a program and wait for its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDING + textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_handler_of_before_is_there_again_after_the_block():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 10
            while not stop.due():
                assert time.monotonic() < deadline
        assert (stop.asked, seen) == (True, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_is_due_without_a_signal():
    with StopRequest() as stop:
        assert [stop.due() for _ in range(3)] == [False] * 3
    assert not stop.asked


def test_a_second_signal_ends_the_process_at_once_even_in_c_code():
    process = started(f"with StopRequest() as stop: print('ready'), {IN_C}")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - start < 15, "the C code takes half a minute"


@pytest.mark.parametrize(
    ("inside", "ended"),
    [
        (IN_C, (143, "", "SIGTERM: not ended within 0.5 s, so the process is stopped\n")),
        # after the block no grace period is left
        pytest.param(
            "[_ for _ in iter(stop.due, True)]\ntime.sleep(1), print('saved')",
            (0, "saved\n", ""),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_is_not_ready_within_the_grace_period_is_ended(inside, ended):
    process = started(f"with StopRequest(grace=0.5) as stop: print('ready'), {inside}")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == ended


def test_ctrl_c_ends_a_command_inside_the_block_as_outside():
    process = started(f"""
        from ipu_jax.base.cli.process import run
        def main():
            with StopRequest():
                print("ready"), {IN_C}
        run("command", main)
    """)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130


def test_a_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"grace=0 is not a number of seconds: give one such as 30"):
        StopRequest(grace=0)
    with pytest.raises(ValueError, match=r"due\(\) is asked outside the block"):
        StopRequest().due()
    errors = []

    def enter():
        try:
            with StopRequest():
                pass
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == ["StopRequest belongs to the main thread, which alone can take signals: enter it there"]


MISSING = """
    import os, signal, time
    from ipu_jax import popdist
    from ipu_jax.steps import StopRequest
    popdist.init()
    own = popdist.get_instance_index()
    if own == 1:
        time.sleep(8)  # it never enters the block
        os._exit(0)
    with StopRequest(grace=2) as stop:
        stop._grace = 60
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            while not stop.due():
                time.sleep(0.05)
        except popdist.InstancesMissingError as error:
            print(error)
            os._exit(0)
"""


def test_an_instance_that_does_not_answer_is_named(tmp_path):
    ended = run_programs(tmp_path, MISSING, places(2), seconds=60)
    assert ended[0].lines == [
        "SIGTERM: instance 1 of 2 did not say within 2 s after which step to stop: look at what it does"
    ], ended[0].stderr
