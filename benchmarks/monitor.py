"""Measure what a process's record for ipu-monitor costs it: microseconds of CPU time a step, and system calls.

Each measurement runs in a process of its own, in turn with a record and with IPU_JAX_MONITOR=off. The least CPU time of
each kind counts, since other load on the machine only adds to it. strace counts the system calls, if it is installed.

    python benchmarks/monitor.py [--check]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp

from figures import Figures
from ipu_jax import configure
from ipu_jax.steps import InFlight

STEPS = 20_000
ROUNDS = 3
MOST_MICROSECONDS = 5.0
MOST_CALLS = 20
MOST_LOOK = 0.5


def measure(steps: int) -> None:
    """Print the microseconds of CPU time of a step that only passes through a window."""
    configure(2)
    admitted, output = InFlight(), jnp.ones(())
    output.block_until_ready()
    step = lambda: admitted.admit(output, samples=64)
    for _ in range(1000):
        step()
    begun = time.process_time()
    for _ in range(steps):
        step()
    print(1e6 * (time.process_time() - begun) / max(steps, 1))


def ran(steps: int, record: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Measure in a process, with a record in the folder `record`, or "off"."""
    command = [*before, sys.executable, __file__, "--measure", str(steps)]
    environment = {**os.environ, "IPU_JAX_MONITOR": record}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def system_calls(steps: int, record: str, folder: Path) -> int:
    """Return the number of system calls of the main thread in `steps` steps, counted by strace."""
    report = folder / "calls"
    ran(steps, record, "strace", "-c", "-o", str(report))
    found = re.search(r"^100\.00\s+\S+\s+(?:\d+\s+)?(\d+)\s+(?:\d+\s+)?total$", report.read_text(), re.MULTILINE)
    assert found, report.read_text()
    return int(found[1])


def main() -> int:
    flag = lambda parser: parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    figures = Figures("monitor: what a record for ipu-monitor costs a step", flags=flag)
    if figures.args.measure is not None:
        measure(figures.args.measure)
        return 0
    figures.shrink(__name__, STEPS=10, ROUNDS=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "records"
        found: dict[str, list[float]] = {"off": [], str(folder): []}
        for _ in range(ROUNDS):
            for record, costs in found.items():
                costs.append(float(ran(STEPS, record).stdout))
        without, with_record = (min(costs) for costs in found.values())
        figures.add("CPU time a step in a window without a record, us", without)
        figures.add("CPU time a step in a window with a record, us", with_record)
        figures.add("CPU time a step of a record, us", with_record - without, MOST_MICROSECONDS)
        if shutil.which("strace"):
            calls = [system_calls(steps, str(folder), Path(name)) for steps in (1_000, 11_000)]
            figures.add("system calls of 10,000 steps with a record", calls[1] - calls[0], MOST_CALLS)
        else:
            figures.leave_out("system calls of 10,000 steps with a record", "strace")
        before = time.process_time() + sum(os.times()[2:4])
        subprocess.run(
            [sys.executable, "-m", "ipu_jax.run.observe.monitor.command", "--once"],
            env={**os.environ, "IPU_JAX_MONITOR": str(folder)},
            check=True,
            capture_output=True,
        )
        seconds = time.process_time() + sum(os.times()[2:4]) - before
        figures.add("CPU time of ipu-monitor --once, s", seconds, MOST_LOOK)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
