"""Run a function in one of several processes that work together: see `support.instances`.

usage: instance_worker.py module:function coordinator processes process folder seconds arguments
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import jax
import numpy as np


def main(
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
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # otherwise jax waits for the other processes at exit
    sys.stderr.flush()
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    os._exit(0)
