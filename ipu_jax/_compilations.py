"""Let a beacon tell of compilations, so that a step that is compiled is not taken for one that is stuck."""

import os
from typing import Any, Final

import jax.monitoring

from ipu_jax._beacon import Beacon, Phase

_BACKEND_COMPILE: Final = "/jax/core/compile/backend_compile_duration"
_COMPILE: Final = "/jax/core/compile/"

_told: Beacon | None = None


def tell(beacon: Beacon) -> None:
    """Let a beacon be in the phase `COMPILING` while jax compiles. A second call for it does nothing."""
    global _told
    if _told is not beacon:
        _told = beacon
        jax.monitoring.register_event_duration_secs_listener(_Compilations(beacon))


class _Compilations:
    """Listens to jax: a program is traced, lowered, then compiled; each of these reports its own end only."""

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
