"""Check that folders and files can be written before any long work begins. Nothing here imports jax."""

import os
import tempfile
from pathlib import Path
from typing import Final

_ROOM: Final = bytes(256 * 1024)  # more than a picture takes


def writable_folder(flag: str, folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the folder, after making it if it does not exist.

    Args:
        flag: the flag that names it, for errors.
        folder: its path.

    Raises:
        ValueError: an empty name, something other than a folder, or a folder that can't be made or written to.
    """
    if not os.fspath(folder):  # Path("") would be the folder in which the program runs
        raise ValueError(f"{flag} has an empty name: give a folder")
    path = Path(folder)
    try:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{flag} {path} is not a folder: give one, or a name that is free")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be made ({error.strerror}): give another folder") from error
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")  # not on a full disk
        return path.resolve()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written to ({error.strerror}): give another folder") from error


def check_file(flag: str, file: Path, suffixes: tuple[str, ...]) -> None:
    """Check that a file can be written, by writing a quarter of a megabyte. An existing file stays as it is.

    Args:
        flag: the flag that names it, for errors.
        file: its path.
        suffixes: how its name may end.

    Raises:
        ValueError: its name ends in something else, its folder is missing, or it cannot be written.
    """
    if file.suffix.lower() not in suffixes:
        raise ValueError(f"{flag} {file} has the wrong suffix: give a name that ends in {' or '.join(suffixes)}")
    try:
        if not file.parent.is_dir():
            raise ValueError(f"{flag} {file}: there is no folder {file.parent}: make it, or give another file")
        target = file.resolve()  # for a link, the file that it points to
        is_new = not target.exists()
        if not is_new and not target.is_file() and not target.is_dir():
            raise ValueError(f"{flag} {file} is not a file that can be written: give another file")
        with target.open("ab") as opened:
            try:
                if is_new:  # an existing file provides its own room
                    opened.write(_ROOM)
                    opened.flush()
                    os.fsync(opened.fileno())
            finally:
                if is_new:
                    target.unlink()
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be written to ({error.strerror}): give another file") from error


def reason_of(error: Exception) -> str:
    """Return in one line why a file could not be written: the system's reason, or else the error's message."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())
