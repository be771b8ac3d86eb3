"""Run a program, or a function of the tests, in several processes, each with its own environment, as a launcher does.

    run_instances(training.losses, [4, 4], precision="16.32")     two instances with four CPU devices each

The function returns `{name: array or text}`. A process that raises ends at once, and its stderr is shown. All processes
are killed when one has failed or time is up, because the others would wait in a collective for ever.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

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


# instances that run one function of the tests

Results = dict[str, np.ndarray]


class InstanceError(AssertionError):
    """An instance failed, or did not end in time; the message contains its stderr."""


def run_instances(
    function: Callable[..., Results] | str, devices: Sequence[int], *, seconds: float = 240, **arguments: Any
) -> list[Results]:
    """Return the function's result on each instance.

    Args:
        function: a function of a module under tests/, or its name "module:function".
        devices: the number of CPU devices of each instance.
        seconds: the time limit, after which all processes are killed.
        arguments: the function's arguments, which JSON must be able to represent.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
    with tempfile.TemporaryDirectory() as folder:
        coordinator, count = f"127.0.0.1:{free_port()}", len(devices)
        ended = run_programs(
            Path(folder),
            "from support import programs\nprograms.run_here()",
            [_environment(own) for own in devices],
            seconds=seconds,
            arguments=[
                [name, coordinator, *map(str, (count, number, folder, seconds)), json.dumps(arguments)]
                for number in range(count)
            ],
            until_one_fails=True,
        )
        for number, one in sorted(enumerate(ended), key=lambda pair: not pair[1].code):  # the failed ones first
            if one.code != 0:
                how = "did not end in time" if one.code is None else f"ended with {one.code}"
                raise InstanceError(f"instance {number} {how}:\n{one.stderr[-4000:]}")
        return [_loaded(Path(folder, f"{number}.npz")) for number in range(count)]


def _environment(devices: int) -> dict[str, str]:
    return {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PJRT_NPROC": str(devices + (os.cpu_count() or 1)),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "IPU_JAX_MONITOR": "off",
    }


def _loaded(path: Path) -> Results:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def assert_same_everywhere(found: list[Results]) -> Results:
    """Check that every instance returned the same, bit by bit, and return it."""
    for number, results in enumerate(found):
        assert results.keys() == found[0].keys()
        for name, value in results.items():
            np.testing.assert_array_equal(value, found[0][name], err_msg=f"{name} of instance {number}")
    return found[0]


def run_here() -> None:
    """Run this process's part of `run_instances`, and end the process."""
    faulthandler.enable()
    try:
        _run_function(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # otherwise jax waits for the other processes at exit
    sys.stderr.flush()
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    os._exit(0)


def _run_function(
    function: str, coordinator: str, processes: str, process: str, folder: str, seconds: str, arguments: str
) -> None:
    # print where this process waits, before it is killed
    faulthandler.dump_traceback_later(max(float(seconds) - 3, 1))
    if int(processes) > 1:
        jax.distributed.initialize(
            coordinator,
            int(processes),
            int(process),
            coordinator_bind_address=coordinator,
            initialization_timeout=60,
            heartbeat_timeout_seconds=60,
            shutdown_timeout_seconds=30,
        )
    module, name = function.split(":")
    results = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    np.savez(Path(folder, f"{process}.npz"), **results)
