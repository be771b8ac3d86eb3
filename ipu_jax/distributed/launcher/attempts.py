"""Restart a run after a failure, as often as the user allows and as long as it makes progress.

Every attempt has a new coordinator port and a new run folder, since the previous ones may still be in use. It also has
a new token, so that instances of other runs and attempts are strangers.

Nothing here imports jax.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ipu_jax.distributed.launcher.display import STOPPING, Display, Signals
from ipu_jax.distributed.launcher.hosts import Lost, Prepared
from ipu_jax.distributed.launcher.options import Options
from ipu_jax.distributed.launcher.ssh import Host
from ipu_jax.distributed.launcher.supervisor import LOST_HOST, Attempt, Outcome
from ipu_jax.distributed.launcher.topology import Launch, Topology

FRUITLESS: Final = 3
"""Successive restarts without progress after which poprun gives up."""
LONG: Final = 60.0
"""Seconds after which an attempt of a program without beacons counts as progress."""
_PREPARED_WITHIN: Final = 30.0
_PORT_WITHIN: Final = 5.0


class CannotStartError(Exception):
    """Raised if a host cannot do its part; `status` is poprun's exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class SupervisedRun:
    """Describe a run: its program, its hosts, and how it is supervised."""

    options: Options
    topology: Topology
    environments: Mapping[str, Mapping[str, str]]
    coordinator: str
    bind: str
    display: Display
    signals: Signals

    def to_its_end(self, hosts: list[Host], connect: Callable[[str], Host]) -> int:
        """Return the exit status of the last attempt. Before each new attempt, `connect` replaces lost hosts."""
        history = History(self.options.max_restarts)
        number = 0
        while True:
            port = self._port(hosts, number)
            outcome = self._attempt(hosts, number, port)
            why = history.restart(outcome, port_is_given=self.options.coordinator_port != 0)
            if why is None or self.display.writer.error is not None:
                self.display.say(*history.last_words)
                return outcome.status
            number += 1
            for i, host in enumerate(hosts):
                if host.lost:
                    host.close()
                    hosts[i] = connect(host.name)
            self.display.say(f"attempt {number}: {why}")

    def launches(self, port: int, number: int, token: str = "") -> list[Launch]:
        """Return what each host starts. With a token, only instances that know it can meet."""
        coordinator, bind = f"{self.coordinator}:{port}", f"{self.bind}:{port}"
        executables = self.options.executable_cache_path
        return [
            Launch(
                command=self.options.program,
                places=tuple(
                    dataclasses.replace(self.topology.place(instance, coordinator, bind, number), token=token)
                    for instance in self.topology.instances_of(name)
                ),
                environment=self.environments[name],
                numa_aware=self.options.numa_aware,
                executables=executables and str(executables),
            )
            for name in self.topology.hosts
        ]

    def _attempt(self, hosts: Sequence[Host], number: int, port: int) -> Outcome:
        if self.options.verbose:
            self.display.say(
                f"attempt {number}: {self.topology.instances} instances, coordinator {self.coordinator}:{port}, "
                f"max restarts {self.options.max_restarts}"
            )
        attempt = Attempt(self.topology, hosts, self.options, self.display, self.signals, number)
        return attempt.run(self.launches(port, number, secrets.token_hex(16)))

    def _port(self, hosts: Sequence[Host], number: int) -> int:
        """Wait until all hosts answer. Return the coordinator's port, which is free on the host of instance 0.

        The previous attempt may still use a given port for a moment.
        """
        ports, until = dict[str, int](), time.monotonic() + _PREPARED_WITHIN
        asked = (self.bind, self.options.coordinator_port, _PORT_WITHIN if number else 0)
        answers = [(host, [host.prepare(*(asked if host is hosts[0] else ("", 0, 0)))]) for host in hosts]
        while True:
            for host, answer in answers:
                for event in answer:
                    if isinstance(event, Prepared) and event.reason:
                        raise CannotStartError(f"{event.reason}: give another --coordinator-port or -bind", 2)
                    if isinstance(event, Prepared):
                        ports[host.name] = event.port
                    elif isinstance(event, Lost):
                        raise CannotStartError(f"host {host.name}: {event.reason}", LOST_HOST)
            waiting = [host for host in hosts if host.name not in ports]
            if not waiting:
                return ports[hosts[0].name]
            if time.monotonic() > until:
                raise CannotStartError(f"host {waiting[0].name} does not answer", LOST_HOST)
            taken = self.signals.wait([file for host in waiting for file in host.files()], 0.05)
            if stopping := [number for number in taken if number in STOPPING]:
                raise CannotStartError("stopped before anything was started", 128 + stopping[0])
            answers = [(host, host.events()) for host in waiting]


class History:
    """Decides whether there is another attempt.

    >>> history = History(max_restarts=1)
    >>> history.restart(Outcome(1, again=True, stepped=True))
    'restart 1 of 1'
    >>> history.restart(Outcome(1, again=True, stepped=True)), history.last_words
    (None, ['no restart is left: --max-restarts 1'])
    """

    def __init__(self, max_restarts: int):
        self._most = max_restarts
        self._restarts = self._fruitless = 0
        self._other_port = False
        self.last_words: list[str] = []
        """The lines that say why there is no other attempt."""

    def restart(self, outcome: Outcome, *, port_is_given: bool = False) -> str | None:
        """Return the reason for another attempt after this outcome, or None if there is none."""
        if not outcome.again:
            return None
        if outcome.port_taken and not port_is_given and not self._other_port:
            self._other_port = True  # only once: two taken ports in a row are not an accident
            return "another port, since the coordinator's was taken in the meantime"
        self._other_port = False
        if self._restarts:
            self._fruitless = 0 if _progress(outcome) else self._fruitless + 1
        if self._restarts == self._most:
            if self._most:
                self.last_words = [f"no restart is left: --max-restarts {self._most}"]
            return None
        if self._fruitless == FRUITLESS:
            self.last_words = [f"{FRUITLESS} restarts in a row have finished no step: there is no other"]
            return None
        self._restarts += 1
        return f"restart {self._restarts} of {self._most}"


def _progress(outcome: Outcome) -> bool:
    return outcome.seconds >= LONG if outcome.stepped is None else outcome.stepped
