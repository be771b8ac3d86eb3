"""Record what this process is and does, where its launcher and `ipu-monitor` find it.

A *record* is a folder that only its user may enter, and in which one process writes:

    beacon        4096 bytes, mapped into memory: what each step changes (`beacons.py`)
    said.json     what seldom changes, such as the command, the IPUs and their stages, the instance
    error.json    the exception that has ended its program
    stacks        the Python stacks of all threads, at SIGUSR1
    ticks         in which tick each IPU is, and tasks.1.json, the tasks of program 1 in words (`flight.py`)

    <run folder>/3/                              of instance 3; its launcher reads all of it, and removes it
    $XDG_RUNTIME_DIR/ipu_jax/                    or /tmp/ipu_jax-<uid>/: where `ipu-monitor` looks
        3207-918273-3437d34c-4026531836          of the process with this `Identity`: a record, or a link to one

The process removes its record, or the link, when it ends; for a killed process the next process, or `ipu-monitor`, does
so. The first process of an instance that asks for it writes the launcher's record. A forked process inherits none.

A record never makes a run fail: if it cannot be written, there is none. `IPU_JAX_MONITOR=off` hides all processes from
`ipu-monitor`, and `IPU_JAX_MONITOR=/some/folder` selects another folder.

Nothing here imports jax.
"""

import atexit
import contextlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base import opening
from ipu_jax.base.annotations import Json
from ipu_jax.base.version import __version__
from ipu_jax.distributed.processes.beacons import Beacon, Phase
from ipu_jax.distributed.processes.identity import Identity, is_living, own_identity

RUN_DIR: Final = "IPU_JAX_RUN_DIR"
INSTANCE: Final = "IPU_JAX_INSTANCE"
SWITCH: Final = "IPU_JAX_MONITOR"
FORMAT: Final = 3
"""The version of said.json."""

_OFF: Final = ("off", "0", "no", "false")
_RUNTIME: Final = "XDG_RUNTIME_DIR"
_LONGEST_COMMAND: Final = 1000
_LARGEST: Final = 1 << 20


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


@contextlib.contextmanager
def opened(path: str | Path, uid: int, *, folder: int | None = None, follow: bool = False) -> Iterator[int]:
    """Open a folder of records, or a record, and yield its handle. It reaches the files whatever happens to the path.

    Args:
        path: its path; within `folder`, its name there.
        uid: the user who must own it.
        folder: the handle of an open folder.
        follow: whether it may be a link.

    Raises:
        OSError: it belongs to another user, others can enter it, it cannot be opened, or is not a folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=folder)
    try:
        found = os.fstat(handle)
        if found.st_uid != uid:
            raise OSError(f"belongs to user {found.st_uid}, not {uid}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(f"has mode {stat.S_IMODE(found.st_mode):o}, not 700")
        yield handle
    finally:
        os.close(handle)


def content(name: str, folder: int, uid: int) -> bytes:
    """Return the content of a user's file in an open folder. Refuse a file that could block or mislead the reader.

    Raises:
        OSError: it is another user's, too large, or not a regular file.
    """
    with opening.reading(name, folder=folder) as file:
        found, owner = file.read(_LARGEST + 1), os.fstat(file.fileno()).st_uid
    if owner != uid:
        raise OSError(f"{name} belongs to user {owner}, not {uid}")
    if len(found) > _LARGEST:
        raise OSError(f"{name} is too large for a record")
    return found


def remove(name: str, folder: int) -> None:
    """Remove a record, or the link to one, from an open folder, if it is there."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


class OwnRecord:
    """The record of this process. Its methods raise `OSError` if a file cannot be written.

    Args:
        folder: a folder that does not exist yet.
        launched: whether a launcher reads it.

    Attributes:
        beacon: what each step changes.
        said: the content of said.json; empty before `begin`.
    """

    def __init__(self, folder: Path, *, launched: bool):
        os.mkdir(folder, 0o700)
        self.folder, self.said = folder, dict[str, Json]()
        try:
            self.beacon = Beacon(folder / "beacon", launched)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def say(self, **values: Json) -> None:
        """Write values to said.json, if they are new."""
        if not values.items() <= self.said.items():
            self.write("said.json", self.said | values)
            self.said |= values

    def write(self, name: str, value: Json) -> None:
        """Write a file of JSON. Who reads it finds the old one, or the whole new one."""
        scratch = self.folder / f"{name}.new"
        opening.write_new(scratch, json.dumps(value).encode())
        scratch.replace(self.folder / name)


