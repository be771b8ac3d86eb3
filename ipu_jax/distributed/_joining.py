"""Connect the instances of a run through `jax.distributed`, however they were started."""

import functools
import warnings
from typing import Final

import jax

from ipu_jax.distributed import _instance, board
from ipu_jax.distributed._rendezvous import difference, fingerprint, meet, refusal
from ipu_jax.distributed.environment import Place
from ipu_jax.distributed.processes import beacons

# A launcher notices a dead instance long before. Without one, the others give up then; jax's default is 100 s.
_HEARTBEAT_SECONDS: Final = 30

_joined: Place | None = None
_is_compared = False


def connect(place: Place | None, *, seconds: float, flags: bool) -> None:
    """Connect the instances: see `popdist.init`.

    Args:
        place: from poprun's environment; None if jax finds the instances on its own.
        seconds: how long to wait for the others.
        flags: whether all must have the same command line.
    """
    global _is_compared
    initialize = functools.partial(
        jax.distributed.initialize,
        initialization_timeout=max(1, round(seconds)),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    if place is not None:
        join(place, seconds=seconds, flags=flags)
        if not jax.distributed.is_initialized():
            initialize(place.coordinator, place.instances, place.instance, coordinator_bind_address=place.bind)
        return
    if not jax.distributed.is_initialized():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about Kubernetes without its package: then nothing is detected
                initialize()
        except ValueError as error:
            if "should be defined" in str(error) or "must be defined" in str(error):
                return  # nothing was detected: one instance
            raise
    _instance.prepare()
    if not _is_compared:
        _is_compared = True
        fingerprints = board.agree("popdist.init", fingerprint(None, flags=flags), seconds=seconds)
        if problem := difference(dict(enumerate(fingerprints))):
            raise refusal(problem)


def join(place: Place, *, seconds: float, flags: bool = True) -> None:
    """Prepare this process for supervision, and wait until all instances have arrived. A second call does nothing.

    Communicates, and raises errors, as `meet` does; `flags` as in `connect`.
    """
    global _joined
    if _joined != place:
        _instance.prepare()
        with beacons.meeting("in popdist.init", seconds + board.MARGIN):
            meet(place, fingerprint(place, flags=flags), seconds=seconds)
        _joined = place
