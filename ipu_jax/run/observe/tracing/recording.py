"""Record a few steps of a training run: `with trace(folder) as recording`.

    call         1         2    3    4        5 ...
                 warm-up   recorded, steps=3  at full speed again
                        ^                  ^
                        profiler starts    and stops

The program that runs is the same with and without a recording: nothing is compiled for it. XLA's profiler says when
each device ran each operation. The names of the tasks (`engine/labels.py`) say to which task an operation belongs.
"""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from ipu_jax.base import facts
from ipu_jax.base.annotations import Function, Json, Tree, Value
from ipu_jax.base.checks import check_count
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.distributed import popdist
from ipu_jax.run.observe.tracing import _chrome
from ipu_jax.run.observe.tracing._assembling import gathered, main_plan, merged, recorded_here
from ipu_jax.run.observe.tracing._profile import DeviceRun, Profiler
from ipu_jax.run.observe.tracing.timeline import Timeline, TraceError
from ipu_jax.run.observe.tracing.trace_report import TraceReport, make_report

FILE: Final = "trace.json.gz"


def trace(folder: str | os.PathLike[str], *, steps: int = 3) -> "Recording":
    """Record a few steps of the loop inside `with trace(folder) as recording:`, on all instances.

    The first call of a `TrainStep` or a `Pipeline` inside is not recorded: it compiles. The recording begins when that
    call has finished, and ends when `steps` weight updates have finished. A call of a `TrainStep` counts as the number
    of updates that it makes (`device_iterations`), `Pipeline.value_and_grad` as one, `loss` and `predict` as none.
    Programs of your own, such as a jitted loop over steps, count if you run them with `recording.run`.

    Where an IPU is a group of devices, the trace shows the first device of each group, and says so.

    At the end, communicates what each instance recorded: a few kilobytes.

    Args:
        folder: where instance 0 writes `trace.json.gz`, replacing an existing one; made if it is missing. During the
            recording, XLA writes its profile there, on every instance.
        steps: how many weight updates to record.

    Returns:
        The `Recording`. It has a timeline and a report once it has finished.

    Raises:
        ValueError: the folder cannot be written to, `steps` is not a count, another trace is being recorded, or the
            devices are not CPU devices.
    """
    return Recording(folder, steps)


