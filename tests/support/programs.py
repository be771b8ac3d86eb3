"""Run one program as several processes, each with its own environment, as a launcher does; return how each ended."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ipu_jax.distributed.environment import InstancePlace

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "ipu_jax" / "distributed" / "bootstrap"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit status; None if it had to be killed when time was up.
        seconds: how long it ran.
        lines: the lines of its stdout, without gloo's.
        stderr: the text of its stderr.
    """

    code: int | None
    seconds: float
    lines: list[str]
    stderr: str


def run_programs(
    folder: Path,
    program: str,
    environments: Sequence[Mapping[str, str]],
    *,
    seconds: float = 120.0,
    arguments: Sequence[Sequence[str]] | None = None,
    until_one_fails: bool = False,
) -> list[Ended]:
    """Run a Python program once in each environment, all at the same time, and wait for them.

    Args:
        folder: for the program and its output.
        program: the program's text, which may be indented like the caller's code.
        environments: the variables of each process, besides this process's own variables without pytest's settings of
            jax.
        seconds: the time limit, after which processes that still run are killed.
        arguments: the arguments of each process; none by default.
        until_one_fails: whether to kill the others at once when one has failed.
    """
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    processes: list[subprocess.Popen[bytes]] = []
    start, ends = time.monotonic(), [seconds] * len(environments)
    try:
        for number, environment in enumerate(environments):
            own = arguments[number] if arguments else ()
            with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *own],
                        env=_usual() | dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                    )
                )
        running = set(range(len(processes)))
        while running and time.monotonic() - start < seconds:
            for number in [n for n in running if processes[n].poll() is not None]:
                running.discard(number)
                ends[number] = time.monotonic() - start
            if until_one_fails and any(process.poll() for process in processes):
                break
            time.sleep(0.02)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    return [_ended(folder, number, codes[number], ends[number]) for number in range(len(processes))]


def places(
    instances: int, *, replicas: int = 0, ipus_per_replica: int = 1, run_dir: Path | None = None
) -> list[dict[str, str]]:
    """Return each instance's environment, as poprun makes it, with a free port; by default each has one replica."""
    address = f"127.0.0.1:{free_port()}"
    return [
        {
            **InstancePlace(
                instance,
                instances,
                instance,
                replicas=replicas or instances,
                ipus_per_replica=ipus_per_replica,
                coordinator=address,
                bind=address,
                run_dir=run_dir,
            ).variables(),
            "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), str(ROOT)]),
        }
        for instance in range(instances)
    ]


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _usual() -> dict[str, str]:
    # pytest's own jax has 8 devices in one process
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PJRT_", "IPU_JAX_"))}
    return own | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "PJRT_NPROC": "4"}


def _ended(folder: Path, number: int, code: int | None, seconds: float) -> Ended:
    lines = (folder / f"{number}.out").read_text().splitlines()
    # gloo's threads write into each other's lines
    own = [line for line in lines if "[Gloo]" not in line and "connected peer ranks" not in line]
    return Ended(code, seconds, own, (folder / f"{number}.err").read_text())
