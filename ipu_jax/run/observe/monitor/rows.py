"""Describe what each process does: join its record with its CPU time, and judge whether it is stuck.

    state      stopped   the process is stopped (SIGSTOP, Ctrl-Z, a debugger)
               stuck     by poprun's rule (`distributed/launcher/culprits.py`): no step for much longer than steps take
               waiting   another instance of its run is stuck or stopped, and it makes no step
               running   otherwise; `doing` says what it does

Nothing here imports jax.
"""

import dataclasses
import os
import pwd
import time
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, Self, get_args

import psutil

from ipu_jax.base.terminal import printable
from ipu_jax.distributed.launcher.culprits import Judge, Stuck
from ipu_jax.distributed.launcher.hosts import Beat
from ipu_jax.distributed.processes.beacons import Phase, Reading
from ipu_jax.distributed.processes.identity import Identity
from ipu_jax.run.observe.monitor import records
from ipu_jax.run.observe.monitor.records import Ignored, Ipu, Record

State = Literal["stuck", "stopped", "waiting", "running"]

_Run = tuple[int, str | Identity]

COMPILING_LIMIT: Final = 1800.0
"""Seconds that a compilation may take, as by default under poprun."""

_LONGEST: Final = 1e10
"""A longer time in seconds is not shown as the time left."""
_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_DOING: Final = {Phase.SILENT: "no step yet", Phase.STARTING: "first step"}  # else the phase's name


@dataclasses.dataclass(frozen=True)
class ProcessRow:
    """Hold what is known about a process; the fields are the keys of `--json`, and docs/watching.md describes them."""

    pid: int
    user: str
    command: str
    state: State
    reason: str | None
    doing: str | None
    running_seconds: float
    run: str | None
    instance: int
    instances: int
    replicas: int | None
    ipus_per_replica: int | None
    ipus: tuple[Ipu, ...]
    planned_after: int | None
    planned_updates: int | None
    step: int | None
    steps_per_second: float | None
    samples_per_second: float | None
    last_step_seconds: float | None
    seconds_left: float | None
    busy_share: float | None
    rss_bytes: int
    device_bytes: int | None
    device_limit_bytes: int | None


# from the smallest; what is unknown comes last
SORTS: Final[dict[str, Callable[[ProcessRow], Any]]] = {
    "pid": lambda row: row.pid,
    "user": lambda row: row.user,
    "step": lambda row: None if row.step is None else -row.step,
    "speed": lambda row: None if row.steps_per_second is None else -row.steps_per_second,
    "memory": lambda row: -(row.device_bytes or row.rss_bytes),
    "busy": lambda row: None if row.busy_share is None else -row.busy_share,
    "left": lambda row: row.seconds_left,
    "state": lambda row: get_args(State).index(row.state),
}
"""The names of orders, and for each the value of a row by which it sorts."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Hold the result of one look, with its wall-clock time: a row for each process, and what was ignored."""

    at: float
    rows: tuple[ProcessRow, ...]
    ignored: tuple[Ignored, ...]

    def sorted(self, name: str | None) -> Self:
        """Return the look with its rows in the order of this name; None for the order by run and start."""
        if name is None:
            return self
        value = SORTS[name]
        rows = sorted(self.rows, key=lambda row: (value(row) is None, value(row) or 0))
        return dataclasses.replace(self, rows=tuple(rows))


class Watch:
    """Looks at the processes of this host repeatedly.

    Args:
        own: the identity of this process.
        users: numbers of users whose processes are shown; empty for all visible users.
        pids: numbers of processes that are shown; empty for all.
    """

    def __init__(self, own: Identity, users: Collection[int] = (), pids: Collection[int] = ()):
        self._own, self._users, self._pids = own, users, pids
        self._judges: dict[_Run, _RunJudge] = {}
        self._processes: dict[Identity, psutil.Process] = {}

    def look(self) -> Look:
        """Look once. Shares of CPU time are measured since the previous look, and unknown in the first one."""
        before = self._processes
        found, ignored = records.find(self._own, before)
        self._processes = {record.identity: record.process for record in found}
        now, at = time.monotonic(), time.time()
        runs: dict[_Run, list[Record]] = {}
        for record in found:
            # the instances of a run share the user and the run's name; a run without a name is one process
            runs.setdefault((record.uid, record.said.run or record.identity), []).append(record)
        self._judges = {run: self._judges.get(run) or _RunJudge() for run in runs}
        rows: list[ProcessRow] = []
        for run, members in runs.items():
            stuck = self._judges[run].stuck(members, now, at)
            rows += [
                _row(record, stuck, now, at, known=record.identity in before)
                for record in members
                if (not self._users or record.uid in self._users)
                and (not self._pids or record.identity.pid in self._pids)
            ]
        rows.sort(key=lambda row: (-row.running_seconds if row.run is None else 0.0, row.run or "", row.instance))
        return Look(at, tuple(rows), tuple(ignored))