_record: OwnRecord | None = None
_looked = _asked = False


def current() -> Beacon | None:
    """Return the beacon of this process; None if it has no record, neither for a launcher nor for `ipu-monitor`."""
    global _record, _looked
    if not _looked:
        _looked = True
        run_dir, instance = os.environ.get(RUN_DIR), os.environ.get(INSTANCE)
        if run_dir and instance:
            # the folder may be gone when a process outlives its launcher
            with contextlib.suppress(OSError):
                _record = OwnRecord(Path(run_dir, instance), launched=True)
    return None if _record is None else _record.beacon


def for_launcher() -> OwnRecord | None:
    """Return the record of this process that its launcher reads; None without a launcher."""
    beacon = current()
    return _record if beacon is not None and beacon.launched else None


def begin() -> Beacon | None:
    """Let `ipu-monitor` find this process, if it does not yet; return its beacon, or None if it has no record."""
    global _asked
    current()
    if not _asked:
        _asked = True
        if not is_off() and (identity := own_identity()) is not None:
            with contextlib.suppress(OSError, ValueError):
                _publish(identity)
    return current()


def _publish(identity: Identity) -> None:
    """Put the record of this process, or a link to it, where `ipu-monitor` looks."""
    global _record
    with contextlib.suppress(FileExistsError):
        os.mkdir(own_folder(), 0o700)
    path = own_folder() / str(identity)
    with opened(path.parent, os.geteuid()) as folder:
        for name in os.listdir(folder):
            other = Identity.parse(name)
            # killed processes must not pile up where nobody runs ipu-monitor
            if other == identity or (other and other.counts_as(identity) and not is_living(other)):
                remove(name, folder)  # of this process, if it has replaced its program by `exec`
    if _record is None:
        own = OwnRecord(path, launched=False)
    else:
        own = _record
        path.symlink_to(own.folder)
    atexit.register(_withdraw, path, identity.pid)
    run = os.path.basename(os.environ.get(RUN_DIR, "")) or None
    try:
        own.say(format=FORMAT, command=_shortened(sys.orig_argv), run=run, ipus=[], ipu_jax=__version__)
    except OSError:
        _withdraw(path, identity.pid)
        raise
    _record = own


def _withdraw(path: Path, pid: int) -> None:
    if pid == os.getpid():  # else this process was forked from the one that is described
        with contextlib.suppress(OSError), opened(path.parent, os.geteuid()) as folder:
            remove(path.name, folder)


def is_begun() -> bool:
    """Return whether `ipu-monitor` finds this process."""
    return _record is not None and bool(_record.said)


def note(**values: Json) -> None:
    """Add known values to the record of this process, if `ipu-monitor` finds it.

    Args:
        values: fields of said.json, named as in `Said` (`observe/monitor/records.py`).
    """
    if _record is not None and _record.said:
        with contextlib.suppress(OSError, ValueError):
            _record.say(**values)


def _forget() -> None:
    global _record, _asked
    _record, _asked = None, False


os.register_at_fork(after_in_child=_forget)  # the child may begin its own record


@contextlib.contextmanager
def during(phase: Phase, label: str, limit: float) -> Iterator[None]:
    """Enter another phase for the duration of a `with` block, or of a function that this decorates.

    Inside another such block, the phase stays as it is: only the outermost block counts.
    """
    beacon = current()
    if beacon is None or beacon.phase not in _INTERRUPTED:
        yield
    else:
        with beacon.during(phase, label, limit):
            yield


@contextlib.contextmanager
def meeting(label: str, limit: float) -> Iterator[None]:
    """Wait for all instances within a `with` block. All instances enter such blocks in the same order."""
    beacon = current()
    with during(Phase.WAITING, label, limit), beacon.jointly() if beacon is not None else contextlib.nullcontext():
        yield


_INTERRUPTED: Final = (Phase.STARTING, Phase.COMPILING, Phase.STEPPING, Phase.SILENT)


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
