"""Find the records that processes have written of themselves, and remove those of processes that are gone.

    /run/user/1000/ipu_jax/3207-918273-3437d34c-4026531836.json  \\
                           3207-918273-3437d34c-4026531836.beacon  >  Record
    /proc/3207/stat                                              /

Everything in a folder is checked before it is believed: whose it is, that it is a file, its size, its names and types.
What is no record is ignored, and named. `ipu_jax/_record.py` writes records.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ipu_jax import _beacon, _record
from ipu_jax._beacon import Reading
from ipu_jax._processes import Identity, Process, living
from ipu_jax._record import DYNAMIC, FORMAT, STATIC, UnsafeFolderError

_LARGEST: Final = 1 << 20
_MOST: Final = 1 << 31
_OF_USERS: Final = Path("/run/user")
_ROOT: Final = 0


@dataclasses.dataclass(frozen=True)
class Ipu:
    """An IPU of a process: the device, and if they are known its place in the mesh and the stages on it."""

    id: int
    platform: str
    kind: str
    replica: int | None
    ipu: int | None
    stages: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """Hold what a process has written of itself, and what /proc says of it.

    Attributes:
        identity: of the process.
        process: what /proc says of it.
        command: its words.
        run: the name of poprun's run and attempt, which its instances share; None without poprun.
        instance, instances: its number, and how many there are.
        replicas, ipus_per_replica: of all instances; None before a mesh was made.
        ipus: those of this process.
        reading: what its beacon says; None if that cannot be read.
    """

    identity: Identity
    process: Process
    command: tuple[str, ...]
    run: str | None
    instance: int
    instances: int
    replicas: int | None
    ipus_per_replica: int | None
    ipus: tuple[Ipu, ...]
    reading: Reading | None


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Name a file or folder that lies where records do, and why it was not read."""

    path: str
    reason: str


def find(own: Identity) -> tuple[list[Record], list[Ignored]]:
    """Return the records of the processes that live, and what was ignored. Remove this user's that are left over.

    Args:
        own: the identity of this process, with which others are compared.
    """
    records: list[Record] = []
    ignored: list[Ignored] = []
    for folder, uid in _folders():
        try:
            with _record.opened(folder, uid) as handle:
                for name in sorted(os.listdir(handle)):
                    found = _found(name, handle, uid, own)
                    if isinstance(found, Record):
                        records.append(found)
                    elif found is not None:
                        ignored.append(Ignored(str(folder / name), found))
        except FileNotFoundError:
            continue
        except UnsafeFolderError as error:
            ignored.append(Ignored(str(folder), str(error)))
        except OSError as error:
            ignored.append(Ignored(str(folder), error.strerror or str(error)))
    return records, ignored


def _folders() -> Iterator[tuple[Path, int]]:
    """Yield the folders in which records may lie, with the user whose each must be. root sees those of all users."""
    chosen, uid = _record.chosen_folder(), os.geteuid()
    if chosen is not None:
        yield chosen, uid
        return
    found = {_OF_USERS / str(uid) / "ipu_jax": uid, _record.temporary_folder(uid): uid}
    runtime = _record.runtime_folder()
    if runtime is not None:
        found[runtime] = uid
    if uid == _ROOT:
        for parent, prefix, rest in ((_OF_USERS, "", "ipu_jax"), (Path(tempfile.gettempdir()), "ipu_jax-", "")):
            with contextlib.suppress(OSError):
                for name in os.listdir(parent):
                    number = name.removeprefix(prefix)
                    if name.startswith(prefix) and number.isascii() and number.isdecimal():
                        found.setdefault(parent / name / rest, int(number))
    yield from found.items()


def _found(name: str, folder: int, uid: int, own: Identity) -> Record | str | None:
    """Return the record that a file of a folder begins, why it is ignored, or None if it is another part of one."""
    identity, is_static = _record.identity_of(name), name.endswith(STATIC)
    if identity is None:
        return "has no name of a record"
    if not identity.counts_as(own):
        return "is of another container or host, or from before a restart of this one" if is_static else None
    found = living(identity)
    if found is None:
        if uid == os.geteuid():
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
        return None
    if not is_static:
        return None
    if found.uid != uid:
        return f"names a process of user {found.uid}"
    try:
        content = _content(name, folder, uid)
        values = json.loads(content)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            return f"is not of format {FORMAT}: another version of ipu_jax has written it"
        reading = _beacon.read_by(lambda: _beacon_of(identity, folder, uid))
        return _record_of(values, identity, found, reading)
    except FileNotFoundError:
        return None  # the process has just ended
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is no record: it is damaged"


def _beacon_of(identity: Identity, folder: int, uid: int) -> bytes | None:
    with contextlib.suppress(OSError):
        return _content(f"{identity}{DYNAMIC}", folder, uid)
    return None


def _content(name: str, folder: int, uid: int) -> bytes:
    """Return the content of a user's file. One that could stop or mislead a reader is refused."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise OSError("is no file, or too large for a record")
        if found.st_uid != uid:
            raise OSError(f"belongs to user {found.st_uid}, not {uid}")
        return file.read(_LARGEST)


def _record_of(values: dict[str, Any], identity: Identity, found: Process, reading: Reading | None) -> Record:
    """Return the record of a JSON's values; raise `KeyError` or `TypeError` if they are none of a record."""
    return Record(
        identity=identity,
        process=found,
        command=tuple(_of(str, word) for word in _of(list, values["command"])),
        run=_of(str | None, values["run"]),
        instance=_count(values["instance"]),
        instances=_count(values["instances"]),
        replicas=_count(values["replicas"], known=False),
        ipus_per_replica=_count(values["ipus_per_replica"], known=False),
        ipus=tuple(
            Ipu(
                id=_count(ipu["id"]),
                platform=_of(str, ipu["platform"]),
                kind=_of(str, ipu["kind"]),
                replica=_count(ipu.get("replica"), known=False),
                ipu=_count(ipu.get("ipu"), known=False),
                stages=tuple(_of(str, stage) for stage in _of(list, ipu.get("stages", []))),
            )
            for ipu in (_of(dict, ipu) for ipu in _of(list, values["ipus"]))
        ),
        reading=reading,
    )


def _count(value: Any, *, known: bool = True) -> Any:
    """Return how many there are, or None if that need not be known; raise `TypeError` for anything else."""
    if value is None and not known:
        return None
    if type(value) is not int or not 0 <= value <= _MOST:
        raise TypeError(f"{value!r} is no number of processes, replicas or IPUs")
    return value


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value
