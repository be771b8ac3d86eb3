"""Let the disk of one instance fail while the others' disks work, by a limit on the process's file sizes."""

import resource
import threading
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from ipu_jax import Checkpoints
from ipu_jax.io import CheckpointError
from support import resumed
from support.programs import Results

TIMEOUT = 60.0


def one_disk_fails(folder: str, victim: int, stuck: bool = False) -> Results:
    """Save while one instance cannot write files, go on until the error is raised, and save when it can write again.

    Args:
        folder: for the checkpoints.
        victim: the instance whose disk fails.
        stuck: whether the writes of the other instances never end.
    """
    if stuck and jax.process_index() != victim:
        _first_write_does_not_end()
    step = resumed.step_for(resumed.TOPOLOGIES["basic"])
    state = resumed.first_state(step)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(folder, step, timeout=TIMEOUT) as checkpoints:
        if jax.process_index() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
        began, calls = time.monotonic(), 0
        try:
            checkpoints.save(state, now=True)
            for calls in range(2000):  # noqa: B007 (used below)
                checkpoints.due(state, updates=0)
                time.sleep(0.01)
            message, errno = "none", 0
        except CheckpointError as error:
            message, errno = str(error), error.errno or 0
        seconds = time.monotonic() - began
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        last = checkpoints.last
        checkpoints.save(state, now=True)
    found = {"error": message, "errno": errno, "seconds": seconds, "calls": calls, "was sealed": last is not None}
    return {name: np.array(value) for name, value in found.items()}


def _first_write_does_not_end() -> None:
    """Make the first save write for ever, as tensorstore sometimes does on a full disk."""
    usual, calls = ocp.AsyncCheckpointer.wait_until_finished, []

    def wait(self: Any) -> None:
        calls.append(self)
        if len(calls) == 2:  # the first call is orbax's own, when a save begins
            threading.Event().wait()
        usual(self)

    ocp.AsyncCheckpointer.wait_until_finished = wait
