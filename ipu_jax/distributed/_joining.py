"""Connect the instances of a run through `jax.distributed`, however they were started."""

import functools
import os
import warnings
from typing import Final

import jax
from jax._src.clusters import ClusterEnv  # jax exports it from nowhere else

from ipu_jax.distributed import _instance, board
from ipu_jax.distributed._rendezvous import fingerprint, meet, refusal
from ipu_jax.distributed.environment import COORDINATOR, COORDINATOR_BIND, TOKEN, InstancePlace
from ipu_jax.distributed.errors import difference
from ipu_jax.distributed.processes import beacons

# A launcher notices a dead instance long before. Without one, the others give up then; jax's default is 100 s.
_HEARTBEAT_SECONDS: Final = 30

_joined: InstancePlace | None = None
_is_compared = False


def connect(place: InstancePlace | None, *, seconds: float, flags: bool) -> None:
    """Connect the instances: see `popdist.init`.

    Args:
        place: from poprun's environment; None if jax finds the instances on its own.
        seconds: how long to wait for the others.
        flags: whether all must have the same command line.
    """
    global _is_compared
    is_connected = jax.distributed.is_initialized()
    place = place if place is not None or is_connected else _detected(seconds)
    if place is not None:
        join(place, seconds=seconds, flags=flags)
        if not is_connected:
            own = place.coordinator, place.instances, place.instance
            begin = functools.partial(jax.distributed.initialize, *own, coordinator_bind_address=place.bind)
            begin(initialization_timeout=max(1, round(seconds)), heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    elif is_connected and _joined is None and not _is_compared:  # by the program itself
        _instance.prepare()
        _is_compared = True
        fingerprints = board.agree("popdist.init", fingerprint(None, flags=flags), seconds=seconds)
        if problem := difference(dict(enumerate(fingerprints))):
            raise refusal(problem)


def _detected(seconds: float) -> InstancePlace | None:
    """Return the place that jax finds in the environment of another launcher; None for a program on its own.

    The instances meet under such a launcher, too, since jax's client ends the process by SIGABRT if one is missing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Kubernetes without its package: then nothing is detected
        address, instances, instance, _ = ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get(COORDINATOR), None, None, None, None, max(1, round(seconds))
        )
    if address is None or instances is None or instance is None:
        return None
    bind = os.environ.get(COORDINATOR_BIND, f"[::]:{address.rpartition(':')[2]}")  # as jax chooses it
    return InstancePlace(instance, instances, 0, instances, 1, address, bind, token=os.environ.get(TOKEN, ""))


def join(place: InstancePlace, *, seconds: float, flags: bool = True) -> None:
    """Prepare this process for supervision, and wait until all instances have arrived. A second call does nothing.

    Communicates, and raises errors, as `meet` does; `flags` as in `connect`.
    """
    global _joined
    if _joined != place:
        _instance.prepare()
        with beacons.meeting("in popdist.init", seconds + board.MARGIN):
            meet(place, fingerprint(place, flags=flags), seconds=seconds)
        _joined = place
