"""Start processes that write records for ipu-monitor and do not need jax."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# After `ago(seconds)`, records are written as if that many seconds ago.
PRELUDE = """
import os, sys, time
from ipu_jax.processes import beacons, own_record
from ipu_jax.processes.beacons import Phase
beacon = own_record.begin()
now = time.monotonic_ns
def ago(seconds):
    beacons.time.monotonic_ns = lambda: now() - int(seconds * 1e9)
def ready():
    print("ready", flush=True)
    time.sleep(60)
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "IPU_JAX_MONITOR": str(folder), **variables}


@contextlib.contextmanager
def recorded(folder: Path, body: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that begins a record and then runs `body`; yield the process when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body) + "\nready()", "some", "words"],
        env=environment(folder, **variables),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
