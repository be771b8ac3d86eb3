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
import os
import platform
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from ipu_jax.base.annotations import Json
from ipu_jax.base.cli.output_paths import writable_folder
from ipu_jax.base.decorators import public
from ipu_jax.base.showing import counted
from ipu_jax.base.version import __version__
from ipu_jax.run.observe.runs.digest import Digest, is_event, plain

__all__ = ["RunLog", "RunLogWarning"]

_PACKAGES: Final = ("jax", "jaxlib", "optax", "numpy")
NAMES_OF_EVENTS: Final = ("event", "time", "seconds")
"""What every event has."""
ADDED_TO_START: Final = ("command", "attempt", "instances", "devices", "versions")
"""What `RunLog.start` adds."""
_MOST_KEPT: Final = 1 << 22  # characters


class RunLogWarning(UserWarning):
    """Warns that a log could not be written; the run continues."""


@public
class RunLog:
    """Writes each event of a run to a file at once, as a line of JSON, and keeps what the page about the run shows.

    In memory it keeps that, and the last events, up to 4 MB of lines: a log is small however long the run is.

    An existing file is continued: its events, from the run before it was stopped, are kept. If the log can no longer
    be written, for example on a full disk, the log gives one `RunLogWarning`, and the run continues.

    An event has "event", its name; "time", in UTC; "seconds" since the log was opened; and the caller's values.
    The caller chooses the names. `write_report` understands start, resumed, compiled, losses, evaluated, saved,
    skipped, failed, stopped and end; see docs/watching.md.

    Args:
        path: the file, or None to write none.
        tensorboard: a folder for TensorBoard's files with losses, evaluated figures and samples per second, or None.

    Attributes:
        digest: what the events amount to, for `write_report`.

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
        self.digest = Digest()
        self._lines, self._size = deque[str](), 0  # the last ones, and their characters
        self._path: Path | None = None
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
            self._path = file = check_log(path)
            if file.is_file():
                self._keep_all(_lines_of(file, "r+b"), f"{path}", "give another file, or remove it")
            self._file = file.open("a", encoding="utf-8", buffering=1)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RunLog":
        """Return the log in a file as it is now, without writing to the file: another process may still write it.

        Raises:
            ValueError: the file does not exist, or is not such a log.
            OSError: the file cannot be read.
        """
        log = cls()
        log._path = check_log(path)
        if not log._path.is_file():
            raise ValueError(f"log {path} is not a file: give the log of a run, such as run.jsonl")
        log._keep_all(_lines_of(log._path), f"{path}", "give another file")
        return log

    def start(self, /, **values: Json) -> None:
        """Log that a run begins: its command, attempt, instances, devices and versions, and these values.

        Raises:
            ValueError: one of these values has the name of another one.
        """
        import jax  # which reading a log does not need

        kinds = sorted({device.device_kind for device in jax.devices()})
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        if taken := sorted(values.keys() & {*ADDED_TO_START}):
            raise ValueError(f"start logs {taken[0]!r} itself: choose another name")
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
            raise ValueError(f"event {name!r} has a value named {taken[0]!r}, as all events do: choose another name")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        event = {"event": name, "time": now, "seconds": round(time.monotonic() - self._began, 3), **plain(values)}
        points = self._keep(event, line := json.dumps(event, allow_nan=False))
        if self._file is not None:
            try:
                self._file.write(line + "\n")
            except OSError as error:
                self._give_up(f"{self._file.name} cannot be written any more ({error.strerror})")
        if self._board is not None:
            try:
                for name, updates, value in points:
                    self._board.add_scalar(name.replace(" ", "_"), float(value), updates)
            except OSError as error:
                self._board = None
                warnings.warn(f"TensorBoard's files cannot be written any more ({error})", RunLogWarning, stacklevel=2)

    @property
    def events(self) -> list[dict[str, Json]]:
        """Return all events, with those in the file, as plain data; without a file, the last ones that are kept."""
        if self._path is not None and len(self._lines) < self.digest.events:
            return [_event_in(line) for line in _lines_of(self._path)]
        return [_event_in(line) for line in self._lines]

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
        return f"RunLog({counted(self.digest.events, 'event')}{f', {self._file.name}' if self._file else ''})"

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def _keep_all(self, lines: Iterator[str], path: str, mend: str) -> None:
        for number, line in enumerate(lines, 1):
            try:
                self._keep(_event_in(line), line)
            except ValueError:
                raise ValueError(f"{path} is not the log of a run, see line {number}: {mend}") from None

    def _keep(self, event: dict[str, Json], line: str) -> list[tuple[str, int, float]]:
        self._lines.append(line)
        self._size += len(line)
        while self._size > _MOST_KEPT and len(self._lines) > 1:
            self._size -= len(self._lines.popleft())
        return self.digest.add(event)

    def _give_up(self, why: str) -> None:
        file, self._file, self._path = self._file, None, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
        warnings.warn(f"{why}: the run goes on without it", RunLogWarning, stacklevel=3)


def check_log(path: str | os.PathLike[str]) -> Path:
    """Return the path of a log's file.

    Raises:
        ValueError: it is not a path, or a folder, or lies in a folder that does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"log={path!r} is not a path: give a file, such as run.jsonl")
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"log {path} is a folder: give a file, such as {file / 'run.jsonl'}")
    if not file.parent.is_dir():
        raise ValueError(f"log {path}: there is no folder {file.parent}: make it, or give another file")
    return file


def _lines_of(path: Path, mode: Literal["rb", "r+b"] = "rb") -> Iterator[str]:
    """Yield the whole lines of a file. In mode "r+b", remove a last line that was cut off, for example by a kill."""
    with path.open(mode) as file:
        for line in file:
            if line.startswith(b"{") and not line.endswith(b"\n"):
                if file.writable():
                    file.truncate(file.tell() - len(line))
                return
            yield line.decode(errors="replace")


def _event_in(line: str) -> dict[str, Json]:
    """Return the event of a line.

    Raises:
        ValueError: it has none.
    """
    try:
        event = plain(json.loads(line))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not is_event(event):
        raise ValueError("no event")
    return event
