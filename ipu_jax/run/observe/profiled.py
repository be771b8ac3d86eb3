"""Profile a program that does not ask for it: `IPU_JAX_TRACE=folder IPU_JAX_REPORT=run.html python train.py`.

fit              takes the two as its trace= and report=; a second fit writes run-2.html
any other loop   Profiled hears its steps: their losses and speed; the trace ends after three updates, and the page is
                 written when the process ends
"""

import atexit
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ipu_jax.base import facts
from ipu_jax.base.annotations import Value
from ipu_jax.base.cli.output_paths import check_file, reason_of
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.runs.log import RunLog
from ipu_jax.run.observe.runs.page import write_report
from ipu_jax.run.observe.tracing.recording import Recording, trace
from ipu_jax.run.observe.tracing.timeline import Timeline, TraceError

TRACE: Final = "IPU_JAX_TRACE"
REPORT: Final = "IPU_JAX_REPORT"


def asked(trace: Any, report: Any) -> tuple[Any, Any]:
    """Return what `fit` records and writes: what it was given, else what the environment says."""
    if _profiled is not None:
        _profiled.leave()
    trace = _recording() if trace is None else trace
    if report is None and (first := os.environ.get(REPORT)):
        _pages.append(first)
        report = Path(first)
        report = report if len(_pages) == 1 else report.with_stem(f"{report.stem}-{len(_pages)}")
    return trace, report


def _recording() -> Recording | None:
    """Return a recording for the first loop, if the environment asks for one."""
    folder = os.environ.get(TRACE)
    if not folder or _recorded:
        return None
    _recorded.append(folder)
    if jax.default_backend() != "cpu":
        warnings.warn(f"{TRACE}={folder}: only CPU devices are traced; use jax.profiler.trace", stacklevel=4)
        return None
    try:
        return trace(folder)
    except ValueError as error:
        raise ValueError(f"{TRACE}: {error}") from None


class Profiled(facts.Listener):
    """Hears the updates of a loop that is not `fit`'s, and writes what the environment asks for."""

    def __init__(self) -> None:
        self._report = os.environ.get(REPORT)
        if self._report:
            check_file(REPORT, Path(self._report), (".html",))
        self._log = RunLog()
        self._recording: Recording | None = None
        self._timeline: Timeline | None = None
        self._updates = self._samples = 0
        self._since = time.monotonic()
        self._pending: list[tuple[Value, int]] = []

    def leave(self) -> None:
        """Hear nothing more, and write nothing: `fit` does."""
        facts.stop_listening(self)
        atexit.unregister(self._end)
        if self._recording is not None:
            self._recording.__exit__(KeyboardInterrupt)

    def dispatched(self, window: Any, outputs: list[Value], updates: int, samples: int) -> None:
        if not updates:
            return
        if not self._log.digest.events:
            self._log.start()
            atexit.register(self._end)
            if not any(isinstance(listener, Recording) for listener in facts.listeners()):
                self._recording = _recording()
            if self._recording is not None:
                self._recording.__enter__()
                self._recording.dispatched(window, outputs, updates, samples)
        self._updates += updates
        self._samples += samples
        self._pending.append((outputs[0], self._updates))
        if time.monotonic() - self._since >= 1:
            self._note()
        if self._recording is not None and self._recording.is_recorded:
            self._finish()

    def _note(self, *, wait: bool = False) -> None:
        """Log the losses that are there, or all of them if it may wait, and the speed since the last time."""
        while self._pending and (wait or self._pending[0][0].is_deleted() or self._pending[0][0].is_ready()):
            loss, updates = self._pending.pop(0)
            is_here = not loss.is_deleted() and (loss.is_fully_addressable or loss.is_fully_replicated)
            if is_here and loss.size <= updates:
                self._log.event("losses", updates=updates, losses=np.ravel(loss).astype(float).tolist())
        seconds, samples = time.monotonic() - self._since, self._samples
        self._log.event("speed", updates=self._updates, samples_per_second=round(samples / seconds, 1))
        self._since, self._samples = time.monotonic(), 0

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        try:
            recording.finish()
            self._timeline = recording.timeline
            line = f"{recording.report}\nTrace: {recording.path}, for https://ui.perfetto.dev"
        except TraceError as error:
            line = f"{TRACE}: there is no trace: {error}"
        if popdist.get_instance_index() == 0:
            print(line, file=sys.stderr)

    def _end(self) -> None:
        """Write what is asked for, when the process ends. Other instances may have ended: it asks nothing of them."""
        facts.stop_listening(self)
        if self._recording is not None and jax.process_count() == 1:
            self._finish()
        if not self._report or popdist.get_instance_index():
            return
        self._note(wait=jax.process_count() == 1)
        self._log.event("end", reason="the process ended")
        try:
            write_report(self._report, self._log, title=Path(sys.argv[0]).name, timeline=self._timeline)
        except Exception as error:
            print(f"{REPORT}={self._report} was not written ({reason_of(error)})", file=sys.stderr)


_recorded: list[str] = []
_pages: list[str] = []
_profiled = None
if os.environ.get(TRACE) or os.environ.get(REPORT):
    facts.listen(_profiled := Profiled())
