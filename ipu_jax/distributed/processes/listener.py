"""Listen to what this process says of itself (`base/facts.py`), and write it into its beacon and its record.

devices, mesh                        -> the record: IPUs, and the stages on them
planned                              -> the record: how many updates there will be
dispatching, dispatched, waited      -> the beacon: steps begun, made and finished, with their updates and examples
ticks                                -> the flight recorder, if it is on: which IPU is in which tick
during                               -> the beacon's phase: BUSY, or WAITING for other instances
jax compiles                         -> COMPILING, so that it is not taken for a stuck step
"""

import collections
import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.monitoring
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Device, Json, Tree, Value
from ipu_jax.distributed.processes import flight, record
from ipu_jax.distributed.processes.beacons import Beacon, Phase

_BACKEND_COMPILE: Final = "/jax/core/compile/backend_compile_duration"
_COMPILE: Final = "/jax/core/compile/"
_ASK_MEMORY_EVERY: Final = 2.0


class OwnProcess(facts.Listener):
    """Writes the facts of this process into its beacon and its record."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all steps, such as in a forked process."""
        self._unfinished: collections.deque[tuple[list[Value], int, int]] = collections.deque()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # windows between `dispatching` and `dispatched`
        self._joint: weakref.WeakSet[Any] = weakref.WeakSet()  # windows whose steps need all instances
        self._ask_memory_at, self._devices_tell = 0.0, True
        self._heard_by: Beacon | None = None  # whose phase is COMPILING while jax compiles

    def during(self, doing: str, seconds: float, waiting: bool) -> contextlib.AbstractContextManager[None]:
        return record.during(Phase.WAITING if waiting else Phase.BUSY, doing, seconds)

    def stepping(self) -> None:
        beacon = record.begin()
        if beacon is not None and beacon is not self._heard_by:
            self._heard_by = beacon
            jax.monitoring.register_event_duration_secs_listener(_Compilations(beacon))

    def devices(self, devices: Sequence[Device]) -> None:
        self.stepping()
        record.note(**_place(), ipus=[_described(device) for device in devices])

    def mesh(self, mesh: Mesh, stages: Sequence[tuple[str, int | None]]) -> None:
        self.stepping()
        if not record.is_begun():
            return
        own = jax.process_index()
        ipus: list[dict[str, Json]] = []
        for (replica, ipu, *further), device in np.ndenumerate(mesh.devices):
            if device.process_index == own:
                there = [name for name, place in stages if place is None or place == ipu]
                place = {"replica": replica, "ipu": ipu, "further": further}
                ipus.append({**_described(device), **place, "stages": there})
        replicas, ipus_per_replica = mesh.devices.shape[:2]
        record.note(**_place(), replicas=replicas, ipus_per_replica=ipus_per_replica, ipus=ipus)

    def ticks(self, *args: Any, **kwargs: Any) -> flight.Report | None:
        return flight.report_of(*args, **kwargs)

    def planned(self, updates: int | None) -> None:
        beacon = record.current()
        if updates is None or beacon is None:
            record.note(planned_after=None, planned_updates=None)
        else:
            after = beacon.updates + sum(of_updates for _, of_updates, _ in self._unfinished)
            record.note(planned_after=after, planned_updates=after + updates)

    def dispatching(self, window: Any, arguments: Tree) -> None:
        beacon = record.current()
        # without poprun nobody asks who has begun, and looking at hundreds of arguments takes time
        if beacon is None or not beacon.launched or window in self._begun:
            return
        leaves = jax.tree.leaves(arguments)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return
        self._begun.add(window)
        if any(map(_is_on_all_instances, leaves)):
            self._joint.add(window)
        beacon.begun(joint=window in self._joint)

    def dispatched(self, window: Any, outputs: list[Value], updates: int, samples: int) -> None:
        beacon = record.current()
        if beacon is None:
            return
        if window not in self._begun:
            beacon.begun()
        elif window in self._joint:
            beacon.dispatched()
        self._begun.discard(window)
        self._unfinished.append((outputs, updates, samples))
        self._count(beacon)

    def waited(self) -> None:
        if self._unfinished and (beacon := record.current()) is not None:
            self._count(beacon)

    def finish(self) -> None:
        """Wait for all steps that were dispatched, so that the beacon reports their final number."""
        for outputs, _, _ in [*self._unfinished]:
            jax.block_until_ready([output for output in outputs if not output.is_deleted()])
        self.waited()

    def _count(self, beacon: Beacon) -> None:
        """Count which of the oldest steps have finished."""
        steps = updates = samples = 0
        while self._unfinished and all(one.is_deleted() or one.is_ready() for one in self._unfinished[0][0]):
            _, of_updates, of_samples = self._unfinished.popleft()
            steps, updates, samples = steps + 1, updates + of_updates, samples + of_samples
        if steps:
            now = time.monotonic()
            if self._devices_tell and now >= self._ask_memory_at:
                held, limit = _device_bytes()
                beacon.device_bytes = held
                if limit:
                    record.note(device_limit_bytes=limit)
                self._ask_memory_at, self._devices_tell = now + _ASK_MEMORY_EVERY, held > 0
            beacon.finished(steps, updates, samples)


def _is_on_all_instances(leaf: Value) -> bool:
    """Return whether there are several instances, and a leaf is on devices of each."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return False
    return len({device.process_index for device in leaf.sharding.device_set}) == jax.process_count()


def _device_bytes() -> tuple[int, int]:
    """Return how many bytes are in use on this process's devices, and how many there can be.

    Both are 0 if the devices do not report them, as on a CPU. The second is 0 if only some report it.
    """
    try:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return 0, 0
    limits = [found.get("bytes_limit", 0) for found in stats]
    return sum(found.get("bytes_in_use", 0) for found in stats), sum(limits) if all(limits) else 0


def _place() -> dict[str, Json]:
    return {"instance": jax.process_index(), "instances": jax.process_count()}


def _described(device: Device) -> dict[str, Json]:
    return {"id": device.id, "platform": device.platform, "kind": device.device_kind}


class _Compilations:
    """Put a beacon into the phase `COMPILING` while jax traces, lowers and compiles; each only reports its own end."""

    def __init__(self, beacon: Beacon):
        self._beacon, self._stepping = beacon, Phase.STARTING

    def __call__(self, event: str, duration_secs: float, **_: object) -> None:
        if not event.startswith(_COMPILE) or self._beacon.pid != os.getpid():
            return
        phase = self._beacon.phase
        if event == _BACKEND_COMPILE:
            if phase is Phase.COMPILING:
                self._beacon.enter(self._stepping)
        elif phase in (Phase.STARTING, Phase.STEPPING):
            self._stepping = phase
            self._beacon.enter(Phase.COMPILING)


OWN: Final = OwnProcess()
facts.listen(OWN)
os.register_at_fork(after_in_child=OWN.forget)
