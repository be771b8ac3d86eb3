"""Record what this process is, and which IPUs it has, where `ipu-monitor` finds it.

A *record* is a file in a folder that only its user may enter:

    $XDG_RUNTIME_DIR/ipu_jax/               or /tmp/ipu_jax-<uid>/
        3207-918273-3437d34c-4026531836.record     the name is the process's `Identity`
            4096 bytes    the beacon, mapped into memory: what each step changes (`beacons.py`)
            the rest      JSON: what seldom changes, such as the command, the IPUs and their stages, the instance

The JSON is written again when a value in it becomes known, but never by a step. The process removes its file when it
ends. The next process, or `ipu-monitor`, removes the file of a killed process.

A record never makes a run fail: if it cannot be written, there is none. `IPU_JAX_MONITOR=off` turns records off, and
`IPU_JAX_MONITOR=/some/folder` selects another folder.

Nothing here imports jax.
"""

import atexit
import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base import opening
from ipu_jax.base.annotations import Json
from ipu_jax.base.version import __version__
from ipu_jax.distributed.processes import beacons
from ipu_jax.distributed.processes.beacons import Beacon
from ipu_jax.distributed.processes.identity import Identity, is_living, own_identity

SWITCH: Final = "IPU_JAX_MONITOR"
FORMAT: Final = 2
"""The version of the JSON."""
ENDING: Final = ".record"

_OFF: Final = ("off", "0", "no", "false")
_RUNTIME: Final = "XDG_RUNTIME_DIR"
_LONGEST_COMMAND: Final = 1000


def is_off() -> bool:
    """Return whether the environment asks for no records."""
    return os.environ.get(SWITCH, "").lower() in _OFF


def chosen_folder() -> Path | None:
    """Return the folder that the environment names, if it names one."""
    name = os.environ.get(SWITCH, "")
    return Path(name) if os.path.isabs(name) else None


def runtime_folder() -> Path | None:
    """Return the folder of records in `XDG_RUNTIME_DIR`, if that exists and belongs to this user.

    It belongs to another user if `sudo` has kept that user's environment.
    """
    parent = os.environ.get(_RUNTIME, "")
    with contextlib.suppress(OSError, ValueError):
        if os.path.isabs(parent) and os.stat(parent).st_uid == os.geteuid():
            return Path(parent) / "ipu_jax"
    return None


def temporary_folder(uid: int) -> Path:
    """Return the folder of a user's records if `XDG_RUNTIME_DIR` is not set."""
    return Path(tempfile.gettempdir()) / f"ipu_jax-{uid}"


def own_folder() -> Path:
    """Return the folder for this process's record."""
    return chosen_folder() or runtime_folder() or temporary_folder(os.geteuid())


def identity_of(name: str) -> Identity | None:
    """Return the identity of the process whose record has this name; None if this is not the name of a record."""
    return Identity.parse(name.removesuffix(ENDING)) if name.endswith(ENDING) else None


@contextlib.contextmanager
def opened(folder: Path, uid: int) -> Iterator[int]:
    """Open a folder of records, and yield its handle. It reaches files in the folder whatever happens to the path.

    Args:
        folder: its path.
        uid: the user who must own it.

    Raises:
        OSError: it belongs to another user, others can enter it, it cannot be opened, or is a link or not a folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != uid:
            raise OSError(f"belongs to user {found.st_uid}, not {uid}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(f"has mode {stat.S_IMODE(found.st_mode):o}, not 700")
        yield handle
    finally:
        os.close(handle)


class _RecordFile:
    """The record of this process. Every method except `remove` raises `OSError` if the file cannot be written."""

    def __init__(self, identity: Identity):
        self._pid, self._name = identity.pid, f"{identity}{ENDING}"
        self._folder = own_folder()
        self._content: dict[str, Json] = {
            "format": FORMAT,
            "command": _shortened(sys.orig_argv),
            "run": os.path.basename(os.environ.get(beacons.RUN_DIR, "")) or None,
            "instance": 0,
            "instances": 1,
            "replicas": None,
            "ipus_per_replica": None,
            "planned_after": None,
            "planned_updates": None,
            "device_limit_bytes": None,
            "ipus": [],
            "ipu_jax": __version__,
        }
        self._length = 0
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        with opened(self._folder, os.geteuid()) as folder:
            _remove_left_over(folder, identity)
            # the file already exists if this process has replaced its program by `exec`
            self._file = opening.regular(self._name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, folder=folder)
        try:
            memory = beacons.mapped(self._file)
            self._write()
        except OSError:
            self.remove()
            raise
        beacons.write_to(memory)

    def note(self, **values: Json) -> None:
        """Write values to the JSON, if they are new."""
        if not values.items() <= self._content.items():
            self._content |= values
            self._write()

    def remove(self) -> None:
        """Remove the file, unless this process was forked from the one that it describes."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError), opened(self._folder, os.geteuid()) as folder:
                os.unlink(self._name, dir_fd=folder)

    def _write(self) -> None:
        # spaces cover the end of a longer old text
        text = json.dumps(self._content).encode().ljust(self._length)
        beacons.reserve(self._file, beacons.SIZE + len(text))  # a full disk must not leave half of it
        os.pwrite(self._file, text, beacons.SIZE)
        self._length = len(text)


def _remove_left_over(folder: int, own: Identity) -> None:
    """Remove the records of killed processes, so that they do not pile up where nobody runs ipu-monitor."""
    for name in os.listdir(folder):
        identity = identity_of(name)
        if identity is not None and identity.counts_as(own) and not is_living(identity):
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                os.unlink(name, dir_fd=folder)


_record: _RecordFile | None = None
_asked = False


def begin() -> Beacon | None:
    """Begin the record of this process, unless it has one; return its beacon, or None if there is none."""
    global _record, _asked
    if not _asked:
        _asked = True
        if not is_off():
            with contextlib.suppress(OSError, ValueError):
                identity = own_identity()
                _record = identity and _RecordFile(identity)
            if _record is not None:
                atexit.register(_record.remove)
    return beacons.current()


def is_begun() -> bool:
    """Return whether this process has a record."""
    return _record is not None


def note(**values: Json) -> None:
    """Add known values to the record of this process, if it has one.

    Args:
        values: fields of the JSON, named as in `Said` (`observe/monitor/records.py`).
    """
    if _record is not None:
        with contextlib.suppress(OSError, ValueError):
            _record.note(**values)


def _forget() -> None:
    global _record, _asked
    _record, _asked = None, False


os.register_at_fork(after_in_child=_forget)  # the child may begin its own record


def _shortened(words: Sequence[str]) -> list[str]:
    """Return the words of a command, cut to a limited length."""
    kept: list[str] = []
    left = _LONGEST_COMMAND
    for word in words:
        # bytes that are not text in the file system's encoding could not be written as JSON
        word = word.encode(errors="replace").decode()
        if len(word) > left:
            return [*kept, f"{word[:left]}..."]
        kept.append(word)
        left -= len(word)
    return kept
