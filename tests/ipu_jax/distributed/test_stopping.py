"""Test SIGTERM as a request to stop: in one process, while C code runs; test_popdist_together has several."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipu_jax.steps import StopRequest

ROOT = Path(__file__).parents[3]

# Each case is a process of its own, which need not import anything. Most are in C code that lets no Python handler run
# for minutes. A process that was started in the background ignores Ctrl-C, and so do the processes that it starts.
CASES = r"""
import hashlib, json, os, signal, sys, time
from ipu_jax.base.cli.process import run
from ipu_jax.distributed.stopping import StopRequest
signal.signal(signal.SIGINT, signal.default_int_handler)

def say(*words):
    os.write(1, json.dumps(words).encode() + b"\n")

def in_c(name, **options):
    with StopRequest(**options):
        say(name, os.getpid()), hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000_000)

def in_time():
    with StopRequest(grace=0.5) as stop:
        say("in time", os.getpid()), [_ for _ in iter(stop.due, True)]
    time.sleep(1)  # after the block no grace period is left

cases = {
    "twice": lambda: in_c("twice"),
    "late": lambda: in_c("late", grace=0.5),
    "in time": in_time,
    "Ctrl-C": lambda: run("command", lambda: in_c("Ctrl-C")),
}
names = {}
for name, call in cases.items():
    if (pid := os.fork()) == 0:
        sys.exit(call())
    names[pid] = name
for _ in cases:
    pid, status = os.wait()
    say(names[pid], os.waitstatus_to_exitcode(status))
"""


def test_a_signal_is_noticed_in_the_block_and_the_handler_of_before_is_there_again_after_it():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        with StopRequest() as stop:
            assert ([stop.due() for _ in range(3)], stop.asked) == ([False] * 3, False)  # without a signal
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not stop.due():
                assert time.monotonic() < deadline
        assert (stop.asked, seen) == (True, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_each_process_ends_as_its_signals_ask_even_in_c_code():
    words, own = [sys.executable, "-c", CASES], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None
        pids = dict(json.loads(out.readline()) for _ in range(4))
        for name in ("twice", "late", "in time"):
            os.kill(pids[name], signal.SIGTERM)
        os.kill(pids["Ctrl-C"], signal.SIGINT)
        codes = {}
        while not codes.keys() >= {"late", "in time", "Ctrl-C"}:
            name, codes[name] = json.loads(out.readline())
        assert "twice" not in codes, "its first signal leaves it 30 s, and 0.5 s are less"
        ended = threading.Event()

        def ask_again():  # two signals that come at once may be one
            while not ended.wait(0.1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids["twice"], signal.SIGTERM)

        asking = threading.Thread(target=ask_again)
        asking.start()
        name, codes[name] = json.loads(out.readline())
        ended.set()
        asking.join()
        assert codes == {"twice": 143, "late": 143, "in time": 0, "Ctrl-C": 130}
        assert err.read() == "SIGTERM: not ended within 0.5 s, so the process is stopped\n"


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