class _RunJudge:
    """Judges the instances of one run, which poprun's rule identifies by numbers."""

    def __init__(self):
        self._judge = Judge(None, COMPILING_LIMIT)
        self._numbers: dict[Identity, int] = {}

    def stuck(self, members: list[Record], now: float, at: float) -> Stuck | None:
        """Return which process is stuck, and why; None if no process is."""
        for identity in self._numbers.keys() - {record.identity for record in members}:
            self._judge.exited(self._numbers.pop(identity), None, now)
        for record in members:
            if record.identity not in self._numbers:
                self._numbers[record.identity] = number = max(self._numbers.values(), default=-1) + 1
                self._judge.started(number, now - (at - record.seen["create_time"]))
            letter = "T" if record.seen["status"] in _STOPPED else "S"
            self._judge.beat(Beat(self._numbers[record.identity], record.identity.pid, letter, record.reading), now)
        return self._judge.stuck(now)


def _row(record: Record, stuck: Stuck | None, now: float, at: float, *, known: bool) -> ProcessRow:
    reading, said, seen = record.reading, record.said, record.seen
    state: State = "running"
    reason = None
    if seen["status"] in _STOPPED:
        state = "stopped"
    elif stuck is not None and stuck.pid == record.identity.pid:
        state = "stuck"
        reason = f"{stuck.doing} for {stuck.seconds:.0f} s, and may for {stuck.limit:.3g} s: {stuck.rule}"
    elif stuck is not None and reading is not None and reading.phase is Phase.STEPPING:
        state, reason = "waiting", f"for process {stuck.pid}"
    step = rates = last_step_seconds = seconds_left = None
    if reading is not None and reading.finished:
        step = reading.updates or reading.finished
        rates = _rates(reading) if state == "running" else (0.0, 0.0)
        last_step_seconds = max(0.0, now - reading.finished_at)
        left = -1 if said.planned_updates is None else said.planned_updates - reading.updates
        if left >= 0 and rates is not None and rates[0] > left / _LONGEST:
            seconds_left = left / rates[0]
    cores = len(seen["cpu_affinity"]) if "cpu_affinity" in seen else os.cpu_count() or 1
    own: dict[str, Any] = {**vars(said), "command": printable(" ".join(_short_names(said.command)))}
    return ProcessRow(
        **own,
        pid=record.identity.pid,
        user=user_name(record.uid),
        state=state,
        reason=reason,
        doing=None if reading is None else _doing(reading),
        running_seconds=max(0.0, at - seen["create_time"]),
        step=step,
        steps_per_second=rates and rates[0],
        samples_per_second=rates[1] if rates and reading is not None and reading.samples else None,
        last_step_seconds=last_step_seconds,
        seconds_left=seconds_left,
        busy_share=seen["cpu_percent"] / (100 * cores) if known else None,
        rss_bytes=seen["memory_info"].rss,
        device_bytes=reading.device_bytes or None if reading is not None else None,
    )


def _rates(reading: Reading) -> tuple[float, float] | None:
    """Return the recent rates of updates and examples per second; None before the second step."""
    seconds = reading.finished_at - reading.mark.at
    if seconds <= 0:
        return None
    return (reading.updates - reading.mark.updates) / seconds, (reading.samples - reading.mark.samples) / seconds


def _doing(reading: Reading) -> str:
    words = _DOING.get(reading.phase, reading.phase.name.lower())
    return printable(f"{words}: {reading.label}" if reading.label else words)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _short_names(words: tuple[str, ...]) -> list[str]:
    """Return a command without the folder of its program, and without the interpreter of a script or module.

    >>> _short_names(("/usr/bin/python3", "/home/me/bin/train", "--data", "/data/mnist"))
    ['train', '--data', '/data/mnist']
    >>> _short_names(("/usr/bin/python3", "-m", "train"))
    ['train']
    >>> _short_names(("/usr/bin/python3", "-c", "train()"))
    ['python3', '-c', 'train()']
    """
    if len(words) > 1 and "python" in os.path.basename(words[0]):
        if words[1] == "-m":
            words = words[2:]
        elif not words[1].startswith("-"):
            words = words[1:]
    return [os.path.basename(words[0]), *words[1:]] if words else []
