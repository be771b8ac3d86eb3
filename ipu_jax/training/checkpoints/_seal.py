"""Seal a folder of files: write the checksums of all files and their metadata to a file that is written last.

    step-300.unsealed/...                 written by orbax
    step-300.unsealed/checksums.0.json    by each instance, of the files that it wrote
    step-300.unsealed/ipu_jax.json        by instance 0, when all checksums are there: the seal
    step-300                              the same folder, renamed by instance 0

A folder without a seal is not a checkpoint. A file that is missing, too short or changed does not match its seal.
Tensorstore has checksums for its own indices, but none for the arrays: a wrong bit is read as a wrong number.

Nothing here imports jax.
"""

import errno
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.opening import content, reading, sync_folder, write_new
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError

SEAL: Final = "ipu_jax.json"
FORMAT: Final = 1

_CHUNK: Final = 1 << 20
_MOST: Final = 1 << 28  # bytes of a seal


def as_plain(name: str, value: Json) -> Json:
    """Return a value as it comes back from JSON.

    Raises:
        ValueError: it is not plain data.

    >>> as_plain("extra", {"lr": 0.1, "sizes": [1, 2]})
    {'lr': 0.1, 'sizes': [1, 2]}
    """
    try:
        text = json.dumps(value, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}={value!r} is not plain data ({error}): give numbers, strings, None, lists and dicts of these"
        ) from error
    back = json.loads(text)
    if back != value and value == value:  # tuples become lists, and numeric keys become strings
        raise ValueError(f"{name}={value!r} would come back as {back!r}: give lists, and dicts with strings as keys")
    return back


def is_same(one: Json, other: Json) -> bool:
    """Return whether two values of plain data are stored the same, up to the order of names.

    >>> is_same({"a": 1, "b": None}, {"b": None, "a": 1}), is_same(1, True)
    (True, False)
    """
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def write_checksums(folder: Path, instance: int, instances: int) -> None:
    """Write the checksums of the files that an instance wrote; instance 0 includes files of no instance.

    Raises:
        OSError: a file cannot be read or written.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    own = {
        name: list(_checksum(folder / name))
        for name in names
        if _writer(name, instances) == instance and not name.startswith("checksums.") and name != SEAL
    }
    _write(folder / f"checksums.{instance}.json", own)


def write_seal(folder: Path, values: dict[str, Json], instances: int, *, seconds: float) -> None:
    """Write the seal when the checksums of all instances are there.

    Raises:
        CheckpointError: some checksums did not come in time.
        OSError: a file cannot be read or written.
    """
    parts = [folder / f"checksums.{instance}.json" for instance in range(instances)]
    deadline = time.monotonic() + seconds
    while missing := [part.name for part in parts if not part.exists()]:
        if time.monotonic() > deadline:
            raise CheckpointError(f"{folder} has no {', '.join(missing)} after {seconds:g} s: an instance is gone")
        time.sleep(0.01)
    files: dict[str, Json] = {}
    for part in parts:
        files |= _read(part)
        files[part.name] = list(_checksum(part))
    _write(folder / SEAL, {"format": FORMAT, **values, "files": files})
    sync_folder(folder)


def read_seal(folder: Path) -> dict[str, Json]:
    """Return the content of a seal.

    Raises:
        CheckpointError: there is no seal, or it is damaged. The message says which.
        UnreadableError: the operating system cannot read it, or it is of a newer version.
    """
    try:
        found = _read(folder / SEAL)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"it has no seal, {SEAL}" if folder.is_dir() else "there is no such folder") from None
    except OSError as error:
        raise UnreadableError(
            f"{SEAL} cannot be read ({error.strerror}): see that this user can read it", error.errno
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{SEAL} is damaged ({error})") from None
    number = found.get("format") if isinstance(found, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise UnreadableError(f"it has format {number}, and this version reads format {FORMAT}: use a newer ipu_jax")
    wrong = f"its format is {number!r}" if number != FORMAT or isinstance(number, bool) else _wrong_field(found)
    if wrong:
        raise CheckpointError(f"{SEAL} is damaged ({wrong})")
    return found


def check_files(folder: Path, files: dict[str, Sequence[int]], own: Iterable[str]) -> list[str]:
    """Return the names of the `own` files that don't match their seal, each with what is wrong.

    Raises:
        OSError: a file exists but cannot be read; or a file, also one that the seal does not list, is a pipe or a
            device, which orbax would wait for.
    """
    wrong: list[str] = []
    for path in folder.rglob("*"):
        if not path.is_dir() and path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "Is not a regular file", str(path))
    for name in own:
        size, checksum = files[name]
        try:
            if (folder / name).stat().st_size != size:
                wrong.append(f"{name} has another size")
            elif _checksum(folder / name) != (size, checksum):
                wrong.append(f"{name} was changed")
        except (FileNotFoundError, NotADirectoryError):
            wrong.append(f"{name} is missing")
    return wrong


def _wrong_field(found: dict[str, Json]) -> str:
    """Return what is missing from a seal, or differs from the form of `write_seal`, or ""."""
    for name, right in _FIELDS.items():
        if name not in found:
            return f"it has no {name}"
        if not right(found[name]):
            return f"its {name} is {str(found[name])[:80]!r}"
    outside = [name for name in found["files"] if os.path.isabs(name) or ".." in Path(name).parts]
    return f"it names {outside[0][:80]!r}, which is outside its folder" if outside else ""


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list_of_files(value: Json) -> bool:
    return isinstance(value, dict) and all(
        "\0" not in name and isinstance(entry, list) and len(entry) == 2 and all(map(_is_count, entry))
        for name, entry in value.items()
    )


_FIELDS: Final[dict[str, Callable[[Json], bool]]] = {
    "step": _is_count,
    "number": _is_count,
    "files": _is_list_of_files,
    "describes": lambda value: isinstance(value, dict),
    "model": lambda value: isinstance(value, dict),
    "feed": lambda value: value is None or isinstance(value, dict),
    "extra": lambda value: True,
}


def _writer(name: str, instances: int) -> int:
    """Return the instance that writes a file's checksum: the writer in the name that orbax gives the file, or 0."""
    first = name.split(os.sep)[0]
    number = first.removeprefix("ocdbt.process_")
    return int(number) if number.isdigit() and int(number) < instances else 0


def _checksum(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    size = checksum = 0
    with reading(path) as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


def _write(path: Path, values: dict[str, Json]) -> None:
    """Write a file atomically: a line with its checksum, then the content."""
    text = json.dumps(values).encode()
    temporary = path.with_suffix(".tmp")
    write_new(temporary, b"%d\n" % zlib.crc32(text) + text)
    temporary.rename(path)


def _read(path: Path) -> Json:
    checksum, _, text = content(path, _MOST).partition(b"\n")
    if not checksum.isdigit() or int(checksum) != zlib.crc32(text):
        raise ValueError("its checksum differs")
    return json.loads(text)
