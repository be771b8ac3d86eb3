"""Log what happens in a run, for programs to read: a line of JSON per event, and TensorBoard's files.

with RunLog("run.jsonl") as log:
    log.event("start", command=sys.argv, samples_per_update=256)
    for batch in feed:
        state, outputs = step(state, batch)
        log.event("losses", updates=n, losses=[float(outputs.loss)])

{"event": "losses", "time": "2026-05-04T10:20:30.123+00:00", "seconds": 4.21, "updates": 5, "losses": [2.31, ...]}
"""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Final

import jax

from ipu_jax.base.annotations import Json
from ipu_jax.base.cli.places import writable_folder
from ipu_jax.base.doors import public
from ipu_jax.base.showing import counted
from ipu_jax.base.version import __version__

__all__ = ["RunLog", "RunLogWarning"]

_PACKAGES: Final = ("jax", "jaxlib", "optax", "numpy")
NAMES_OF_EVENTS: Final = ("event", "time", "seconds")
"""What every event has."""
FACTS_OF_START: Final = ("command", "attempt", "instances", "devices", "versions")
"""What `RunLog.start` adds."""
_CURVES: Final = ("accuracy", "samples_per_second")
_NO_CURVES: Final = {*NAMES_OF_EVENTS, "updates", "epoch"}


class RunLogWarning(UserWarning):
    """Warns that a log could not be written; the run continues."""


