"""Say what this process does, to whoever listens. Nobody needs to: then nothing happens.

    core, training, run        during("placing weights")    dispatched(window, outputs, ...)    mesh(mesh, stages)
                                         |
    facts                      each Listener that has registered
                                         |
    distributed/processes      the beacon for poprun, the record for ipu-monitor
    run/observe/tracing        a recording

Nothing here imports jax.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ipu_jax.base import status
from ipu_jax.base.annotations import Device, Tree, Value

LONG: Final = 600.0
"""Seconds that a piece of the library's own work on the host may take, such as placing weights."""


class Listener:
    """Hears facts. A listener defines the methods for the facts that it wants to hear."""

    def during(self, doing: str, seconds: float, waiting: bool) -> AbstractContextManager[Any]:
        """Hear that the host does other work than steps, or waits for other instances, until the context ends."""
        return contextlib.nullcontext()

    def devices(self, devices: Sequence[Device]) -> None:
        """Hear which devices of this process serve as IPUs."""

    def mesh(self, mesh: Any, stages: Sequence[tuple[str, int | None]]) -> None:
        """Hear of a mesh, and of the name and IPU of each stage on it (None for all IPUs), if known."""

    def ticks(
        self, program: str, role: str, replicas: int, tasks: Callable[[], list[list[str]]]
    ) -> Callable[[int, int, int], None] | None:
        """Hear that a program of the staged scan is traced, and return who hears of its ticks while it runs, if anyone.

        Args:
            program: its name. Programs of one name have the same tasks.
            role: its purpose, such as "training".
            replicas: their number.
            tasks: returns, per IPU and tick, the tasks in words; "" where the IPU is idle.

        Returns:
            `(replica, ipu, tick)`, called by each IPU of this process before the tick begins, and after the last tick
            with the number of ticks. Threads of the devices call it, at once: it may wait for nothing.
        """

    def stepping(self) -> None:
        """Hear that this process is about to run steps."""

    def planned(self, updates: int | None) -> None:
        """Hear how many weight updates a loop will make from now on; None if that is unknown, or at its end."""

    def dispatching(self, window: Any, arguments: Tree) -> None:
        """Hear that a window's next step is about to be dispatched with these arguments, if it says so at all."""

    def dispatched(self, window: Any, outputs: list[Value], updates: int, samples: int) -> None:
        """Hear of a step that was dispatched: arrays among its outputs, its weight updates, the examples in them."""

    def waited(self) -> None:
        """Hear that the host has waited for a step, so that others may have finished, too."""


_listeners: tuple[Listener, ...] = ()
_modules: list[str] = []


def listen(listener: Listener) -> None:
    """Let a listener hear facts from now on."""
    global _listeners
    _listeners = (*_listeners, listener)


def stop_listening(listener: Listener) -> None:
    """Let a listener hear nothing more."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)


def listen_from(module: str) -> None:
    """Import a module before the first fact is said; it calls `listen`."""
    _modules.append(module)


def listeners() -> tuple[Listener, ...]:
    """Return all listeners."""
    for module in [*_modules]:
        importlib.import_module(module)  # another thread waits here until it has been imported
    _modules.clear()
    return _listeners


def say(fact: Callable[[Listener], object]) -> None:
    """Say a fact: call its method on each listener."""
    for listener in listeners():
        fact(listener)


@contextlib.contextmanager
def during(doing: str, seconds: float = LONG, *, waiting: bool = False) -> Iterator[None]:
    """Say for a `with` block, or a function that this decorates, that the host does something else than steps.

    Args:
        doing: a few words.
        seconds: how long it may take.
        waiting: whether it waits for other instances, which may be stuck.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(status.during(f"waiting {doing}" if waiting else doing))
        for listener in listeners():
            stack.enter_context(listener.during(doing, seconds, waiting))
        yield
