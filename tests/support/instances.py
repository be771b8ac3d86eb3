"""Start instances, real processes that work together, run one function in each, and collect its results.

    run_instances(training.losses, [4, 4], precision="16.32")     two processes with four CPU devices each

The function returns `{name: array or text}`. A process that raises ends at once, and its stderr is shown. All processes
are killed when one has failed or time is up, because the others would wait in a collective for ever.
"""

import faulthandler
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from support.programs import ROOT, free_port, run_programs

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
            "from support import instances\ninstances.run_here()",
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


def run_here() -> None:
    """Run this process's part of `run_instances`, and end the process."""
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
