"""Open files in folders where others may have put anything: a link, a pipe, a device, a file without an end.

    regular(folder / ".lock", os.O_RDWR | os.O_CREAT)    a handle, or an error at once; never waits, follows no link
    created(folder / ".probe")                           a handle of a file that was not there
    content(folder / "error.3.json", most=1 << 16)       its bytes
    with replacing(path) as file                         the path leads to the old file, then to the whole new one

Nothing here imports jax.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    folder: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file, and return its handle. A file that is created is for this user only (mode 600).

    Args:
        path: its path; within `folder`, its name there.
        flags: as in `os.open`.
        folder: the handle of an open folder.
        follow: whether the path may be a symbolic link. Folders in the path may be links in any case.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder.
    """
    # without O_NONBLOCK, opening a pipe would wait for its other end
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "Is a symbolic link, not a regular file", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # the other end of a pipe, or a socket
            raise OSError(errno.ENXIO, "Is a pipe or a socket, not a regular file", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "Is not a regular file", os.fspath(path))
    return handle


def created(path: str | os.PathLike[str]) -> int:
    """Create a file that only this user can open, and return its handle, for reading and writing.

    Raises:
        FileExistsError: something has this name, perhaps a link.
        OSError: it cannot be created.
    """
    return regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def reading(path: str | os.PathLike[str], *, folder: int | None = None, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. The arguments and errors are the same as for `regular`."""
    return open(regular(path, folder=folder, follow=follow), "rb")


def content(path: str | os.PathLike[str], most: int, *, follow: bool = False) -> bytes:
    """Return the bytes of a regular file. The arguments are the same as for `regular`.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `most` bytes.
    """
    with reading(path, follow=follow) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"Is larger than {most:,} bytes", os.fspath(path))
    return found


def write_new(path: Path, data: bytes) -> None:
    """Write a file that was not there. If that fails, no part of it stays.

    Raises:
        FileExistsError: something has this name, perhaps a link.
        OSError: it cannot be written.
    """
    with open(created(path), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise


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
        with contextlib.suppress(OSError):  # some file systems cannot write the new name to disk, too
            sync_folder(target.parent)
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


def sync_folder(folder: Path) -> None:
    """Have the operating system write a folder's entries to disk, so that a power cut does not undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
