"""Say what a host of instances can be asked for, whether it is this one (`_local`) or another (`_remote`).

Nothing here decides anything. A host does what the supervisor asks for, and says what happens (`_events`). An agent
does the same for a supervisor on another host, so that there is one way to supervise.

    host.begin(launch)     run folder, watcher, one process group per instance
    host.events()          what has happened since it was last asked; never waits
    host.send(SIGTERM)     to the process groups
    host.end(0.5)          nothing is left: no process, no folder

Nothing here imports jax.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from ipu_jax.distributed.launcher.events import Event
from ipu_jax.distributed.launcher.launch import Launch

STACKS_WITHIN: Final = 1.0
"""Seconds that an instance has to write its stacks."""


class Host(Protocol):
    """A host of instances, this one or another."""

    name: str

    @property
    def lost(self) -> bool:
        """Return whether nothing more can be asked of it."""
        ...

    def files(self) -> list[int]:
        """Return what to wait on until something may have happened."""
        ...

    def events(self) -> list[Event]:
        """Return what has happened, without waiting."""
        ...

    def prepare(self, bind: str, port: int) -> None:
        """Look for a port that is free (or whether this one is) at an address: `Ready` or `Refused` follows."""
        ...

    def begin(self, launch: Launch) -> None:
        """Start the instances: a `Started` or `NotStarted` follows for each."""
        ...

    def send(self, number: int, instances: Iterable[int] | None = None) -> None:
        """Send a signal to the process groups of some instances, or of all."""
        ...

    def ask_stacks(self, instance: int) -> None:
        """Ask an instance for its Python stacks: `Stacks` follows."""
        ...

    def hold(self, on: bool) -> None:
        """Leave what the instances write in their pipes, or read it again."""
        ...

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt, after a time in which it may end by itself: `Ended` follows."""
        ...

    def close(self) -> None:
        """Let go of the host, at once, after a last `end`."""
        ...
