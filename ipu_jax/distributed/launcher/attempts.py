"""Supervise attempts: start the instances, watch them, end them all when one fails, is stuck, or the user stops.

    running --a failure, or a stuck instance--> stopping: SIGTERM --grace--> SIGKILL --> gone --> another attempt
       |                                            ^
       +------- Ctrl-C, SIGTERM: passed on -------> leaving

One loop does all of this. It waits for output, signals and exits, and reads the beacons several times per second.

A run is restarted after a failure as often as the user allows and as long as it makes progress. Every attempt has a
new coordinator port and a new run folder, since the previous ones may still be in use. It also has a new token, so that
instances of other runs and attempts are strangers.

Nothing here imports jax.
"""

import dataclasses
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ipu_jax.distributed.launcher import causes, culprits
from ipu_jax.distributed.launcher.culprits import EarlyEnd, Failure, Judge, Stuck
from ipu_jax.distributed.launcher.display import STOPPING, Display, Signals
from ipu_jax.distributed.launcher.hosts import (
    FULL,
    STACKS_WITHIN,
    Beat,
    Ended,
    Event,
    Exited,
    Lost,
    NotStarted,
    Output,
    Prepared,
    Stacks,
    Started,
)
from ipu_jax.distributed.launcher.options import GRACE, Options
from ipu_jax.distributed.launcher.ssh import Host
from ipu_jax.distributed.launcher.topology import Launch, Topology, ranges

STUCK: Final = 124
"""The exit status after an instance was stuck, as with the command `timeout`."""
LOST_HOST: Final = 255
"""The exit status after a host could not be reached or was lost, as with `ssh`."""
NOT_STARTED: Final = (2, 126, 127)
"""Exit statuses of a wrong command line: another attempt would end in the same way."""
LEAVING: Final = 30.0
"""Seconds that a program has to end after the user has sent a signal to poprun, unless --grace says otherwise."""

_LOOK_EVERY: Final = 0.05
_JUMP: Final = 2.0
_ENDED_WITHIN: Final = 15.0
_STRAYS: Final = 0.5


@dataclasses.dataclass
class Outcome:
    """Describe the end of an attempt.

    Attributes:
        status: poprun's exit status, if this attempt is the last.
        again: whether another attempt may end differently.
        port_taken: whether the coordinator's port was the only problem.
        stepped: whether every instance has finished a step; None if none of them writes a beacon.
        seconds: how long it took.
    """

    status: int
    again: bool = False
    port_taken: bool = False
    stepped: bool | None = None
    seconds: float = 0.0