@public
class RunLog:
    """Keeps the events of a run, and writes each one to a file at once, as a line of JSON.

    An existing file is continued: its events, from the run before it was stopped, are kept. If the log can no longer
    be written, for example on a full disk, the log gives one `RunLogWarning`, and the run continues.

    An event has "event", its name; "time", in UTC; "seconds" since the log was opened; and the caller's values.
    The caller chooses the names. `write_report` understands start, resumed, compiled, losses, evaluated, saved,
    skipped, failed, stopped and end; see docs/watching.md.

    Args:
        path: the file, or None to keep events only in memory.
        tensorboard: a folder for TensorBoard's files with losses, evaluated figures and samples per second, or None.

    Attributes:
        events: all events, including the events in the file; plain data.

    Raises:
        ValueError: the file exists but is not such a log, or its folder does not exist; or tensorboardX is not
            installed, or its folder cannot be written to.
        OSError: the file cannot be opened.

    >>> log = RunLog()
    >>> log.event("losses", updates=2, losses=[0.5, 0.25])
    >>> [(event["event"], event["updates"], event["losses"]) for event in log.events]
    [('losses', 2, [0.5, 0.25])]
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, tensorboard: str | os.PathLike[str] | None = None
    ):
        self._began = time.monotonic()
        self.events: list[dict[str, Json]] = []
        self._file = self._board = None
        if tensorboard is not None:
            if importlib.util.find_spec("tensorboardX") is None:
                raise ValueError(
                    "tensorboard files need tensorboardX, which is not installed: pip install 'ipu-jax[tensorboard]'"
                )
            from tensorboardX import SummaryWriter  # an extra

            # its file names contain whole seconds: a run that restarts at once must not overwrite the previous file
            folder = str(writable_folder("tensorboard", tensorboard))
            self._board = SummaryWriter(folder, filename_suffix=f".{time.time_ns()}")
        if path is not None:
            file = check_log(path)
            self.events = _events_in(file)
            self._file = file.open("a", encoding="utf-8", buffering=1)

    def start(self, **values: Json) -> None:
        """Log that a run begins: its command, attempt, instances, devices and versions, and these values.

        Raises:
            ValueError: one of these values has the name of another one.
        """
        kinds = sorted({device.device_kind for device in jax.devices()})
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        if taken := sorted(values.keys() & {*FACTS_OF_START}):
            raise ValueError(f"{taken[0]!r} is what start logs itself: choose another name")
        program = Path(sys.argv[0])
        self.event(
            "start",
            command=["python -m " + program.parent.name if program.stem == "__main__" else program.name, *sys.argv[1:]],
            attempt=int(os.environ.get("IPU_JAX_ATTEMPT", 0)),
            instances=jax.process_count(),
            devices=f"{len(jax.devices())} x {', '.join(kinds)}",
            versions={"ipu_jax": __version__, "Python": platform.python_version(), "system": platform.platform()}
            | versions,
            **values,
        )

    def event(self, name: str, /, **values: Json) -> None:
        """Log an event.

        Args:
            name: what happened.
            values: plain data: texts, numbers, and lists and dicts of these. Numbers that JSON lacks become texts.

        Raises:
            ValueError: a value is called "event", "time" or "seconds".
        """
        if taken := sorted(values.keys() & {*NAMES_OF_EVENTS}):
            raise ValueError(f"the event {name!r} has a value called {taken[0]!r}, as every event: choose another name")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        event = {"event": name, "time": now, "seconds": round(time.monotonic() - self._began, 3), **_plain(values)}
        self.events.append(event)
        if self._file is not None:
            try:
                self._file.write(json.dumps(event, allow_nan=False) + "\n")
            except OSError as error:
                self._give_up(f"{self._file.name} cannot be written any more ({error.strerror})")
        if self._board is not None:
            try:
                self._draw(event)
            except OSError as error:
                self._board = None
                warnings.warn(f"TensorBoard's files cannot be written any more ({error})", RunLogWarning, stacklevel=2)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        file, self._file = self._file, None
        board, self._board = self._board, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
            if board is not None:
                board.close()

    def __repr__(self) -> str:
        return f"RunLog({counted(len(self.events), 'event')}{f', {self._file.name}' if self._file else ''})"

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _give_up(self, why: str) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        warnings.warn(f"{why}: the run goes on without it", RunLogWarning, stacklevel=3)

    def _draw(self, event: dict[str, Json]) -> None:
        assert self._board is not None, "the caller looks"
        updates = event.get("updates")
        if not isinstance(updates, int):
            return
        losses = event.get("losses", [])
        for i, loss in enumerate(losses):
            self._board.add_scalar("loss", float(loss), updates - len(losses) + 1 + i)
        names = event.keys() - _NO_CURVES if event["event"] == "evaluated" else _CURVES
        for name in sorted(names):
            if isinstance(event.get(name), int | float):
                self._board.add_scalar("test_loss" if name == "loss" else name, event[name], updates)


def figure_in_words(name: str, value: float) -> str:
    """Return a figure of an evaluation as its line shows it.

    >>> figure_in_words("accuracy", 0.97), figure_in_words("loss", 0.25), figure_in_words("errors", 12345.0)
    ('97.00%', '0.25', '12,345')
    """
    if name.endswith("accuracy") and math.isfinite(value):
        return f"{value:.2%}"
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.4g}"


def check_log(path: str | os.PathLike[str]) -> Path:
    """Return the path of a log's file.

    Raises:
        ValueError: it is no path, or a folder, or lies in a folder that does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"log={path!r} is no path: give a file, such as run.jsonl")
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"log {path} is a folder: give a file, such as {file / 'run.jsonl'}")
    if not file.parent.is_dir():
        raise ValueError(f"log {path}: there is no folder {file.parent}: make it, or give another file")
    return file


def _events_in(path: Path) -> list[dict[str, Json]]:
    """Return the events of a file. Remove a last line that was cut off, for example by a kill."""
    if not path.is_file():
        return []
    content = path.read_text(encoding="utf-8", errors="replace")
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        cut = lines.pop()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(cut.encode("utf-8")))
    events: list[dict[str, Json]] = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            is_event = isinstance(event, dict) and "event" in event
        except ValueError:
            event, is_event = {}, False
        if not is_event:
            raise ValueError(f"{path} holds no log of a run, see line {number}: give another file, or remove it")
        events.append(event)
    return events


def _plain(value: Json) -> Json:
    """Return plain data; a number that JSON lacks becomes a text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    item = getattr(value, "tolist", None)
    return _plain(item()) if item is not None else str(value)