class Recording(Shown, facts.Listener):
    """Record steps inside a `with`; `trace` makes it.

    Attributes:
        path: the file that instance 0 writes.
        steps: how many weight updates to record.
    """

    def __init__(self, folder: str | os.PathLike[str], steps: int):
        self.steps = check_count("steps", steps)
        self.path = _writable(folder) / FILE
        if jax.default_backend() != "cpu":
            raise ValueError(
                f"trace: the devices are of the platform {jax.default_backend()!r}, and only the profile of XLA's CPU "
                "backend is understood: record with jax.profiler.trace, whose operations have the tasks' names"
            )
        self._profiler = Profiler(self.path.parent)
        self._state: Literal["new", "waiting", "recording", "recorded", "finished"] = "new"
        self._known: set[int] = set()
        self._meshes: list[Mesh] = []
        self._counted = 0
        self._last: list[Value] = []
        self._runs: list[DeviceRun] = []
        self._error: Exception | None = None
        self._timeline: Timeline | None = None
        self._report: TraceReport | None = None

    @property
    def timeline(self) -> Timeline:
        """Return the measured timeline.

        Raises:
            TraceError: the recording has not finished.
        """
        if self._timeline is None:
            raise TraceError("the recording has not finished: leave the `with` first, or call finish()")
        return self._timeline

    @property
    def report(self) -> TraceReport:
        """Return the summary of the timeline; `print` it.

        Raises:
            TraceError: as in `timeline`.
        """
        if self._report is None:
            self._report = make_report(self.timeline)
        return self._report

    @property
    def is_recorded(self) -> bool:
        """Return whether all steps were recorded; `finish` can be called then."""
        return self._state in ("recorded", "finished")

    def _shown(self) -> list[str | Table]:
        if self._timeline is None:
            return [f"Recording({counted(self.steps, 'step')}, to {str(self.path)!r}, {self._state})"]
        return [*self.report._shown(), f"Trace: {self.path}"]

    def __enter__(self) -> "Recording":
        if self._state != "new":
            raise ValueError("a recording is for one `with`: call trace(folder) again")
        if any(isinstance(listener, Recording) for listener in facts.listeners()):
            raise ValueError("another trace is being recorded: leave its `with` first")
        self._state = "waiting"
        facts.listen(self)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._stop()
            self._state = "finished"

    def run(self, program: Function, *args: Value, steps: int = 1) -> Tree:
        """Run a program of your own that makes `steps` weight updates, and return its result.

        Its first run is the warm-up if nothing has run before.

        Args:
            program: such as a jitted function, or the result of its `lower(...).compile()`.
            args: its arguments.
            steps: how many weight updates it makes.
        """
        outputs = program(*args)
        self.dispatched(program, jax.tree.leaves(outputs), steps)
        return outputs

    def dispatched(self, window: Any, outputs: list[Value], updates: int, samples: int = 0) -> None:
        """Take note of a program that was dispatched; start or stop the profiler."""
        if self._state not in ("waiting", "recording"):
            return
        for output in outputs:
            sharding = getattr(output, "sharding", None)
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            if isinstance(mesh, Mesh) and {REPLICA_AXIS, IPU_AXIS} <= {*mesh.axis_names} and mesh not in self._meshes:
                self._meshes.append(mesh)
        is_first = id(window) not in self._known
        self._known.add(id(window))
        self._last = outputs
        if self._state == "waiting":
            _wait(outputs)  # a run that has already begun would be recorded only in part
            try:
                self._profiler.start()
                self._state = "recording"
            except Exception as error:  # the loop goes on; `finish` raises it
                self._error, self._state = error, "recorded"
            return
        self._counted += 0 if is_first else updates
        if self._counted >= self.steps:
            _wait(outputs)
            self._stop()

    def finish(self) -> None:
        """End the recording, gather what all instances recorded, and write the file. All instances must call it.

        Leaving the `with` calls it.

        Raises:
            TraceError: no step was recorded, the recording does not fit the plan, or the file cannot be written. The
                first two are raised on every instance, the last one on instance 0.
        """
        if self._state in ("new", "finished"):
            return
        _wait(self._last)  # the profile of a step must be complete to be read
        self._stop()
        self._state = "finished"
        with facts.during("reading a trace"):
            parts = gathered(self._recorded())
            for instance, part in enumerate(parts):
                if "error" in part.recorded:
                    where = f"instance {instance}: " if len(parts) > 1 else ""
                    raise TraceError(f"{where}{part.recorded['error']}") from self._error
            self._timeline = merged(self._plan, parts)
            if popdist.get_instance_index() == 0:
                try:
                    _chrome.write(self._timeline, self.path)
                except OSError as error:
                    raise TraceError(f"{self.path} cannot be written ({error.strerror}): free some space") from error

    def _stop(self) -> None:
        """Stop the profiler if it runs, and read what it recorded."""
        facts.stop_listening(self)
        self._last = []
        if self._state != "recording":
            return
        self._state = "recorded"
        with facts.during("reading a profile"):
            try:
                self._profiler.stop()
                self._runs = self._profiler.runs()
            except Exception as error:  # the loop goes on; `finish` raises it
                self._error = error
            finally:
                self._profiler.discard()

    def _recorded(self) -> dict[str, Json]:
        """Return what this instance recorded, as `recorded_here` does, or its error."""
        try:
            if self._error is not None:
                raise TraceError(f"the profiler failed: {self._error}")
            if not self._runs and not self._counted:
                raise TraceError(
                    f"no step was recorded: {len(self._known)} programs ran inside, and the first call is not "
                    "recorded; make at least two calls of a TrainStep or of Pipeline.value_and_grad"
                )
            self._plan = main_plan(self._runs)
            return recorded_here(self._plan, self._runs, self._meshes, self.steps)
        except Exception as error:  # the other instances wait: all must be informed
            self._error = self._error or error
            return {"error": str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"}


def _writable(folder: Any) -> Path:
    """Return a folder as a path; make the folder if it is missing.

    Raises:
        ValueError: it is not a folder, or nothing can be written there.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"folder={folder!r} is not a folder: give a path")
    path = Path(os.fspath(folder))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
    except OSError as error:
        raise ValueError(
            f"folder={str(path)!r} cannot be written to ({error.strerror}): give a folder in which files can be made"
        ) from error
    return path


def _wait(outputs: list[Value]) -> None:
    with contextlib.suppress(ValueError):  # nothing that can be waited for
        jax.block_until_ready([o for o in outputs if isinstance(o, jax.Array) and not o.is_deleted()])
