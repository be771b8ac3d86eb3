"""Write a file so that its path always leads to either the old file or the whole new file."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, which becomes `path` at the end of the block.

    The new file has reached the disk when it gets its name. If the block raises, or writing fails, the temporary file
    is removed, and an existing file is unchanged. A symbolic link stays a link, and its target is replaced. The
    permissions are the old file's, or the defaults of a new file.

    Raises:
        OSError: the file cannot be written. Its `filename` is `path`.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        mode = _permissions(target)
        # closed before the rename: on some network disks only closing reports that writing failed
        with temporary.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_if_possible(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            before = "the file that was there is unchanged" if target.exists() else "no file was left there"
            reason = error.strerror or str(error)
            raise type(error)(error.errno, f"{reason}: could not write it, {before}", os.fspath(path)) from error
        raise


def _permissions(target: Path) -> int | None:
    """Return the permissions of a file, or None if there is none; raise `OSError` if it is not a regular file."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Is not a regular file, and nothing else can be replaced")
    return stat.S_IMODE(mode)


def _sync_if_possible(folder: Path) -> None:
    """Write the new name to disk as well, on file systems that can; the file itself is already there."""
    with contextlib.suppress(OSError):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Have the operating system write a folder's entries to disk, so that a power cut does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
