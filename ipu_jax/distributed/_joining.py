"""Connect the instances of a run through `jax.distributed`, however they were started, and let them be supervised.

    a compilation begins, ends      -> phase of the beacon         so that it is not taken for a stuck step
    SIGUSR1                         -> stacks                      of all threads, even if one holds the lock
    an uncaught exception           -> error.json, phase FAILED    then the process ends at once, with its exit code
    the same, without a launcher    -> waits for a moment          so that all can say why if all have failed
    the end of the program          -> phase ENDING                until the others have ended, too

Otherwise, a process that raises would wait five minutes in jax's barrier at exit, and lose its exit code.
"""

import atexit
import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import jax
from jax._src import compiler, distributed  # the cache's writer and the coordination service's client: not exported
from jax._src.clusters import ClusterEnv  # jax exports it from nowhere else

from ipu_jax.base import opening
from ipu_jax.base.annotations import Json
from ipu_jax.distributed import board
from ipu_jax.distributed._rendezvous import fingerprint, meet, refusal
from ipu_jax.distributed.environment import COORDINATOR, COORDINATOR_BIND, TOKEN, InstancePlace, cache_of
from ipu_jax.distributed.errors import difference
from ipu_jax.distributed.processes import listener, record
from ipu_jax.distributed.processes.beacons import Beacon, Phase

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
        prepare()
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
        prepare()
        with record.meeting("in popdist.init", seconds + board.MARGIN):
            meet(place, fingerprint(place, flags=flags), seconds=seconds)
        _joined = place


_LONGEST_MESSAGE: Final = 4000
_LONGEST_TRACE: Final = 50_000  # poprun reads no more than a megabyte
_END_SECONDS: Final = 3600.0
_LEAVE_SECONDS: Final = 5.0
_LEAVE_STOPPED_SECONDS: Final = 1.0  # a launcher kills the others of a failed instance half a second later
_STOPPED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)

_prepared_pid: int | None = None


def prepare() -> None:
    """Prepare this process, once. Without a launcher only its end is prepared."""
    global _prepared_pid
    if _prepared_pid == os.getpid():
        return
    _prepared_pid = os.getpid()
    listener.OWN.stepping()
    own = record.for_launcher()
    if own is not None and hasattr(faulthandler, "register"):
        with contextlib.suppress(OSError):
            # stays open until the process ends, since the signal handler writes to it
            faulthandler.register(signal.SIGUSR1, file=opening.created(own.folder / "stacks"), all_threads=True)
    _keep_executables()
    end = _End(record.current())
    sys.excepthook, end.usual_hook = end.hook, sys.excepthook
    sys.exit, end.usual_exit = end.exit, sys.exit
    atexit.register(end.at_exit)  # exit functions run in reverse order: this one before jax's barrier


def _keep_executables() -> None:
    """Let each instance write the programs that it compiles to the executable cache.

    jax lets only process 0 write, to spare the file systems of many hosts. But on a CPU the keys of programs differ
    between processes, so the others would compile everything at each start. A folder named by `cache_of` belongs to one
    instance, which can therefore write there.
    """
    write = getattr(compiler, "_cache_write", None)
    if write is None:
        return  # jax has changed: then the others compile

    def write_to_own(*args: Any, **kwargs: Any) -> Any:
        state = distributed.global_state
        folder = Path(jax.config.values["jax_compilation_cache_dir"] or ".")
        if folder != cache_of(folder.parent, state.process_id):
            return write(*args, **kwargs)
        own, state.process_id = state.process_id, 0
        try:
            return write(*args, **kwargs)
        finally:
            state.process_id = own

    compiler._cache_write = write_to_own  # pyright: ignore[reportAttributeAccessIssue]


def _wait_for_the_others() -> None:
    """Wait until all instances have reached their end: jax's own barrier waits five minutes at most."""
    client = distributed.global_state.client
    if client is not None:
        try:
            client.wait_at_barrier("ipu_jax: the end of the program", int(_END_SECONDS * 1000))
        except jax.errors.JaxRuntimeError as error:
            print(f"ipu_jax: the other instances have not ended: {error}", file=sys.stderr)


def _leave_with_the_others(seconds: float) -> None:
    """Leave jax's service together with the other instances, if all of them fail, or are stopped, now.

    An error in a program or its arguments occurs on all instances, and Ctrl-C is passed on to all. If instance 0 exits
    first, the service ends with it, and jax ends the others by SIGABRT before they have said why.
    """
    client = distributed.global_state.client
    if client is not None:
        with contextlib.suppress(Exception):  # the others go on, or have gone
            client.wait_at_barrier("ipu_jax: a failure", int(seconds * 1000))
            jax.distributed.shutdown()


class _End:
    """Ends the process: at once after an error, otherwise together with the other instances."""

    def __init__(self, beacon: Beacon | None):
        self._beacon, self._pid, self._code = beacon, os.getpid(), 0
        self.usual_hook: Any = None
        self.usual_exit: Any = None

    def hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.usual_hook(kind, error, trace)
        if self._pid == os.getpid():
            self._fail(error)

    def exit(self, status: Any = None, /) -> NoReturn:
        # the interpreter prints a text, and exits with code 1
        self._code = status if isinstance(status, int) else 0 if status is None else 1
        self.usual_exit(status)
        raise AssertionError("sys.exit returns never")

    def at_exit(self) -> None:
        if self._pid != os.getpid():
            return  # a forked process
        last = getattr(sys, "last_value", None)  # the interpreter sets it for an uncaught error
        if last is not None and not self._code:  # another hook has replaced ours
            self._fail(last)
        if self._code:
            if self._beacon is not None and self._beacon.phase is not Phase.FAILED:
                self._record("SystemExit", str(self._code), "")
            with contextlib.suppress(Exception):
                logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if self._beacon is None or not self._beacon.launched:
                _leave_with_the_others(_LEAVE_SECONDS)
            elif self._code in _STOPPED:
                _leave_with_the_others(_LEAVE_STOPPED_SECONDS)
            os._exit(self._code & 0xFF)
        if self._beacon is not None:
            if self._beacon.launched:
                with contextlib.suppress(Exception):  # from steps whose outputs the program has not read
                    listener.OWN.finish()
            self._beacon.enter(Phase.ENDING)
        _wait_for_the_others()

    def _fail(self, error: BaseException) -> None:
        self._code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        self._record(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def _record(self, kind: str, message: str, trace: str) -> None:
        found: dict[str, Json] = {"monotonic_ns": time.monotonic_ns(), "pid": self._pid, "type": kind}
        found |= {"message": message[:_LONGEST_MESSAGE], "traceback": trace[-_LONGEST_TRACE:]}
        if (own := record.for_launcher()) is not None:
            with contextlib.suppress(OSError):
                own.write("error.json", found)
            own.beacon.enter(Phase.FAILED, f"{kind}: {message}"[:100])
