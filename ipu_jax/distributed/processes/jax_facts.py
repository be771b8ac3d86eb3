"""Add to this process's record what jax knows: devices, their stages, compilations, examples and memory."""

import math
import os
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.monitoring
import numpy as np
from jax.sharding import Mesh

from ipu_jax.distributed.processes import own_record
from ipu_jax.distributed.processes.beacons import Beacon, Phase

_BACKEND_COMPILE: Final = "/jax/core/compile/backend_compile_duration"
_COMPILE: Final = "/jax/core/compile/"


def begin() -> None:
    """Begin the record of this process, unless it has one. No device is touched."""
    beacon = own_record.begin()
    if beacon is not None:
        tell_compilations(beacon)


def note_devices(devices: Sequence[Any]) -> None:
    """Begin the record, and write down the devices of this process that serve as IPUs."""
    begin()
    own_record.note(**_place(), ipus=[_described(device) for device in devices])


def note_mesh(mesh: Mesh, stages: Sequence[tuple[str, int | None]] = ()) -> None:
    """Begin the record, and write down which IPUs of a mesh this process has.

    Args:
        mesh: the mesh of replicas and IPUs.
        stages: the name of each stage and its IPU (None for all IPUs), if known.
    """
    begin()
    if not own_record.is_begun():
        return
    own = jax.process_index()
    ipus: list[dict[str, Any]] = []
    for (replica, ipu), device in np.ndenumerate(mesh.devices):
        if device.process_index == own:
            there = [name for name, place in stages if place is None or place == ipu]
            ipus.append({**_described(device), "replica": replica, "ipu": ipu, "stages": there})
    replicas, ipus_per_replica = mesh.devices.shape
    own_record.note(**_place(), replicas=replicas, ipus_per_replica=ipus_per_replica, ipus=ipus)


def count_samples(batch: Any, dims: int) -> int:
    """Return the number of examples in a batch: the product of the first `dims` dims of a leaf with enough dims.

    >>> count_samples({"x": np.zeros((2, 4, 8, 28, 28)), "scale": np.zeros(2)}, dims=3)
    64
    """
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf) >= dims:
            return math.prod(leaf.shape[:dims])
    return 0


def device_bytes() -> int:
    """Return how many bytes are in use on this process's devices; 0 if they do not report it, as on a CPU."""
    try:
        return sum((device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.local_devices())
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return 0


def _place() -> dict[str, Any]:
    return {"instance": jax.process_index(), "instances": jax.process_count()}


def _described(device: Any) -> dict[str, Any]:
    return {"id": device.id, "platform": device.platform, "kind": device.device_kind}


_told: Beacon | None = None


def tell_compilations(beacon: Beacon) -> None:
    """Put a beacon into the phase `COMPILING` while jax compiles. A second call for the same beacon does nothing."""
    global _told
    if _told is not beacon:
        _told = beacon
        jax.monitoring.register_event_duration_secs_listener(_Compilations(beacon))


class _Compilations:
    """Listens to jax, which traces, lowers, then compiles a program. Each of these only reports its own end."""

    def __init__(self, beacon: Beacon):
        self._beacon, self._stepping = beacon, Phase.STARTING

    def __call__(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith(_COMPILE) or self._beacon.pid != os.getpid():
            return
        phase = self._beacon.phase
        if event == _BACKEND_COMPILE:
            if phase is Phase.COMPILING:
                self._beacon.enter(self._stepping)
        elif phase in (Phase.STARTING, Phase.STEPPING):
            self._stepping = phase
            self._beacon.enter(Phase.COMPILING)
