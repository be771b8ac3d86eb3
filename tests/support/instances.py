"""Start instances, real processes that work together, run one function in each, and collect its results.

    run_instances(training.losses, [4, 4], precision="16.32")     two processes with four CPU devices each

The function returns `{name: array or text}`. A process that raises ends at once, and its stderr is shown. All processes
are killed when one has failed or time is up, because the others would wait in a collective for ever. This file is also
the program of the processes: instances.py module:function coordinator processes process folder seconds arguments
"""

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[2]

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
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.close()
        errors = [Path(folder, f"{number}.txt") for number in range(len(devices))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, count in enumerate(devices):
                settings = [name, f"127.0.0.1:{port}", *map(str, (len(devices), number, folder, seconds))]
                settings.append(json.dumps(arguments))
                with errors[number].open("wb") as stderr:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, __file__, *settings],
                            cwd=ROOT,
                            env=_environment(count, sum(devices)),
                            stdout=subprocess.DEVNULL,  # gloo writes to it
                            stderr=stderr,
                        )
                    )
            _wait(processes, errors, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_loaded(Path(folder, f"{number}.npz")) for number in range(len(devices))]


def _wait(processes: list[subprocess.Popen[bytes]], errors: list[Path], deadline: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            number = failed[0]
            raise InstanceError(f"instance {number} ended with {codes[number]}:\n{errors[number].read_text()[-4000:]}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            number = codes.index(None)
            raise InstanceError(f"instance {number} did not end in time:\n{errors[number].read_text()[-4000:]}")
        time.sleep(0.05)


def _environment(devices: int, of_all: int) -> dict[str, str]:
    # pytest's settings are for 8 devices in one process; only its XLA flags (fast compiling, no endless waits) are kept
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PJRT_"))}
    paths = [str(ROOT), str(ROOT / "tests")]
    return own | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PJRT_NPROC": str(devices + (os.cpu_count() or 1)),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "error",
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


def _run_here(
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


if __name__ == "__main__":
    faulthandler.enable()
    try:
        _run_here(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # otherwise jax waits for the other processes at exit
    sys.stderr.flush()
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    os._exit(0)