class Attempt:
    """One start of all instances, on hosts in the order of the topology, after `number` others."""

    def __init__(self, of: "SupervisedRun", hosts: Sequence[Host], number: int):
        self._topology, self._hosts, self._number, options = of.topology, hosts, number, of.options
        self._display, self._signals, self._verbosity = of.display, of.signals, options.verbose
        self._grace = GRACE if options.grace is None else options.grace  # after a failure
        self._leaving = LEAVING if options.grace is None else options.grace  # after a signal from the user
        self._judge = Judge(options.stall_timeout, options.compile_timeout, options.start_timeout)
        self._pids: dict[int, int] = {}
        self._failures: dict[int, Failure] = {}
        self._records: dict[int, Failure] = {}  # of instances that have raised an exception, and are still alive
        self._stuck: Stuck | None = None
        self._flights, self._asked = options.flight_recorder, set[int]()
        self._stacks: dict[int, Stacks] = {}
        self._gone: set[str] = set()
        self._outcome: Outcome | None = None
        self._report: list[str] = []
        self._kill_at = self._give_up_at = self._stacks_until = float("inf")
        self._failing_since = float("inf")  # when the first failed exit was seen
        self._ending = self._held = False
        self._passed_on = 0
        self._began = self._looked = time.monotonic()

    def run(self, launches: Sequence[Launch]) -> Outcome:
        """Run the attempt to its end, with a launch for each host. If it fails, say why."""
        self._display.begin(self._number)
        for host, launch in zip(self._hosts, launches, strict=True):
            host.begin(launch)
        while len(self._gone) < len(self._hosts) and time.monotonic() < self._give_up_at:
            self._turn()
        self._display.close()
        self._display.say(*self._report)
        outcome = self._outcome or self._natural()
        outcome.seconds = time.monotonic() - self._began
        if beacons := self._judge.progress.values():
            outcome.stepped = len(beacons) == self._topology.instances and all(each.finished for each in beacons)
        return outcome

    def _turn(self) -> None:
        """Wait until something happens, and react to it."""
        files = [file for host in self._hosts for file in host.files()]
        taken = self._signals.wait(files, _LOOK_EVERY)
        now = time.monotonic()
        if now - self._looked > _JUMP or self._held:
            self._judge.resumed(now)  # we were suspended, or held the instances up ourselves
        self._looked = now
        for number in taken:
            self._signal(number)
        for host in self._hosts:
            for event in host.events():
                self._happened(host, event, now)
        if not self._held:
            self._display.tick()
        self._hold(now)
        self._advance(now)

    def _happened(self, host: Host, event: Event, now: float) -> None:
        match event:
            case Output(instance, stream, data):
                if len(data) >= FULL:
                    self._judge.waited_for_us(now)
                self._display.show(instance, stream, data)
            case Beat():
                self._beat(event, now)
            case Started():
                self._started(event, now)
            case Exited():
                self._exited(event, now)
            case NotStarted(instance, status, reason):
                self._decide(Outcome(status), [f"instance {instance} cannot be started: {reason}"], at_once=True)
            case Stacks():
                self._stacks[event.instance] = event
            case Ended(left):
                self._gone.add(host.name)
                if left:
                    pids = ", ".join(map(str, left))
                    self._report.append(f"host {host.name}: cannot be killed, and left behind: processes {pids}")
            case Lost(reason):
                self._gone.add(host.name)
                self._decide(Outcome(LOST_HOST, again=True), [f"host {host.name}: {reason}"])
            case _:
                pass

    def _started(self, event: Started, now: float) -> None:
        self._pids[event.instance] = event.pid
        self._judge.started(event.instance, now)
        place = self._topology.place(event.instance, "", "", self._number)
        ipus = ranges(range(event.instance * place.local_ipus, (event.instance + 1) * place.local_ipus))
        replicas = ranges(range(place.first_replica, place.first_replica + place.local_replicas))
        cores = f" cores {ranges(event.cores)}" if event.cores else ""
        self._verbose(
            f"attempt {self._number}: instance {event.instance} pid {event.pid} replicas {replicas} IPUs {ipus} "
            f"threads {event.threads}{cores}"
        )

    def _beat(self, event: Beat, now: float) -> None:
        self._pids[event.instance] = event.pid
        if event.progress is not None and event.instance not in self._judge.progress:
            self._verbose(f"instance {event.instance} writes a beacon: its steps are supervised", level=2)
        if event.error is not None:
            self._records[event.instance] = culprits.failure_of(event.instance, None, now, event.error)
        self._judge.beat(event, now)

    def _exited(self, event: Exited, now: float) -> None:
        instance, status = event.instance, event.status
        self._judge.exited(instance, status, now)
        self._records.pop(instance, None)
        if status and self._passed_on == 0 and self._outcome is None:
            self._failures[instance] = culprits.failure_of(instance, status, event.at, event.error)
            self._failing_since = min(self._failing_since, now)
        how = f"was ended by {causes.signal_name(-status)}" if status < 0 else f"exited with status {status}"
        beacon = "" if instance in self._judge.progress else "; it had no beacon, so that only its exit was supervised"
        self._verbose(f"instance {instance} {how}, seen at {event.at:.3f} s of the monotonic clock{beacon}")

    def _advance(self, now: float) -> None:
        """Take the steps that are due."""
        if self._display.writer.error is not None and self._outcome is None:
            self._decide(Outcome(0), [], at_once=True)  # the command reports the output error
        if self._outcome is None and not self._passed_on:
            self._look_for_failure(now)
        everyone = len(self._judge.statuses) == self._topology.instances
        done = everyone and (self._outcome is not None or self._passed_on != 0 or not self._failures)
        if not self._ending and (done or now >= self._kill_at):
            self._ending, self._give_up_at = True, now + _ENDED_WITHIN
            for host in self._hosts:
                if host.name not in self._gone:
                    host.end(_STRAYS if done else 0)

    def _look_for_failure(self, now: float) -> None:
        if self._failures:
            if now >= self._failing_since + culprits.MOMENT or len(self._judge.statuses) == self._topology.instances:
                self._failed(culprits.first([*self._failures.values(), *self._records.values()]))
        elif self._stuck is not None:
            if self._stacks.keys() >= self._asked - self._judge.statuses.keys() or now >= self._stacks_until:
                self._say_stuck(self._stuck)
        elif (early := self._judge.early(now)) is not None:
            self._decide(Outcome(1, again=True), self._told_of(early))
        elif (stuck := self._judge.stuck(now)) is not None:
            self._stuck, self._stacks_until = stuck, now + STACKS_WITHIN + 1
            self._verbose(f"instance {stuck.instance} is stuck, seen at {now:.3f} s of the monotonic clock")
            everyone = range(self._topology.instances) if self._flights else ()
            self._asked = {stuck.instance, *everyone} - self._judge.statuses.keys()
            for instance in self._asked:
                self._host_of(instance).ask_stacks(instance)

    def _failed(self, failure: Failure) -> None:
        instance, error = failure.instance, failure.error
        progress = self._judge.progress.get(instance)
        finished = None if progress is None else progress.finished
        lines = [] if error else self._display.tail(instance) or self._display.tail(instance, "stdout")
        # another one may have said what has ended it
        words = (line for each in self._failures for line in self._display.tail(each, seen=True))
        cause = causes.cause_of(words) if failure.looks_like_a_lost_peer else ""
        said = causes.about_failure(failure, self._host_of(instance).name, self._pids[instance], finished, lines, cause)
        status = failure.exit_status
        if failure.looks_like_a_lost_peer:
            early = self._judge.needed_by(instance, time.monotonic()) or self._judge.left(instance)
            if early is not None:
                said, status = [*self._told_of(early), *said], 1
        taken = error is not None and error.type == culprits.PORT_TAKEN
        self._decide(Outcome(status, again=status not in NOT_STARTED, port_taken=taken), said)

    def _told_of(self, early: EarlyEnd) -> list[str]:
        lines = self._display.tail(early.instance) or self._display.tail(early.instance, "stdout")
        said = causes.about_early_end(early, self._host_of(early.instance).name, self._pids[early.instance])
        return [*said, *causes.quoted("its last lines", lines)]

    def _say_stuck(self, stuck: Stuck) -> None:
        stuck = self._judge.by_ticks(stuck, {i: seen.ticks for i, seen in self._stacks.items() if seen.ticks})
        instance = stuck.instance
        lines = self._display.tail(instance, seen=True)[-5:] or self._display.tail(instance, "stdout", seen=True)[-5:]
        stacks = self._stacks[instance].text if instance in self._stacks else ""
        said = causes.about_stall(stuck, self._host_of(instance).name, stacks, lines)
        for other, seen in sorted(self._stacks.items()):
            said += causes.quoted(f"what the IPUs of instance {other} do", seen.flight)
        if self._judge.statuses:
            gone = ranges(sorted(self._judge.statuses))
            said.append(f"  of the other instances, {gone} had exited with status 0: it may have waited for them")
        self._decide(Outcome(STUCK, again=True), said)

    def _decide(self, outcome: Outcome, said: list[str], *, at_once: bool = False) -> None:
        """End the attempt with an outcome, unless it already has one."""
        if self._outcome is not None:
            return
        self._outcome, self._report = outcome, said
        now = time.monotonic()
        left = self._topology.instances - len(self._judge.statuses)
        if left and said:
            self._verbose(f"stopping {left} instances, at {now:.3f} s of the monotonic clock")
        if not at_once:
            self._send(signal.SIGCONT, signal.SIGTERM)
        self._kill_at = now if at_once else min(self._kill_at, now + self._grace)

    def _natural(self) -> Outcome:
        """Return the outcome of an attempt whose instances have all exited, with 0 or after a signal from the user."""
        ended_well = all(status == 0 for status in self._judge.statuses.values()) and bool(self._judge.statuses)
        if self._passed_on == 0 or (ended_well and self._passed_on != signal.SIGINT):
            return Outcome(0)
        return Outcome(128 + self._passed_on)

    def _signal(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGTSTP:
            self._send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._looked = time.monotonic()
            self._send(signal.SIGCONT)
            self._judge.resumed(self._looked)
        elif number == signal.SIGCONT:
            self._judge.resumed(now)
        elif number == signal.SIGWINCH:
            self._display.resize()
        elif number in STOPPING and not self._passed_on and self._outcome is None:
            self._passed_on, self._kill_at = number, now + self._leaving
            self._send(signal.SIGCONT, number)
            name, may = causes.signal_name(number), f"they may take {self._leaving:g} s, and a second one kills them"
            self._display.say(f"{name} was passed on to all instances: {may}")
        elif number in STOPPING:
            if self._outcome is not None:
                self._outcome.again = False
            self._kill_at = now

    def _send(self, *numbers: int) -> None:
        for number in numbers:
            for host in self._hosts:
                if host.name not in self._gone:
                    host.send(number)

    def _hold(self, now: float) -> None:
        """Make the instances wait while the reader of our output falls behind, without counting that against them."""
        if self._display.writer.full != self._held and (self._display.writer.full or self._display.writer.low):
            self._held = not self._held
            self._judge.resumed(now)
            self._display.resume()
            for host in self._hosts:
                host.hold(self._held)

    def _host_of(self, instance: int) -> Host:
        return self._hosts[self._topology.hosts.index(self._topology.host_of(instance))]

    def _verbose(self, line: str, level: int = 1) -> None:
        if self._verbosity >= level:
            self._display.say(line)


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
        return Attempt(self, hosts, number).run(self.launches(port, number, secrets.token_hex(16)))

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
            has_come_on = outcome.seconds >= LONG if outcome.stepped is None else outcome.stepped
            self._fruitless = 0 if has_come_on else self._fruitless + 1
        if self._restarts == self._most:
            if self._most:
                self.last_words = [f"no restart is left: --max-restarts {self._most}"]
            return None
        if self._fruitless == FRUITLESS:
            self.last_words = [f"{FRUITLESS} restarts in a row have finished no step: there is no other"]
            return None
        self._restarts += 1
        return f"restart {self._restarts} of {self._most}"
