"""Let only one run save to a folder: a lock that names its holder, and is freed when the process dies.

    runs/mnist/.lock    {"host": "node-7", "process": "3207-918273-3437d34c-4026531836", "since": "2026-11-23 10:15:02"}

The lock is the operating system's lock of the open file; the text is for the error message of a process that is
refused. Only its owner can open it, since whoever can open a file can lock it. If files cannot be locked, as on some
network disks, the text is the lock. Then a process of this host that has ended no longer holds it, and for a process of
another host it is unknown.

Nothing here imports jax.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from pathlib import Path
from typing import Any, Final

from ipu_jax.base.opening import content, regular
from ipu_jax.distributed.processes.identity import Identity, is_living, own_identity
from ipu_jax.training.checkpoints.errors import CheckpointError

NAME: Final = ".lock"

_PATIENCE: Final = 2.0  # seconds for a killed process to disappear
_LOOK_EVERY: Final = 0.05
_MOST: Final = 1 << 12  # bytes of its text
_CANNOT_LOCK: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

_all: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """The lock of a folder of checkpoints, for one run of this process.

    Args:
        folder: the folder of the checkpoints.
    """

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / NAME
        self._text = b""
        self._freeing: weakref.finalize[Any, Any] | None = None
        _all.add(self)

    @property
    def is_held(self) -> bool:
        """Return whether this run has the lock, and nobody has removed it.

        Raises:
            OSError: its file cannot be read.
        """
        return self._freeing is not None and _read(self._path) == self._text

    def take(self, seconds: float = _PATIENCE) -> None:
        """Take the lock, unless this run has it. The folder must exist.

        Args:
            seconds: how long to wait for another process that has it.

        Raises:
            CheckpointError: another run has it; the `errno` is EBUSY.
            OSError: its file cannot be written.
        """
        if self.is_held:
            return
        self.release()
        deadline = time.monotonic() + seconds
        while holder := self._try():
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{self._folder} is in use: {holder}. Two training runs in one folder would remove each other's "
                    "checkpoints: wait until that one has ended, stop it, or save to another folder",
                    errno.EBUSY,
                )
            time.sleep(_LOOK_EVERY)

    def release(self) -> None:
        """Free the lock, if this run has it."""
        if self._freeing is not None:
            self._freeing()
            self._freeing = None

    def _try(self) -> str:
        """Return who has the lock, or "" if this run has it from now on."""
        if any(lock.is_held for lock in list(_all) if lock is not self and lock._path == self._path):
            return _holder(_read(self._path))  # network disks don't keep two files of one process apart
        for mode in (os.O_RDONLY, os.O_RDWR):  # network disks lock only files that are open for writing
            handle = regular(self._path, mode | os.O_CREAT)
            try:
                holder = self._lock(handle)
            except OSError as error:
                os.close(handle)
                if error.errno != errno.EBADF or mode == os.O_RDWR:
                    raise
                continue
            if holder != "":
                os.close(handle)
            return self._try() if holder is None else holder
        raise AssertionError("the second one has returned or raised")

    def _lock(self, handle: int) -> str | None:
        """Lock an open file; return who has the lock, "" if this run has it now, or None to try another time."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = _read(self._path)
            is_open_to_others = os.fstat(handle).st_mode & 0o077
            if not is_open_to_others or (text and not _has_ended(text)):
                return _holder(text)
            if _is_at(self._path, handle):  # of an old version that has ended: who locked it was a reader
                self._path.unlink(missing_ok=True)
            return None
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            text = _read(self._path)
            if text and not _has_ended(text):
                return f"{_holder(text)} (if it has ended, remove {self._path}: this disk cannot tell)"
        else:
            if not _is_at(self._path, handle):
                return None  # its owner removed the file after it was opened here
        text = _own_text()
        with contextlib.suppress(PermissionError):  # it was another user's, who lets us write
            os.fchmod(handle, 0o600)
        with open(regular(self._path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(text)
        self._text = text
        self._freeing = weakref.finalize(self, _free, self._path, handle, text, os.getpid())
        return ""


def _free(path: Path, handle: int, text: bytes, owner: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == owner and _read(path) == text:
            path.unlink()  # before another process can lock it
    with contextlib.suppress(OSError):
        os.close(handle)


def _own_text() -> bytes:
    fields = {
        "host": socket.gethostname(),
        "process": str(own_identity() or os.getpid()),
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "token": secrets.token_hex(8),
    }
    return json.dumps(fields).encode()


def _owner(text: bytes) -> dict[str, str]:
    """Return the owner that a lock names; an empty dict if the file is not our lock or is still being written."""
    try:
        found = json.loads(text)
        fields = {name: found[name] for name in ("host", "process", "since")}
    except (ValueError, TypeError, KeyError):
        return {}
    return fields if all(isinstance(value, str) and value.isprintable() for value in fields.values()) else {}


def _holder(text: bytes) -> str:
    owner = _owner(text)
    if not owner:
        return "another process saves there"
    if owner["process"] == str(own_identity()):
        return f"this process saves there since {owner['since']}, by other Checkpoints, which close() would end"
    pid = owner["process"].partition("-")[0]
    return f"process {pid} on {owner['host']} saves there since {owner['since']}"


def _has_ended(text: bytes) -> bool:
    """Return whether the owner of a lock is known to have ended: a process of this host, in this container."""
    owner, own = _owner(text), own_identity()
    identity = Identity.parse(owner.get("process", ""))
    if identity is None or own is None or owner["host"] != socket.gethostname():
        return False
    return identity.boot != own.boot or (identity.counts_as(own) and not is_living(identity))


def _read(path: Path) -> bytes:
    try:
        return content(path, _MOST)
    except FileNotFoundError:
        return b""


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


# A forked process closes the files: otherwise a lock would stay until it ends, too. The text stays: it is the parent's.
os.register_at_fork(after_in_child=lambda: [lock.release() for lock in list(_all)])
