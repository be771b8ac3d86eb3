"""Bring the timelines of all instances together on instance 0, on one clock.

Instances on one host read the same CLOCK_MONOTONIC. With several hosts, all instances read their clocks right after a
barrier, a few times. The median difference to instance 0's clock is taken for the difference of the clocks. It is as
exact as the barrier is at releasing all instances at once; `clocks` says how far the readings were apart.
"""

import dataclasses
import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ipu_jax.distributed import popdist

_ROUNDS = 9


@dataclasses.dataclass(frozen=True)
class Part:
    """Hold what one instance recorded: a JSON value, with its times in nanoseconds of its own clock.

    Attributes:
        instance: its number.
        ahead: by how many nanoseconds its clock is ahead of instance 0's.
        uncertainty: how far the readings behind `ahead` were apart, in nanoseconds; 0 if all are on one host.
        recorded: the value.
    """

    instance: int
    ahead: float
    uncertainty: float
    recorded: Any


def gathered(recorded: Any) -> list[Part]:
    """Return what every instance recorded. All instances must call this. Communicates a few bytes per slice."""
    instance, count = popdist.get_instance_index(), popdist.get_num_instances()
    if count == 1:
        return [Part(0, 0.0, 0.0, recorded)]
    hosts = _from_each(_host())
    readings = np.zeros((count, 0))
    if len(set(hosts)) > 1:
        mine: list[int] = []
        for _ in range(_ROUNDS):
            popdist.barrier("clocks")
            mine.append(time.monotonic_ns())
        readings = np.array(_from_each(mine), np.int64)
    ahead, apart = clock_differences(readings)
    all_recorded = _from_each(recorded)
    assert all_recorded[instance] == json.loads(json.dumps(recorded)), "each instance gets back what it gave"
    return [Part(i, ahead[i], apart[i], all_recorded[i]) for i in range(count)]


def clock_differences(readings: Any) -> tuple[list[float], list[float]]:
    """Return by how much each clock is ahead of the first one, and how far its readings were apart.

    >>> clock_differences(np.array([[10, 20, 30], [1010, 1021, 1029]]))
    ([0.0, 1000.0], [0.0, 2.0])
    """
    if not readings.shape[1]:
        return [0.0] * len(readings), [0.0] * len(readings)
    differences = (readings - readings[:1]).tolist()
    return [float(statistics.median(row)) for row in differences], [float(max(row) - min(row)) for row in differences]


def told(parts: list[Part]) -> str:
    """Describe in words how the clocks of the instances were aligned."""
    worst = max(part.uncertainty for part in parts)
    if len(parts) == 1:
        return "one instance"
    if not worst:
        return f"{len(parts)} instances on one clock"
    return f"{len(parts)} instances, whose hosts' clocks are compared to within {worst / 1e6:.2f} ms"


def _host() -> str:
    """Return a name that is the same for instances that share CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _from_each(value: Any) -> list[Any]:
    """Return the JSON value of each instance."""
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    found: list[Any] = []
    for root in range(popdist.get_num_instances()):
        size = popdist.broadcast(len(payload), root)
        own = payload if root == popdist.get_instance_index() else np.zeros(size, np.uint8)
        found.append(json.loads(np.asarray(popdist.broadcast(own, root)).tobytes()))
    return found
