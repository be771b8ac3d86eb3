"""Write down what this process is, and which IPUs it has, where `ipu-monitor` finds it.

A *record* is two files in a folder that only its user may read:

    $XDG_RUNTIME_DIR/ipu_jax/               or /tmp/ipu_jax-<uid>/
        3207-918273-3437d34c-4026531836.json     what seldom changes: the command, IPUs and their stages, the instance
        3207-918273-3437d34c-4026531836.beacon   what each step changes: `_beacon.py`, mapped into memory

The name is the process's `Identity`. The JSON is replaced as a whole when something in it becomes known, which no step
does. The files go when the process ends; those of a killed one are removed by the next process or
`ipu-monitor`.

A record never fails a run: where none can be written, there is none. `IPU_JAX_MONITOR=off` asks for none, and
`IPU_JAX_MONITOR=/some/folder` for another folder.

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
from typing import Any, Final

from ipu_jax import _beacon
from ipu_jax._beacon import Beacon
from ipu_jax._processes import Identity, living, own_identity
from ipu_jax._version import __version__

SWITCH: Final = "IPU_JAX_MONITOR"
FORMAT: Final = 1
"""The version of the JSON."""
STATIC: Final = ".json"
DYNAMIC: Final = ".beacon"
SCRATCH: Final = ".json.new"

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


class UnsafeFolderError(OSError):
    """Raised if others may write to a folder of records, or read it, or it is not a folder."""


def runtime_folder() -> Path | None:
    """Return the folder of records in `XDG_RUNTIME_DIR`, if that is there and this user's own.

    It may be another user's, whose environment came along with `sudo`.
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
    """Return the folder in which this process's record would lie."""
    return chosen_folder() or runtime_folder() or temporary_folder(os.geteuid())


def identity_of(name: str) -> Identity | None:
    """Return the identity of the process to whose record a file belongs, by its name; None if it is of no record."""
    end = next((end for end in (SCRATCH, STATIC, DYNAMIC) if name.endswith(end)), "")
    return Identity.parse(name.removesuffix(end)) if end else None


@contextlib.contextmanager
def opened(folder: Path, uid: int) -> Iterator[int]:
    """Open a folder of records, and yield its handle, by which files in it are reached whatever the path becomes.

    Args:
        folder: its path.
        uid: the user whose it must be.

    Raises:
        UnsafeFolderError: it is another user's, others may enter it, or it is a link.
        OSError: it cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != uid:
            raise UnsafeFolderError(f"belongs to user {found.st_uid}, not {uid}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UnsafeFolderError(f"has mode {stat.S_IMODE(found.st_mode):o}, not 700")
        yield handle
    finally:
        os.close(handle)


class _Record:
    """The record of this process. Every method raises `OSError` if a file cannot be written."""

    def __init__(self, identity: Identity):
        self.identity = identity
        self._folder = own_folder()
        self._content: dict[str, Any] = {
            "format": FORMAT,
            "pid": identity.pid,
            "command": _shortened(sys.orig_argv),
            "ipu_jax": __version__,
            "run": os.path.basename(os.environ.get(_beacon.RUN_DIR, "")) or None,
            "instance": 0,
            "instances": 1,
            "replicas": None,
            "ipus_per_replica": None,
            "ipus": [],
        }
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        try:
            self._begin()
        except OSError:
            self.remove()
            raise

    def note(self, **values: Any) -> None:
        """Write values to the JSON, if they are new."""
        if values.items() <= self._content.items():
            return
        self._content |= values
        with opened(self._folder, os.geteuid()) as folder:
            self._write(folder)

    def remove(self) -> None:
        """Remove the files."""
        if self.identity.pid != os.getpid():
            return  # a process that was forked off
        with contextlib.suppress(OSError), opened(self._folder, os.geteuid()) as folder:
            for end in (STATIC, DYNAMIC, SCRATCH):
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.identity}{end}", dir_fd=folder)

    def _begin(self) -> None:
        with opened(self._folder, os.geteuid()) as folder:
            self._remove_left_over(folder)
            self._write(folder)
            handle = _new_file(f"{self.identity}{DYNAMIC}", folder)
            try:
                _beacon.write_to(_beacon.mapped(handle))
            finally:
                os.close(handle)

    def _remove_left_over(self, folder: int) -> None:
        """Remove what killed processes have left, so that it does not add up where nobody runs ipu-monitor."""
        for name in os.listdir(folder):
            identity = identity_of(name)
            if identity is not None and identity.counts_as(self.identity) and living(identity) is None:
                with contextlib.suppress(FileNotFoundError):  # another process does the same
                    os.unlink(name, dir_fd=folder)

    def _write(self, folder: int) -> None:
        scratch = f"{self.identity}{SCRATCH}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch, dir_fd=folder)
        with open(_new_file(scratch, folder), "w") as file:
            json.dump(self._content, file)
        os.rename(scratch, f"{self.identity}{STATIC}", src_dir_fd=folder, dst_dir_fd=folder)


_record: _Record | None = None
_asked = False


def begin() -> Beacon | None:
    """Begin the record of this process, unless it has one; return its beacon, or None if there is none."""
    global _record, _asked
    if not _asked:
        _asked = True
        if not is_off():
            with contextlib.suppress(OSError, ValueError):
                identity = own_identity()
                _record = identity and _Record(identity)
            if _record is not None:
                atexit.register(_record.remove)
    return _beacon.current()


def is_begun() -> bool:
    """Return whether this process has a record."""
    return _record is not None


def note(**values: Any) -> None:
    """Write down what has become known, if this process has a record.

    Args:
        values: of the JSON, as `docs/monitor.md` names them.
    """
    if _record is not None:
        with contextlib.suppress(OSError, ValueError):
            _record.note(**values)


def _forget() -> None:
    global _record, _asked
    _record, _asked = None, False


os.register_at_fork(after_in_child=_forget)  # it may begin a record of its own


def _new_file(name: str, folder: int) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _shortened(words: Sequence[str]) -> list[str]:
    """Return a command's words without what would make them too long."""
    kept: list[str] = []
    left = _LONGEST_COMMAND
    for word in words:
        # what is no text in the file system's encoding could not be written as JSON
        word = word.encode(errors="replace").decode()
        if len(word) > left:
            return [*kept, f"{word[:left]}..."]
        kept.append(word)
        left -= len(word)
    return kept
