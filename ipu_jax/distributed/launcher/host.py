"""Define the requests to a host of instances, whether it is this host (`local`) or another (`remote`).

Nothing here makes decisions. A host does what the supervisor asks for, and reports what happens (`events`). An agent
does the same for a supervisor on another host, so there is only one way to supervise.

    host.begin(launch)     run folder, watcher, one process group per instance
    host.events()          what has happened since the last call; never waits
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
        """Return whether the host is lost, and takes no more requests."""
        ...

    def files(self) -> list[int]:
        """Return the file descriptors to wait on for events."""
        ...

    def events(self) -> list[Event]:
        """Return what has happened since the last call, without waiting."""
        ...

    def prepare(self, bind: str, port: int) -> None:
        """Find a free port at an address, or check that the given one is free: `Ready` or `Refused` follows."""
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
        """Stop reading what the instances write to their pipes, or resume."""
        ...

    def end(self, patience: float) -> None:
        """Kill what is left of the attempt, after `patience` seconds to end on its own: `Ended` follows."""
        ...

    def close(self) -> None:
        """Release the host at once, after a last `end`."""
        ...
