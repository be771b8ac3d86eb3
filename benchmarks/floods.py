"""Measure how fast poprun reads what an instance writes in a flood, beside `cat`: long lines, and one without an end.

Each measurement is a process of its own: a program writes through a pipe to poprun or to `cat`, and the clock runs
until everything is read. CPU time is the time of poprun and its program, less the time of a run that writes nothing. It
is compared with the CPU time that Python needs to copy as many bytes from a pipe to a file, with a tag before each
line.

    python benchmarks/floods.py [--check]
"""

import os
import subprocess
import sys
import time

from figures import Figures

MEGABYTES = 200
ROUNDS = 3
MOST_TIMES_COPYING = 20
FLOOD = """
import os, sys
data = {"lines": (b"x" * 79 + b"\\n") * 820, "no newline": b"x" * 65_600}[sys.argv[1]]
for _ in range(int(sys.argv[2]) * 1_000_000 // len(data)):
    rest = data
    while rest:
        rest = rest[os.write(1, rest):]
"""
COPY = """
import os
while data := os.read(0, 1 << 16):
    data = data.replace(b"\\n", b"\\n[1,0]<stdout>:")
    os.write(1, data)
"""


def taken(kind: str, megabytes: int, reader: str) -> tuple[float, float]:
    """Return the seconds, on the clock and as CPU time, in which a reader (a shell command) reads a flood."""
    before, begun = os.times(), time.monotonic()
    subprocess.run(
        ["bash", "-c", f"{reader} > /dev/null", "bash", sys.executable, "-c", FLOOD, kind, str(megabytes)], check=True
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begun, cpu


def main() -> int:
    figures = Figures("floods: how fast poprun reads what an instance writes")
    figures.shrink(__name__, MEGABYTES=1, ROUNDS=1)
    readers = {
        "poprun": f'{sys.executable} -m ipu_jax.distributed.poprun "$@"',
        "cat": '"$@" | cat',
        "copying": f"\"$@\" | {sys.executable} -c '{COPY}'",
    }
    for kind in ("lines", "no newline"):
        wall, cpu = dict[str, float](), dict[str, float]()
        for name, reader in readers.items():
            without, full = ([taken(kind, megabytes, reader) for _ in range(ROUNDS)] for megabytes in (0, MEGABYTES))
            wall[name], cpu[name] = (min(run[i] for run in full) - min(run[i] for run in without) for i in (0, 1))
            figures.add(f"{kind}: MB per second through {name}", MEGABYTES / wall[name])
        copying = max(cpu["copying"], 1 / os.sysconf("SC_CLK_TCK"))  # a small flood may take less than a tick
        figures.add(f"{kind}: CPU time of poprun over copying", cpu["poprun"] / copying, MOST_TIMES_COPYING)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
